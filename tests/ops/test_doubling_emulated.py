"""Recursive doubling between GPUs of several hosts: the kernel's own text against the reference, on emulated ranks.

What ranks write to each other arrives late and in any order, in pieces of 8 bytes, and calls follow one another.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.hosts_emulated import EPS, POISON, Case, Made, run
from tests.tcp_ranks import make_call
from tests.tolerances import KERNEL, assert_close
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Lifetime
from weaveopt.records.norm import NormKind, NormSpec
from weaveopt.reductions.buffers import memory_plan
from weaveopt.reductions.call import decode
from weaveopt.reductions.operands import Operands
from weaveopt.reductions.reference import reference
from weaveopt.reductions.variant import Algorithm, KernelRow, Transfer

NORM = NormSpec(NormKind.RMS, EPS, 0.0, False)


def expect_reference(case: Case, made: Made) -> None:
    for at, tokens in enumerate(case.tokens):
        name = str(case.dtype).removeprefix("torch.")
        call = replace(make_call(case.hosts, case.hosts, Algorithm.DOUBLING, name), norm=NORM, hidden=case.hidden)
        operands = Operands(residual=made.residual[at], weight=made.weight)
        want = reference(list(made.partial[at]), operands, call)
        for got, expected in zip((made.normalized[at], made.sum[at]), want, strict=True):
            if got is made.normalized[at] and not case.norm:
                assert (got == POISON).all(), "nobody asked for normalized rows"
                continue
            what = f"{case}, call {at} of {tokens} tokens"
            for rank in range(case.hosts):
                assert_close(got[rank], expected, KERNEL, f"{what}, rank {rank}")
                assert torch.equal(got[rank], got[0]), f"{what}: rank {rank} has other bits than rank 0"


@pytest.mark.parametrize("direct", [0, 1, 2])
@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 8])
def test_calls_in_a_row(hosts: int, direct: int) -> None:
    for seed in range(3):
        case = Case(hosts, (3, 5, 1, 5, 2), direct=direct, without_residual=1, seed=seed)
        made, wrong = run(case)
        assert not wrong, f"{case}: {wrong}"
        expect_reference(case, made)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, (2, 1, 3), hidden=24, dtype=torch.float32),
        Case(4, (1, 3, 2), hidden=264, vecs=4, num_ctas=1),
        Case(2, (4, 1, 4), hidden=520, direct=1),
        Case(2, (2,) * 12, hidden=520, norm=False),
        Case(2, (3, 1, 3, 2), hidden=520, vecs=2, direct=1),
        Case(4, (2, 3, 1), hidden=1032, vecs=2, without_residual=1, num_ctas=2),
        Case(8, (1, 2), hidden=1032, vecs=4),
    ],
    ids=["fp32", "several vectors", "several warps", "no norm", "two vectors", "two of few threads", "four, plain"],
)
def test_rows(case: Case) -> None:
    made, wrong = run(case)
    assert not wrong, wrong
    expect_reference(case, made)


def test_bits_do_not_depend_on_what_comes_first() -> None:
    one, other = (run(Case(5, (3, 2), seed=4, num_ctas=ctas, direct=ctas % 2))[0] for ctas in (1, 2))
    assert all(torch.equal(*pair) for pair in zip(one.normalized, other.normalized, strict=True))


@pytest.mark.parametrize(("hosts", "slots"), [(2, 1), (3, 2), (4, 2), (5, 3), (1024, 10)])
def test_arenas_have_two_halves_of_a_slot_for_each_step(hosts: int, slots: int) -> None:
    call = replace(
        make_call(hosts, hosts, Algorithm.DOUBLING, "bfloat16"), fabric=Fabric.NVSHMEM, hidden=4096, max_tokens=32,
        table=(KernelRow(32, Algorithm.DOUBLING, Transfer.PACKET),),
    )  # fmt: skip
    found = {buffer.name: buffer for buffer in memory_plan("0", [decode(call.encode())]).buffers}
    inbox, outbox = found["host_inbox"], found["host_outbox"]
    assert inbox.num_bytes == outbox.num_bytes == 2 * -(-slots * (16 + 32 * 4096 * 8) // 256) * 256
    assert inbox.lifetime is outbox.lifetime is Lifetime.ARENA and inbox.fill == outbox.fill == 0
    assert ("host_sums" in found) is (hosts > 2)


def test_another_site_and_a_missing_rank_are_named() -> None:
    assert "differs from rank" in run(Case(4, (2, 2), other_site=2))[1]
    wrong = run(Case(2, (2, 2), absent_rank=1))[1]
    assert wrong.startswith("rank 0 waits in vain for rank 1 at slot 0: expected 2"), wrong
