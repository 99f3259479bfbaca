"""The native GEMMs of `moe_experts`: their code on an emulated cluster, against the plain expression."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests import binary
from tests.experts_cases import CALLS, ROUTINGS, Sizes, expected, make_operands, poisoned
from tests.experts_emulated import emulated, rows_of
from tests.tolerances import KERNEL, assert_close
from weaveopt import _native
from weaveopt.errors import WeaveError
from weaveopt.ops.moe_experts import hopper
from weaveopt.ops.moe_experts.call import ExpertsCall, Kernels, decode
from weaveopt.ops.moe_experts.plan import even_clusters
from weaveopt.ops.moe_experts.reference import reference
from weaveopt.ops.moe_experts.shapes import Operands, Shape

BF16 = torch.bfloat16
SILU, PLAIN = CALLS[0], CALLS[3]
SMALL = Sizes(tokens=23, choices=2, experts=3, hidden=72, inner=40, bias=True)
"""Depths of two stages and of one, neither whole; columns that fill no tile."""


def check(operands: Operands, call: ExpertsCall, what: str, num_sms: int = 4, seed: int = 0, group: int = 2) -> None:
    got = emulated(poisoned(operands), call, num_sms, seed, group)
    assert_close(got, reference(operands, call), KERNEL, what)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_activation(routing: str) -> None:
    for seed, call in enumerate(CALLS):
        operands = make_operands(replace(SMALL, bias=seed % 2 == 0), call, BF16, seed, routing)
        check(operands, call, f"{call} {routing}", seed=seed)
        got = emulated(operands, call)
        assert_close(got, expected(operands, call).to(BF16), KERNEL, f"{call} {routing}")


@pytest.mark.parametrize("counts", [(256, 0, 1), (257, 300), (64, 65, 128), (129, 63), (0, 0, 511), (512,)])
@pytest.mark.parametrize("call", [SILU, PLAIN], ids=["gated", "plain"])
def test_experts_whose_rows_end_anywhere(counts: tuple[int, ...], call: ExpertsCall) -> None:
    """In either panel and either consumer of a tile, and just behind one."""
    sizes = Sizes(tokens=sum(counts), choices=1, experts=len(counts), hidden=136, inner=264)
    operands = make_operands(sizes, call, BF16, 1)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    mixed = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))]
    check(replace(operands, experts=mixed[:, None]), call, str(counts))


@pytest.mark.parametrize(("num_sms", "group"), [(2, 1), (3, 4), (6, 2), (20, 8)])
def test_tiles_are_shared_out(num_sms: int, group: int) -> None:
    """Among one cluster and more clusters than there are tiles, in groups of any size; an SM may be left over."""
    sizes = Sizes(tokens=330, choices=2, experts=3, hidden=520, inner=136, bias=True)
    check(make_operands(sizes, SILU, BF16, 3, "skewed"), SILU, f"{num_sms} {group}", num_sms=num_sms, group=group)


def test_any_order_of_threads_and_copies() -> None:
    """More stages than the ring has, so that both parities of each come; the same bits in any order."""
    sizes = Sizes(tokens=200, choices=2, experts=2, hidden=328, inner=392)
    operands = make_operands(sizes, SILU, BF16, 4, "some_foreign")
    first = emulated(operands, SILU, seed=0)
    for seed in range(1, 6):
        assert torch.equal(emulated(operands, SILU, seed=seed * 1000), first), seed
    assert_close(first, reference(operands, SILU), KERNEL)


def test_rows_of_x_may_lie_apart() -> None:
    operands = make_operands(SMALL, SILU, BF16, 5)
    apart = torch.full((SMALL.tokens, 104), math.nan, dtype=BF16)
    apart[:, 16:88] = operands.x
    turned = replace(operands, x=apart[:, 16:88])
    assert torch.equal(emulated(turned, SILU), emulated(operands, SILU))


def test_what_is_not_finite_stays_in_its_row() -> None:
    operands = make_operands(replace(SMALL, bias=False), SILU, BF16, 6)
    want = emulated(operands, SILU)
    operands.x[4] = math.nan
    got = emulated(operands, SILU)
    others = [row for row in range(SMALL.tokens) if row != 4]
    assert got[4].isnan().all() and torch.equal(got[others], want[others])


def test_no_own_rows_write_nothing() -> None:
    operands = make_operands(SMALL, SILU, BF16, 7, "all_foreign")
    inner, results = rows_of(operands, SILU, 4, 0, 2)
    assert inner.unique().numel() == results.unique().numel() == 1
    assert (emulated(operands, SILU) == 0).all()


FEW = Sizes(tokens=0, choices=1, experts=0, hidden=392, inner=200, bias=True)
"""Of the first product 4 stages, the last not whole; of the second 2."""


@pytest.mark.parametrize(
    ("counts", "splits", "call"),
    [
        ((1, 0, 8, 9), 1, SILU),
        ((16, 17), 2, CALLS[5]),
        ((24, 0, 25), 4, PLAIN),
        ((32, 33, 2), 8, CALLS[1]),
        ((70,), 2, SILU),
    ],
)
def test_few_rows_of_every_width(counts: tuple[int, ...], splits: int, call: ExpertsCall) -> None:
    """Rows of 8, 16, 24 and 32 in a multiply and of several tiles; clusters of every size, also of more CTAs than there
    are stages; some choices are foreign."""
    sizes = replace(FEW, tokens=sum(counts) + 3, experts=len(counts))
    operands = make_operands(sizes, call, BF16, 1)
    ids = torch.cat(
        [torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)), torch.tensor([-1, 9, 9])]
    )
    mixed = replace(
        operands, experts=ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))][:, None]
    )
    got = emulated(poisoned(mixed), call, num_sms=2 * splits, splits=splits)
    assert_close(got, reference(mixed, call), KERNEL, f"{counts} {splits} {call}")


def test_few_rows_in_any_order_of_threads_and_copies() -> None:
    """More stages than the ring has, and more tiles than CTAs that add up: both parities of each. The same bits."""
    sizes = Sizes(tokens=6, choices=2, experts=2, hidden=1544, inner=136)
    operands = make_operands(sizes, SILU, BF16, 4, "uniform")
    first = emulated(operands, SILU, num_sms=2, splits=2)
    assert_close(first, reference(operands, SILU), KERNEL)
    for seed in range(1, 4):
        assert torch.equal(emulated(operands, SILU, num_sms=2 * seed, seed=seed * 1000, splits=2), first), seed


def test_tiles_of_the_plan_are_those_of_the_kernels() -> None:
    """No routing needs more of them than the table has room for."""
    large = Shape(8192, 8, 128, 2048, 768)
    assert hopper.plan(large, Kernels.HOPPER, 132).rows == _native.EXPERT_TILE_ROWS
    assert hopper.plan(large, Kernels.HOPPER_FEW, 132).rows == _native.EXPERT_FEW_TILE_ROWS
    for rows, experts, kernels in itertools.product((1, 300, 700), (1, 2, 3), (Kernels.HOPPER, Kernels.HOPPER_FEW)):
        shape = Shape(rows, 1, experts, 64, 64)
        how = hopper.plan(shape, kernels, 132)
        for counts in itertools.product(range(0, rows + 1, 50), repeat=experts):
            if sum(counts) <= rows:
                assert sum(-(-count // how.rows) for count in counts) <= how.max_tiles(shape)


def test_few_tiles_are_shared_by_clusters() -> None:
    """As few CTAs as fill the SMs; none where tiles are many, and none for a depth too short to be cut."""
    assert [even_clusters(items, 4096, 132, 8) for items in (8, 24, 66, 132, 5000)] == [8, 8, 4, 2, 1]
    assert even_clusters(8, 512, 132, 8) == 1 and even_clusters(8, 1024, 132, 8) == 2
    decode = hopper.plan(Shape(1, 2, 8, 6144, 16384), Kernels.HOPPER_FEW, 132)
    assert decode.down_splits > 1, "2 experts of 48 tiles are fewer than the SMs"


def test_a_call_says_whose_kernels_it_wants() -> None:
    call = replace(SILU, kernels=Kernels.HOPPER, table=((8, Kernels.HOPPER_FEW), (100, Kernels.TRITON)))
    assert decode(call.encode()) == call != SILU
    found = [call.kernels_at(tokens) for tokens in (1, 8, 9, 100, 101)]
    assert found == [Kernels.HOPPER_FEW] * 2 + [Kernels.TRITON] * 2 + [Kernels.HOPPER]
    for wrong in (((8, "none"),), ((8, Kernels.TRITON), (8, Kernels.HOPPER))):
        with pytest.raises(WeaveError):
            decode(replace(call, table=wrong).encode())


def test_without_such_a_gpu_they_take_nothing() -> None:
    operands = make_operands(Sizes(tokens=512, experts=2), SILU, BF16, 1)
    assert hopper.unsupported(operands, Shape(512, 2, 2, 40, 24))


@binary.needs_cuda_part
def test_machine_code_multiplies_and_copies_asynchronously() -> None:
    if "sm_90a" not in binary.architectures():
        pytest.skip(f"built for {_native.CUDA_ARCHS}: nothing of it runs on Hopper alone")
    names = [name for name in binary.kernels("sm_90a") if "grouped_gemm" in name]
    assert len(names) == 6, names
    gathering = []
    few = [name for name in binary.kernels("sm_90a") if "few_rows_gemm" in name]
    assert len(few) == 6, few
    for name, text in binary.instructions("sm_90a", few).items():
        assert all(f"HGMMA.64x{columns}x16.F32" in text for columns in (8, 16, 24, 32)), name
        assert "UTMALDG.3D" in text and "LDGSTS" in text and "ACQBULK" in text, name
    for name, text in binary.instructions("sm_90a", names).items():
        assert "HGMMA.64x256x16.F32" in text and "UTMALDG.3D.MULTICAST" in text and "ACQBULK" in text, name
        gathering.append("LDGSTS" in text)
    assert sorted(gathering) == [False] * 2 + [True] * 4
