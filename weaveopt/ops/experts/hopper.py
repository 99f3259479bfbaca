"""The experts' GEMMs on Hopper: native kernels, csrc/experts, between the routing and Triton's sum.

Rows are gathered by the first GEMM, whose epilogue activates; the second one puts them in their places. Both are
persistent grids over the tiles of `EXPERT_TILE_ROWS` rows that the routing kernels left, or of `WIDE_EXPERT_TILE_ROWS`;
or one grid goes over the tiles of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.traits import NativePart, is_built
from weaveopt.ops.experts import gpu
from weaveopt.ops.experts.activation import ActivationName
from weaveopt.ops.experts.by_expert import StackedWeights
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.expert_ranges import StackedWeight, tensors_of
from weaveopt.ops.experts.plan import RowTiles
from weaveopt.ops.experts.shapes import ExpertOperands, ExpertsShape, checked_shape

try:
    from weaveopt import _native
except ImportError:  # built without it: is_built() says so
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor

HOPPER = (9, 0)
"""The compute capability that wgmma exists on."""
GROUP = 8
"""Tiles of an expert that go through a part of its weight before the next part, where it has that many: 66 clusters
share 8 panels of each then. With fewer, one tile after the other reads less at a time."""

LAG = 2
"""Items of the first GEMM for each cluster, that in one kernel stand between one and those of the second that read its
rows: while as many are computed, it ends, also where those of the second GEMM are shorter."""


@dataclass(frozen=True)
class HopperPlan(RowTiles):
    """One call of these kernels."""

    rows: int
    group: int
    wide: bool = False
    """True if each multiply covers all rows of a tile (csrc/experts/wide.cuh) instead of half of them."""
    one_kernel: bool = False
    """True if both GEMMs are one kernel (csrc/experts/both.cuh)."""
    lag: int = LAG
    """Lag between the two GEMMs of that kernel."""
    combine_columns: int = 2048
    early: bool = True


def plan(shape: ExpertsShape) -> HopperPlan:
    """Plan the launch for `shape`. It counts all choices as this rank's."""
    tiles = shape.rows // (shape.experts * _native.EXPERT_TILE_ROWS)
    return HopperPlan(_native.EXPERT_TILE_ROWS, group=GROUP if tiles >= GROUP else 1)


def wide_plan(operands: ExpertOperands, shape: ExpertsShape) -> HopperPlan:
    """The launch by the kernels for many rows an expert, where they take the weights."""
    if any(weight.stride(2) != 1 for weight in (operands.gate_up, operands.down)):
        return plan(shape)
    return HopperPlan(_native.WIDE_EXPERT_TILE_ROWS, group=GROUP, wide=True)


def one_plan(operands: ExpertOperands, shape: ExpertsShape) -> HopperPlan:
    """Plan the launch of both GEMMs in one kernel, if their weights have the same layout and one range each."""
    alike = (operands.gate_up.stride(2) == 1) is (operands.down.stride(2) == 1)
    in_one = len(tensors_of(operands.gate_up)) == len(tensors_of(operands.down)) == 1
    return replace(plan(shape), one_kernel=alike and in_one)


def plan_of(kernels: str, operands: ExpertOperands, shape: ExpertsShape) -> HopperPlan:
    """The launch by the native kernels of that word of `ExpertsKernel`."""
    if kernels == ExpertsKernel.ONE:
        return one_plan(operands, shape)
    return wide_plan(operands, shape) if kernels == ExpertsKernel.WIDE else plan(shape)


def runs_on(device: torch.device) -> bool:
    """True if the kernels were built for this device, and Triton is installed for the other kernels of a call."""
    if device.type != "cuda" or not is_built(NativePart.CUDA) or not gpu.has_triton():
        return False
    return torch.cuda.get_device_capability(device) == HOPPER


def lacks_hopper() -> bool:
    """True if this host has GPUs and calls on the current one would run Triton's kernels instead."""
    return torch.cuda.is_available() and not runs_on(torch.device("cuda", torch.cuda.current_device()))


def unsupported(operands: ExpertOperands, shape: ExpertsShape) -> str:
    """Reason why the kernels cannot run the call; empty if they can."""
    device = operands.x.device
    if not runs_on(device):
        return "the native kernels are for GPUs of compute capability 9.0, built with CUDA, in addition to Triton"
    weights = (operands.gate_up, operands.down)
    if any(1 not in weight.stride()[1:] for weight in weights):
        return "weights have to be contiguous along their rows or along the depth of their products"
    if min(stride for weight in weights for stride in weight.stride()) < 1:
        return "an expert's weights have to be contiguous"
    # Rows that are not contiguous are copied first.
    rows = (operands.x,) if operands.x.stride(1) == 1 else ()
    strides = [stride for each in (*weights, *rows) for stride in each.stride() if stride != 1]
    tensors = (*tensors_of(operands.gate_up), *tensors_of(operands.down), *rows)
    biases = [bias.data_ptr() for bias in (operands.gate_up_bias, operands.down_bias) if bias is not None]
    addresses = [
        *biases,
        *(each.data_ptr() for each in tensors),
        *(stride * operands.x.element_size() for stride in strides),
    ]
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _native.experts_unsupported(_dtype(operands.x), shape.hidden, shape.inner, reduce(or_, addresses), index)


