"""Weights of `moe_experts` in ranges of experts, on the real kernels: the bits of one tensor, also from CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.gpu.captured import captured
from tests.graphs.experts_cases import CALLS, NUM_RANGES, ROUTINGS, Sizes, in_ranges, make_operands, poisoned, uneven
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.ops.experts import gpu, hopper
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.expert_ranges import tensors_of
from weaveopt.ops.experts.reference import reference
from weaveopt.ops.experts.shapes import ExpertOperands, checked_shape

SILU, PAIRS, PLAIN = CALLS[0], CALLS[1], CALLS[3]
SIZES = Sizes(tokens=700, choices=2, experts=9, hidden=264, inner=392, bias=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and gpu.has_triton()), reason="they are for GPUs, with Triton"),
]


def run(operands: ExpertOperands, call: ExpertsCall, kernels: ExpertsKernel) -> torch.Tensor:
    result: torch.Tensor = torch.ops.weave.moe_experts.ranges(
        operands.x, operands.experts, operands.weights, [*tensors_of(operands.gate_up)], operands.gate_up_bias,
        [*tensors_of(operands.down)], operands.down_bias, replace(call, kernels=kernels).encode(),
    )  # fmt: skip
    return result


def run_whole(operands: ExpertOperands, call: ExpertsCall, kernels: ExpertsKernel) -> torch.Tensor:
    result: torch.Tensor = torch.ops.weave.moe_experts(
        operands.x, operands.experts, operands.weights, operands.gate_up, operands.gate_up_bias, operands.down,
        operands.down_bias, replace(call, kernels=kernels).encode(),
    )  # fmt: skip
    return result


@pytest.mark.parametrize("kernels", [ExpertsKernel.TRITON, ExpertsKernel.HOPPER, ExpertsKernel.WIDE, ExpertsKernel.ONE])
@pytest.mark.parametrize("num_ranges", NUM_RANGES)
def test_the_bits_of_one_tensor(num_ranges: int, kernels: ExpertsKernel) -> None:
    """Rows of the kernel of both GEMMs, which takes one range, are those of two kernels."""
    for seed, call in enumerate((SILU, PAIRS, PLAIN)):
        for transposed in (False, True):
            for routing in some(ROUTINGS):
                sizes = replace(SIZES, transposed=transposed)
                operands = poisoned(make_operands(sizes, call, torch.bfloat16, seed, routing, "cuda"))
                cut = in_ranges(operands, uneven(9, num_ranges), uneven(9, num_ranges)[::-1])
                got, what = run(cut, call, kernels), f"{call} {routing} transposed {transposed}"
                assert torch.equal(got, run_whole(operands, call, kernels)), what
                assert_close(got, reference(cut, call), KERNEL, what)


@pytest.mark.parametrize("tokens", [1, 8, 512, 8192])
def test_sizes_of_models(tokens: int) -> None:
    for sizes in (
        Sizes(tokens, choices=8, experts=64, hidden=2048, inner=768),
        Sizes(tokens, choices=2, experts=4, hidden=6144, inner=1024),
    ):
        operands = make_operands(sizes, SILU, torch.bfloat16, tokens, device="cuda")
        cut = in_ranges(operands, uneven(sizes.experts, 3))
        for kernels in (ExpertsKernel.TRITON, ExpertsKernel.HOPPER, ExpertsKernel.WIDE):
            assert torch.equal(run(cut, SILU, kernels), run_whole(operands, SILU, kernels)), f"{kernels} {sizes}"


@pytest.mark.parametrize("kernels", [ExpertsKernel.TRITON, ExpertsKernel.HOPPER])
def test_replayed_graphs_read_the_ranges_again(kernels: ExpertsKernel) -> None:
    operands = in_ranges(make_operands(SIZES, SILU, torch.bfloat16, 3, device="cuda"), (2, 3, 4))
    graph, result = captured(lambda: run(operands, SILU, kernels))
    before = run(operands, SILU, kernels)
    for each in tensors_of(operands.gate_up):
        each.mul_(0.5)
    graph.replay()
    assert torch.equal(result, run(operands, SILU, kernels)) and not torch.equal(result, before)


def test_native_kernels_run_where_they_are_for() -> None:
    operands = make_operands(SIZES, SILU, torch.bfloat16, 4, device="cuda")
    cut = in_ranges(operands, (2, 3, 4))
    shape = checked_shape(cut, SILU)
    assert hopper.unsupported(cut, shape) == hopper.unsupported(operands, shape)
    if not hopper.unsupported(cut, shape):
        got = hopper.launch(cut, SILU, hopper.plan(shape))
        assert torch.equal(got, hopper.launch(operands, SILU, hopper.plan(shape)))
