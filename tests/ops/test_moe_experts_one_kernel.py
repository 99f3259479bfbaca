"""Both native GEMMs of `moe_experts` in one kernel: its code on emulated clusters that run at the same time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.emulation import binary
from tests.emulation.experts_emulated import OneKernel, emulated, lagged_items, rows_of
from tests.graphs.experts_cases import CALLS, ROUTINGS, Sizes, make_operands, poisoned
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt import _native
from weaveopt.ops.experts import hopper
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.reference import reference
from weaveopt.ops.experts.shapes import ExpertOperands, checked_shape

BF16 = torch.bfloat16
SILU, PLAIN, CLAMPED = CALLS[0], CALLS[3], CALLS[5]
SMALL = Sizes(tokens=23, choices=2, experts=3, hidden=72, inner=40, bias=True)
"""Depths of two stages and of one: a ticket is taken and signalled in the same stage."""
DEEP = Sizes(tokens=200, choices=2, experts=3, hidden=328, inner=648)
"""Depths of more stages than the ring has; several columns in both GEMMs."""
NUM_SMS = 6


def check(
    operands: ExpertOperands, call: ExpertsCall, what: str, one: OneKernel, seed: int = 0, group: int = 2
) -> None:
    """Close to the reference, and the bits of two kernels."""
    got = emulated(poisoned(operands), call, NUM_SMS, seed, group, one=one)
    assert_close(got, reference(operands, call), KERNEL, what)
    assert torch.equal(got, emulated(poisoned(operands), call, group=group)), what


@pytest.mark.parametrize("lag", range(4))
def test_items_come_a_lag_behind_all_that_they_read(lag: int) -> None:
    """Each item once; one of the second GEMM after its group's and `lag` further groups' of the first, until there are
    no more; and as early as that allows."""
    for tiles, group, first, second in itertools.product((1, 2, 3, 7, 16, 17), (1, 2, 8), (1, 3), (1, 2)):
        items = lagged_items(tiles, group, (first, second), lag)
        want = {
            (which, tile, column)
            for which, columns in ((False, first), (True, second))
            for tile, column in itertools.product(range(tiles), range(columns))
        }
        assert len(items) == len(want) and set(items) == want
        begun = 0
        for second_gemm, tile, _ in items:
            ahead = min((tile // group + 1 + lag) * group, tiles) * first
            if second_gemm:
                assert begun >= ahead, (tiles, group, first, second, tile)
            else:
                begun += 1
        last = max(at for at, (second_gemm, *_) in enumerate(items) if not second_gemm)
        left = sum(second_gemm for second_gemm, *_ in items[last:])
        assert left <= (lag + 1) * group * second, "those that could have come earlier"


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_activation(routing: str) -> None:
    for seed, call in enumerate(some(CALLS)):
        sizes = replace(SMALL, bias=seed % 2 == 0, transposed=seed % 3 == 0)
        one = OneKernel(lag=seed % 3, resident=1 + seed % 3)
        check(make_operands(sizes, call, BF16, seed, routing), call, f"{call} {routing}", one, seed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("call", [SILU, PLAIN, CLAMPED], ids=["gated", "plain", "interleaved"])
def test_depths_of_many_stages(call: ExpertsCall, transposed: bool) -> None:
    sizes = replace(DEEP, bias=True, transposed=transposed)
    for seed, lag in enumerate((0, 1, 2)):
        operands = make_operands(sizes, call, BF16, seed, "some_foreign")
        check(operands, call, f"{call} {lag}", OneKernel(lag), seed, group=1 + seed)


@pytest.mark.parametrize("counts", [(288, 0, 1), (289, 300), (161, 63), (0, 256, 513)])
def test_experts_whose_rows_end_anywhere(counts: tuple[int, ...]) -> None:
    """Tiles of which a CTA has no rows are counted too."""
    sizes = Sizes(tokens=sum(counts), choices=1, experts=len(counts), hidden=136, inner=264)
    operands = make_operands(sizes, SILU, BF16, 1)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    mixed = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))]
    check(replace(operands, experts=mixed[:, None]), SILU, str(counts), OneKernel(0))


@pytest.mark.parametrize("resident", [1, 2, 3, 5])
def test_clusters_need_not_run_side_by_side(resident: int) -> None:
    """One that begins when others have ended waits for none."""
    operands = make_operands(DEEP, SILU, BF16, 4, "some_foreign")
    want = emulated(operands, SILU)
    for seed in range(3):
        one = OneKernel(seed, resident)
        assert torch.equal(emulated(operands, SILU, 10, seed * 1000, 2, one=one), want), f"{resident} {seed}"


def test_many_items_of_the_second_gemm_by_one_cluster() -> None:
    """More than there are tickets, while a thread of the producer that loads nothing of them may be late."""
    operands = make_operands(Sizes(tokens=12, choices=2, experts=2, hidden=8208, inner=72), SILU, BF16, 1)
    want = emulated(operands, SILU)
    for seed in range(8):
        assert torch.equal(emulated(operands, SILU, 2, seed, one=OneKernel(resident=1)), want), seed


def test_more_clusters_than_items() -> None:
    operands = make_operands(SMALL, SILU, BF16, 5)
    assert torch.equal(emulated(operands, SILU, 40, one=OneKernel(resident=20)), emulated(operands, SILU))


def test_rows_that_nobody_waits_for_are_seen() -> None:
    """Tests of this page would find a kernel that reads rows before they are stored."""
    operands = make_operands(DEEP, SILU, BF16, 6)
    want = emulated(operands, SILU)
    careless = OneKernel(lag=0, resident=3, counts_are_ignored=True)
    assert not all(torch.equal(emulated(operands, SILU, NUM_SMS, seed, 1, one=careless), want) for seed in range(3))


def test_what_is_not_finite_stays_in_its_row() -> None:
    operands = make_operands(replace(SMALL, bias=False), SILU, BF16, 6)
    want = emulated(operands, SILU, one=OneKernel())
    operands.x[4] = math.nan
    got = emulated(operands, SILU, one=OneKernel())
    others = [row for row in range(SMALL.tokens) if row != 4]
    assert got[4].isnan().all() and torch.equal(got[others], want[others])


def test_no_own_rows_write_nothing() -> None:
    operands = make_operands(SMALL, SILU, BF16, 7, "all_foreign")
    inner, results = rows_of(operands, SILU, 4, 0, 2, one=OneKernel())
    assert inner.unique().numel() == results.unique().numel() == 1


def test_weights_of_which_one_lies_transposed_are_of_two_kernels() -> None:
    for transposed in (False, True):
        operands = make_operands(replace(SMALL, transposed=transposed), SILU, BF16, 1)
        shape = checked_shape(operands, SILU)
        how = hopper.plan_of(ExpertsKernel.ONE, operands, shape)
        assert how.one_kernel and replace(how, one_kernel=False) == hopper.plan_of(
            ExpertsKernel.HOPPER, operands, shape
        )
        other = make_operands(replace(SMALL, transposed=not transposed), SILU, BF16, 1).down
        assert not hopper.plan_of(ExpertsKernel.ONE, replace(operands, down=other), shape).one_kernel


@binary.needs_cuda_part
def test_machine_code_of_both_gemms() -> None:
    """All of both in each kernel, and no register of a thread in memory, but for a number that the producer of pairs
    reads and writes once an item."""
    if "sm_90a" not in binary.architectures():
        pytest.skip(f"built for {_native.CUDA_ARCHS}: nothing of it runs on Hopper alone")
    names = [name for name in binary.kernels("sm_90a") if "10both_gemms" in name]
    assert len(names) == 10, names
    for name, text in binary.instructions("sm_90a", names).items():
        assert all(text.count(f"HGMMA.64x{columns}x16.F32") == 8 for columns in range(8, 145, 8)), name
        for instruction in ("UTMALDG.3D.MULTICAST", "UTMALDG.2D", "LDGSTS", "ATOMG", "STAS.128", "ACQBULK"):
            assert instruction in text, f"{name}: {instruction}"
        spilled = text.count("STL") + text.count("LDL")
        assert spilled <= (6 if "ProductE1E" in name else 0), f"{name}: {spilled}"
