"""Weights of `moe_experts` in ranges of consecutive experts, each a tensor: the bits of one tensor, on every kernel."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.emulation.experts_emulated import FIRST_WIDE, SECOND_WIDE, OneKernel, emulated
from tests.graphs.experts_cases import (
    CALLS,
    NUM_RANGES,
    ROUTINGS,
    Sizes,
    in_ranges,
    make_operands,
    poisoned,
    random_sizes,
    uneven,
)
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt import _native
from weaveopt.errors import WeaveError
from weaveopt.ops.experts import hopper
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.expert_ranges import MAX_RANGES, RangedWeight, joined, tensors_of, whole
from weaveopt.ops.experts.library import plain
from weaveopt.ops.experts.reference import reference
from weaveopt.ops.experts.shapes import ExpertOperands, checked_shape

BF16 = torch.bfloat16
SILU, PAIRS, PLAIN = CALLS[0], CALLS[1], CALLS[3]
SIZES = Sizes(tokens=70, choices=2, experts=9, hidden=72, inner=40, bias=True)
"""Depths of two stages and of one, neither whole; columns that fill no tile."""
WIDE = FIRST_WIDE | SECOND_WIDE


def run(operands: ExpertOperands, call: ExpertsCall) -> torch.Tensor:
    result: torch.Tensor = torch.ops.weave.moe_experts(
        operands.x, operands.experts, operands.weights, [*tensors_of(operands.gate_up)], operands.gate_up_bias,
        [*tensors_of(operands.down)], operands.down_bias, call.encode(),
    )  # fmt: skip
    return result


def run_whole(operands: ExpertOperands, call: ExpertsCall) -> torch.Tensor:
    result: torch.Tensor = torch.ops.weave.moe_experts(
        operands.x, operands.experts, operands.weights, operands.gate_up, operands.gate_up_bias, operands.down,
        operands.down_bias, call.encode(),
    )  # fmt: skip
    return result


def test_ranges_are_one_weight() -> None:
    weight = torch.arange(9 * 2 * 3.0).view(9, 2, 3)
    for sizes in ((4, 5), (1, 0, 8), (1, 1, 1, 1, 1, 1, 1, 2), (0, 3, 0, 6, 0)):
        ranged = joined(weight.split(list(sizes)))
        assert isinstance(ranged, RangedWeight) and len(ranged.tensors) == sum(size > 0 for size in sizes)
        assert (ranged.shape, ranged.dtype, ranged.dim()) == (weight.shape, weight.dtype, 3)
        assert ranged.stride() == weight.stride() and ranged.stride(1) == 3
        assert torch.equal(whole(ranged), weight)
        assert all(ranged[expert].data_ptr() == weight[expert].data_ptr() for expert in range(9)), sizes


def test_one_range_with_experts_is_that_tensor() -> None:
    weight = torch.zeros(3, 2, 4)
    empty = weight[:0]
    assert joined([weight]) is weight and joined([empty, weight, empty]) is weight
    assert joined([empty, empty]).shape == (0, 2, 4)


def test_a_single_experts_stride_to_the_next_does_not_matter() -> None:
    weight = torch.zeros(3, 2, 4)
    alone = torch.as_strided(weight, (1, 2, 4), (1, 4, 1))
    assert joined([alone, weight]).stride() == joined([weight, alone]).stride() == (8, 4, 1)


def test_what_is_no_weight_is_refused() -> None:
    weight = torch.zeros(2, 4, 4)
    for ranges, why in (
        ([], "at least one range"),
        ([weight, weight[:, :2]], "same N, K"),
        ([weight, weight.half()], "float16"),
        ([weight, weight.to("meta")], "on meta"),
        ([weight, weight[0]], "same N, K"),
        ([weight, weight.transpose(1, 2)], "same strides"),
        ([weight, torch.zeros(3, 8, 4)[:, :4]], "same strides"),
        ([weight[:1]] * 9, "at most 8 ranges"),
    ):
        with pytest.raises(WeaveError, match=why):
            joined(ranges)
    assert _native.MOST_EXPERT_RANGES == MAX_RANGES


@pytest.mark.parametrize("num_ranges", NUM_RANGES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_on_cpus(num_ranges: int, dtype: torch.dtype) -> None:
    for seed, call in enumerate(some(CALLS)):
        sizes = replace(random_sizes(random.Random(seed)), experts=9)
        operands = poisoned(make_operands(sizes, call, dtype, seed, ROUTINGS[seed % len(ROUTINGS)]))
        cut = in_ranges(operands, uneven(9, num_ranges), uneven(9, num_ranges)[::-1])
        assert isinstance(cut.down, RangedWeight) is (num_ranges > 1)
        got = run(cut, call)
        assert torch.equal(got, run_whole(operands, call)), f"{sizes} {call}"
        assert_close(got, reference(cut, call), KERNEL, f"{sizes} {call}")
        assert torch.equal(plain(cut, call), plain(operands, call)), f"plain form of {sizes} {call}"


@pytest.mark.parametrize("wide", [0, WIDE], ids=["halves", "wide"])
@pytest.mark.parametrize("num_ranges", NUM_RANGES)
def test_native_gemms(num_ranges: int, wide: int) -> None:
    """Both GEMMs on an emulated cluster; ranges of the two weights differ, and some experts have no rows."""
    for seed, (call, routing) in enumerate(((SILU, "skewed"), (PLAIN, "some_foreign"), (PAIRS, "one_expert"))):
        operands = poisoned(make_operands(SIZES, call, BF16, seed, routing))
        cut = in_ranges(operands, uneven(9, num_ranges), uneven(9, num_ranges)[::-1])
        got = emulated(cut, call, seed=seed, wide=wide)
        assert torch.equal(got, emulated(operands, call, seed=seed, wide=wide)), f"{call} {routing}"
        assert_close(got, reference(cut, call), KERNEL, f"{call} {routing}")


@pytest.mark.parametrize("num_ranges", NUM_RANGES)
@pytest.mark.parametrize("call", [SILU, PAIRS, PLAIN], ids=["gated", "pairs", "plain"])
def test_native_gemms_of_transposed_weights(num_ranges: int, call: ExpertsCall) -> None:
    operands = poisoned(make_operands(replace(SIZES, transposed=True), call, BF16, 5, "skewed"))
    cut = in_ranges(operands, uneven(9, num_ranges))
    got = emulated(cut, call)
    assert torch.equal(got, emulated(operands, call))
    assert_close(got, reference(cut, call), KERNEL)


@pytest.mark.parametrize("num_ranges", [2, 8])
def test_one_of_the_weights_may_be_one_tensor(num_ranges: int) -> None:
    operands = make_operands(SIZES, SILU, BF16, 6)
    want, sizes = emulated(operands, SILU), uneven(9, num_ranges)
    for gate_up, down in ((sizes, (9,)), ((9,), sizes)):
        assert torch.equal(emulated(in_ranges(operands, gate_up, down), SILU), want)


def test_kernels_that_take_one_range_refuse_several() -> None:
    """Both GEMMs in one kernel, and rows to several ranks: no plan asks them."""
    operands = make_operands(SIZES, SILU, BF16, 7)
    cut, shape = in_ranges(operands, (4, 5)), checked_shape(operands, SILU)
    assert hopper.one_plan(operands, shape).one_kernel and not hopper.one_plan(cut, shape).one_kernel
    with pytest.raises(AssertionError, match="code 1"):
        emulated(cut, SILU, one=OneKernel())


def test_traced() -> None:
    operands, text = in_ranges(make_operands(Sizes(experts=5), SILU, torch.float32, 8), (2, 0, 3)), SILU.encode()
    gate_up, down = [*tensors_of(operands.gate_up)], [*tensors_of(operands.down)]

    def model(x: torch.Tensor, gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = torch.ops.weave.moe_experts(
            x * 2, operands.experts, operands.weights, gate_up, None, down, None, text
        )
        return result

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(operands.x, gate_up, down), model(operands.x, gate_up, down))
    torch.library.opcheck(
        torch.ops.weave.moe_experts.ranges,
        (operands.x, operands.experts, operands.weights, gate_up, None, down, None, text),
        test_utils=("test_schema", "test_faketensor"),
    )
