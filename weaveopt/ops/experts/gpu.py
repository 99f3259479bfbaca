"""The op on GPUs by Triton: what its kernels take, and their launch; routing, of many rows by native kernels where they
were built. Nothing here waits for the device."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.traits import NativePart, is_built
from weaveopt.kernel_memory import shared_bytes
from weaveopt.ops.experts.by_expert import StackedWeights
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.expert_ranges import RangedWeight, StackedWeight
from weaveopt.ops.experts.plan import TRITON_ROUTING_ROWS, ExpertsLaunch, RowTiles, plan, power_of_two
from weaveopt.ops.experts.shapes import ExpertOperands, ExpertsShape, checked_shape

try:
    from weaveopt import _native
except ImportError:  # built without it: is_built() says so
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor

ROUTE_BLOCK = 1024
"""Rows that a program of `route` looks at in one step."""
LEAST_BINS = 64
MAX_EXPERTS = 1023
"""Maximum number of experts on this rank: the routing kernels hold a count of each in registers."""
MAX_CHOICES = 64
"""`combine` is unrolled over them."""


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def planned(shape: ExpertsShape, device: torch.device, gated: bool) -> ExpertsLaunch:
    """The launch of Triton's kernels on this device."""
    return plan(shape, num_sms(device), gated, shared_bytes(device))


@cache
def has_tensor_cores(device: torch.device) -> bool:
    """True if the device's tensor cores support bf16: compute capability 8.0 and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def has_native_routing(device: torch.device) -> bool:
    """True if the native module has code for the device."""
    if device.type != "cuda" or not is_built(NativePart.CUDA):
        return False
    return _native.has_code(device.index)


@cache
def may_launch_early(device: torch.device) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def has_kernels(operands: ExpertOperands, shape: ExpertsShape) -> bool:
    """True if the Triton kernels support the call."""
    half = operands.x.dtype in (torch.bfloat16, torch.float16)
    few = shape.experts <= MAX_EXPERTS and shape.choices <= MAX_CHOICES
    near = all(_last_offset(weight) < 1 << 31 for weight in (operands.gate_up, operands.down))
    return half and few and near and has_triton() and has_tensor_cores(operands.x.device)


def launch(operands: ExpertOperands, call: ExpertsCall, how: ExpertsLaunch) -> Tensor:
    """Launch all of Triton's kernels of one call; tensors may be on any device that Triton supports."""
    shape = checked_shape(operands, call)
    x = operands.x if operands.x.stride(1) == 1 else operands.x.contiguous()
    if not shape.rows:
        return x.new_empty((shape.tokens, shape.hidden))
    early = how.early and may_launch_early(x.device)
    experts = operands.experts.contiguous()
    order, table = route(experts, shape, how, early)
    inner = first_gemm(x, order, table, operands.of_experts, call, shape, how)
    dtype = torch.float32 if how.splits > 1 else x.dtype
    results = x.new_empty((how.splits, shape.rows, shape.hidden), dtype=dtype)
    second_gemm(inner, order, table, operands.of_experts, results, shape, how)
    return combine(results, experts, operands.weights, x.dtype, shape, how, early)