def launch(operands: ExpertOperands, call: ExpertsCall, how: HopperPlan) -> Tensor:
    """Launch all kernels of one call. Raises `WeaveError` if the driver refuses one."""
    shape = checked_shape(operands, call)
    x = operands.x if operands.x.stride(1) == 1 else operands.x.contiguous()
    if not shape.rows:
        return x.new_empty((shape.tokens, shape.hidden))
    experts = operands.experts.contiguous()
    order, table = gpu.route(experts, shape, how, how.early)
    routing = routing_of(order, table, shape, how)
    results = x.new_empty((1, shape.rows, shape.hidden))
    if how.one_kernel:
        both_gemms(x, routing, operands.of_experts, call, results, shape, how)
    else:
        inner = first_gemm(x, routing, operands.of_experts, call, shape, how)
        second_gemm(inner, routing, operands.of_experts, results, shape, how)
    return gpu.combine(results, experts, operands.weights, x.dtype, shape, how, how.early)


def routing_of(order: Tensor, table: Tensor, shape: ExpertsShape, how: HopperPlan) -> _native.ExpertRouting:
    return _native.ExpertRouting(order.data_ptr(), table.data_ptr(), shape.rows, how.group, how.rows)


def first_gemm(
    x: Tensor,
    routing: _native.ExpertRouting,
    weights: StackedWeights,
    call: ExpertsCall,
    shape: ExpertsShape,
    how: HopperPlan,
) -> Tensor:
    """[positions, I], activated. Rows of `x` are contiguous."""
    inner = x.new_empty((shape.rows, shape.inner))
    gathered = x.new_empty((shape.rows, shape.hidden)) if how.wide else None
    bias = dense(weights.gate_up_bias)
    with torch.cuda.device(x.device):
        code = _native.experts_gate_up(
            x.data_ptr(), x.stride(0), shape.hidden, shape.choices, weight_of(weights.gate_up, bias), routing,
            gate_of(call), inner.data_ptr(), _dtype(x), 0 if gathered is None else gathered.data_ptr(),
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
    expect_taken(code, "first GEMM", shape)
    return inner


def second_gemm(
    inner: Tensor, routing: _native.ExpertRouting, weights: StackedWeights, results: Tensor, shape: ExpertsShape,
    how: HopperPlan,
) -> None:  # fmt: skip
    """Into `results` [1, rows, H]."""
    bias = dense(weights.down_bias)
    with torch.cuda.device(inner.device):
        code = _native.experts_down(
            inner.data_ptr(), shape.inner, weight_of(weights.down, bias), routing, results.data_ptr(), _dtype(inner),
            how.wide, torch.cuda.current_stream(inner.device).cuda_stream,
        )  # fmt: skip
    expect_taken(code, "second GEMM", shape)


def both_gemms(
    x: Tensor, routing: _native.ExpertRouting, weights: StackedWeights, call: ExpertsCall, results: Tensor,
    shape: ExpertsShape, how: HopperPlan,
) -> None:  # fmt: skip
    """Into `results` [1, rows, H], in one kernel. Rows of `x` are contiguous, and `routing` serves one call."""
    inner = x.new_empty((shape.rows, shape.inner))
    first_bias, second_bias = dense(weights.gate_up_bias), dense(weights.down_bias)
    with torch.cuda.device(x.device):
        code = _native.experts_both(
            x.data_ptr(), x.stride(0), shape.hidden, shape.choices, weight_of(weights.gate_up, first_bias),
            weight_of(weights.down, second_bias), routing, gate_of(call), inner.data_ptr(), results.data_ptr(),
            _dtype(x), how.lag, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
    expect_taken(code, "kernel of both GEMMs", shape)


def gate_of(call: ExpertsCall) -> _native.ExpertGate:
    return _native.ExpertGate(call.gated, call.interleaved, activation_number(call.activation), call.alpha, call.limit)


def activation_number(name: str) -> int:
    """Number of an activation in csrc/experts/activation.cuh, which follows the order of `ActivationName`."""
    return tuple(ActivationName).index(ActivationName(name))


def expect_taken(code: int, which: str, shape: ExpertsShape) -> None:
    """Check a launch's return code. Raises `WeaveError` if the driver refused a kernel."""
    if code:
        raise WeaveError(f"moe_experts: the {which} of {shape} was refused: {_native.cuda_error_text(code)}")


def _dtype(x: Tensor) -> _native.DType:
    found: _native.DType = getattr(_native.DType, str(x.dtype).removeprefix("torch."))
    return found


def dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def weight_of(weight: StackedWeight, bias: Tensor | None) -> _native.ExpertWeight:
    first, *others = tensors_of(weight)
    experts, rows, _ = first.shape
    of_expert, of_row, of_depth = weight.stride()
    made = _native.ExpertWeight(
        first.data_ptr(), experts, rows, of_expert, of_row, of_depth, 0 if bias is None else bias.data_ptr()
    )
    for each in others:
        made.add_range(each.data_ptr(), len(each))
    return made
