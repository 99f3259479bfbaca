"""Recursive doubling between GPUs of several hosts: the kernel's own text against the reference, on emulated ranks.

What ranks write to each other arrives late and in any order, in pieces of 8 bytes, and calls follow one another.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.emulation.doubling_emulated import EPS, MISSING, POISON, Case, Made, run
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from tests.ranks.tcp_ranks import make_call
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import decode
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.reference import reference
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Lifetime, PlacedBuffer
from weaveopt.records.norm import NormKind, NormSpec

NORM = NormSpec(NormKind.RMS, EPS, 0.0, False)
TRANSFERS = {"packets": (False,), "flagged rows and packets": (True, True, False)}


def expect_reference(case: Case, made: Made) -> None:
    for at, tokens in enumerate(case.tokens):
        name = str(case.dtype).removeprefix("torch.")
        call = replace(make_call(case.world, case.hosts, Algorithm.DOUBLING, name), norm=NORM, hidden=case.hidden)
        operands = EpilogueOperands(residual=made.residual[at], weight=made.weight)
        want = reference(list(made.partial[at]), operands, call)
        for got, expected in zip((made.normalized[at], made.sum[at]), want, strict=True):
            if got is made.normalized[at] and not case.norm:
                assert (got == POISON).all(), "nobody asked for normalized rows"
                continue
            what = f"{case}, call {at} of {tokens} tokens"
            for rank in range(case.world):
                assert_close(got[rank], expected, KERNEL, f"{what}, rank {rank}")
                assert torch.equal(got[rank], got[0]), f"{what}: rank {rank} has other bits than rank 0"


@pytest.mark.parametrize("flagged", TRANSFERS.values(), ids=TRANSFERS)
@pytest.mark.parametrize("direct", [0, 1, 2])
@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 8])
def test_calls_in_a_row(hosts: int, direct: int, flagged: tuple[bool, ...]) -> None:
    for seed in range(3):
        case = Case(hosts, (3, 5, 1, 5, 2), flagged, direct=direct, without_residual=1, seed=seed)
        made, wrong = run(case)
        assert not wrong, f"{case}: {wrong}"
        expect_reference(case, made)


@pytest.mark.parametrize("flagged", TRANSFERS.values(), ids=TRANSFERS)
@pytest.mark.parametrize("mixed", [False, True], ids=["host by host", "through the hosts in turn"])
@pytest.mark.parametrize(("hosts", "ranks_of_host"), [(2, 2), (3, 2), (2, 3), (4, 2), (2, 8), (5, 2)])
def test_hosts_of_several_ranks(hosts: int, ranks_of_host: int, mixed: bool, flagged: tuple[bool, ...]) -> None:
    """More ranks than tokens too: then some add no row."""
    for seed, direct in ((0, 0), (1, 1), (2, 2)):
        case = Case(
            hosts, (3, 5, 1, 9, 2), flagged, direct=direct, without_residual=1, seed=seed,
            ranks_of_host=ranks_of_host, mixed=mixed,
        )  # fmt: skip
        made, wrong = run(case)
        assert not wrong, f"{case}: {wrong}"
        expect_reference(case, made)


@pytest.mark.parametrize("flagged", [(False,), (True,)], ids=["packets", "flagged rows"])
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
        Case(2, (7, 2), hidden=24, dtype=torch.float32, ranks_of_host=2),
        Case(2, (7, 2, 5), hidden=1032, vecs=2, ranks_of_host=3, num_ctas=1),
        Case(3, (2, 6), hidden=1032, vecs=4, ranks_of_host=2, num_ctas=3, direct=1),
        Case(2, (9, 1, 9, 2), hidden=520, norm=False, ranks_of_host=2),
    ],
    ids=[
        "fp32",
        "several vectors",
        "several warps",
        "no norm",
        "two vectors",
        "two of few threads",
        "four, plain",
        "several ranks, fp32",
        "several ranks, two vectors",
        "several ranks, four vectors",
        "several ranks, no norm",
    ],
)
def test_rows(case: Case, flagged: tuple[bool, ...]) -> None:
    case = replace(case, flagged=flagged)
    made, wrong = run(case)
    assert not wrong, wrong
    expect_reference(case, made)


def test_bits_depend_neither_on_what_comes_first_nor_on_how_rows_travel() -> None:
    first, *others = (
        run(Case(5, (3, 2), flagged, seed=4, num_ctas=ctas, direct=ctas % 2))[0]
        for ctas in (1, 2)
        for flagged in ((False,), (True,))
    )
    for other in some(others):
        assert all(torch.equal(*pair) for pair in zip(some(first.normalized), other.normalized, strict=True))


@pytest.mark.parametrize("what", MISSING)
def test_a_flag_that_overtakes_its_row_is_seen(what: str) -> None:
    """The kernel without it goes wrong here, so that it goes right says something."""
    direct = int(what.startswith("mapped") or what == "the barrier behind the wait")
    for seed in range(20):
        case = Case(2, (3, 5, 4), (True,), hidden=1032, direct=direct, seed=seed)
        made, wrong = run(case, what)
        assert not wrong, wrong
        try:
            expect_reference(case, made)
        except AssertionError:
            return
    pytest.fail(f"nothing shows that {what} is missing")


@pytest.mark.parametrize(
    ("hosts", "of_host", "slots"),
    [(2, 1, 1), (3, 1, 2), (4, 1, 2), (5, 1, 3), (1024, 1, 10), (2, 2, 3), (2, 8, 15), (1024, 4, 16)],
)
def test_arenas_have_two_halves_of_a_slot_for_each_message(hosts: int, of_host: int, slots: int) -> None:
    """A rank adds its share of the rows, and no message is longer."""

    def buffers(*table: KernelRow) -> dict[str, PlacedBuffer]:
        call = replace(
            make_call(hosts * of_host, hosts, Algorithm.DOUBLING, "bfloat16"), fabric=Fabric.NVSHMEM, hidden=4096,
            max_tokens=table[-1].max_tokens, table=table,
        )  # fmt: skip
        return {buffer.name: buffer for buffer in memory_plan("0", [decode(call.encode())]).buffers}

    def halves(bytes_of_slot: int) -> int:
        return 2 * -(-slots * bytes_of_slot // 256) * 256

    packets = KernelRow(32, Algorithm.DOUBLING, Transfer.PACKET)
    rows = KernelRow(96, Algorithm.DOUBLING, Transfer.FLAGGED_ROW)
    for table in ((packets,), (rows,), (packets, rows)):
        found = buffers(*table)
        inbox, outbox = found["host_inbox"], found["host_outbox"]
        assert inbox.num_bytes == outbox.num_bytes == halves(16 + 32 // of_host * 4096 * 8 * (packets in table))
        assert inbox.lifetime is outbox.lifetime is Lifetime.ARENA and inbox.fill == outbox.fill == 0
        assert ("host_sums" in found) is (hosts * of_host > 2)
        if rows not in table:
            assert found.keys() <= {"host_inbox", "host_outbox", "host_sums"}
            continue
        share = 96 // of_host
        assert found["host_row_inbox"].num_bytes == found["host_row_outbox"].num_bytes == halves(share * 4096 * 4)
        assert found["host_flags"].num_bytes == halves(share * 8) and found["host_flags"].fill == 0
        assert hosts * of_host == 2 or found["host_sums"].num_bytes == share * 4096 * 4


@pytest.mark.parametrize("flagged", [(False,), (True,)], ids=["packets", "flagged rows"])
def test_another_site_and_a_missing_rank_are_named(flagged: tuple[bool, ...]) -> None:
    assert "differs from rank" in run(Case(4, (2, 2), flagged, other_site=2))[1]
    several = Case(2, (2, 2), flagged, ranks_of_host=2)
    assert "differs from rank" in run(replace(several, other_site=2))[1]
    assert "waits in vain for rank" in run(replace(several, absent_rank=3))[1]
    wrong = run(Case(2, (2, 2), flagged, absent_rank=1))[1]
    assert wrong.startswith("rank 0 waits in vain for rank 1 at slot 0: expected 2"), wrong