def first_gemm(
    x: Tensor,
    order: Tensor,
    table: Tensor,
    weights: StackedWeights,
    call: ExpertsCall,
    shape: ExpertsShape,
    how: ExpertsLaunch,
) -> Tensor:
    """[positions, I], activated. Rows of `x` are contiguous."""
    from weaveopt.ops.experts import kernels

    early, tile = how.early and may_launch_early(x.device), how.gate_up
    inner = x.new_empty((shape.rows, shape.inner))
    kernels.gate_up[(how.max_tiles(shape) * -(-shape.inner // tile.columns),)](
        x, order, table, *_ranges(weights.gate_up), _dense(weights.gate_up_bias, x), inner,
        x.stride(0), *weights.gate_up.stride(), shape.choices, call.alpha, call.limit,
        HIDDEN=shape.hidden, INNER=shape.inner, ACT=str(call.activation), CUT=call.limit > 0,
        GATED=call.gated,
        INTERLEAVED=call.interleaved, BIAS=weights.gate_up_bias is not None,
        BLOCK_M=how.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=how.group, SWAP=tile.swap,
        PDL=early, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=early,
    )  # fmt: skip
    return inner


def second_gemm(
    inner: Tensor,
    order: Tensor,
    table: Tensor,
    weights: StackedWeights,
    out: Tensor,
    shape: ExpertsShape,
    how: ExpertsLaunch,
    rows_per_buffer: int = 0,
) -> None:
    """Into `out` [splits, rows, H]; with `rows_per_buffer` `out` are addresses, each of that many rows [H]."""
    from weaveopt.ops.experts import kernels

    early, tile = how.early and may_launch_early(inner.device), how.down
    assert not rows_per_buffer or how.splits == 1, f"{how.splits} splits have no sum at another rank"
    kernels.down[(how.max_tiles(shape) * -(-shape.hidden // tile.columns), how.splits)](
        inner, order, table, *_ranges(weights.down), _dense(weights.down_bias, inner), out,
        *weights.down.stride(), rows_per_buffer or shape.rows,
        HIDDEN=shape.hidden, INNER=shape.inner, BIAS=weights.down_bias is not None, SPLITS=how.splits,
        BLOCK_M=how.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=how.group, SWAP=tile.swap,
        TO_RANKS=rows_per_buffer > 0,
        PDL=early, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=early,
    )  # fmt: skip


def combine(
    results: Tensor,
    experts: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    shape: ExpertsShape,
    how: RowTiles,
    early: bool,
) -> Tensor:
    """The weighted sum over choices of `results` [splits, rows, H], in `dtype`. `experts` is contiguous."""
    from weaveopt.ops.experts import kernels

    y = results.new_empty((shape.tokens, shape.hidden), dtype=dtype)
    columns = min(how.combine_columns, power_of_two(shape.hidden))
    kernels.combine[(shape.tokens, -(-shape.hidden // columns))](
        results, experts, weights, y, *weights.stride(), shape.rows, shape.experts,
        HIDDEN=shape.hidden, CHOICES=shape.choices, SPLITS=results.shape[0], BLOCK=columns, PDL=early,
        num_warps=max(1, min(4, columns // 256)), launch_pdl=early,
    )  # fmt: skip
    return y


def route(experts: Tensor, shape: ExpertsShape, how: RowTiles, early: bool) -> tuple[Tensor, Tensor]:
    """Rows by expert, and the tiles they make: see `routing_kernels`. `experts` is contiguous."""
    order = experts.new_empty(shape.rows, dtype=torch.int32)
    table = experts.new_empty((how.table_rows(shape), 4), dtype=torch.int32)
    if shape.rows > TRITON_ROUTING_ROWS and has_native_routing(experts.device):
        sort_natively(experts, shape, how.rows, early, order, table)
    else:
        sort_by_triton(experts, shape, how.rows, early, order, table)
    return order, table


def sort_by_triton(
    experts: Tensor, shape: ExpertsShape, tile_rows: int, early: bool, order: Tensor, table: Tensor
) -> None:
    from weaveopt.ops.experts import routing_kernels

    routing_kernels.route[(shape.experts,)](
        experts, order, table, shape.rows, shape.experts,
        BINS=max(LEAST_BINS, power_of_two(shape.experts + 1)),
        BLOCK=min(ROUTE_BLOCK, max(128, power_of_two(shape.rows))), BLOCK_M=tile_rows, PDL=early, num_warps=4,
    )  # fmt: skip


def sort_natively(
    experts: Tensor, shape: ExpertsShape, tile_rows: int, early: bool, order: Tensor, table: Tensor
) -> None:
    """Sort rows by expert with the native kernels. Raises `WeaveError` if the driver refuses a kernel."""
    counts = experts.new_empty(_native.expert_row_counts(shape.rows, shape.experts), dtype=torch.int32)
    with torch.cuda.device(experts.device):
        code = _native.sort_expert_rows(
            experts.data_ptr(), shape.rows, shape.experts, tile_rows, counts.data_ptr(), order.data_ptr(),
            table.data_ptr(), early, torch.cuda.current_stream(experts.device).cuda_stream,
        )  # fmt: skip
    if code:
        raise WeaveError(f"moe_experts: the routing of {shape} was refused: {_native.cuda_error_text(code)}")


def _ranges(weight: StackedWeight) -> tuple[Tensor, tuple[Tensor, ...], tuple[int, ...]]:
    """The first range as the kernels take it, the others, and the first expert of each of those."""
    if isinstance(weight, RangedWeight):
        return weight.tensors[0], weight.tensors[1:], weight.starts[1:]
    return weight, (), ()


def _last_offset(weight: StackedWeight) -> int:
    """Offset of an expert's last element from its first."""
    return sum((size - 1) * stride for size, stride in zip(weight.shape[1:], weight.stride()[1:], strict=True))


def _dense(bias: Tensor | None, other: Tensor) -> Tensor:
    """A kernel takes a pointer where it reads none, too."""
    return other if bias is None else bias.contiguous()
