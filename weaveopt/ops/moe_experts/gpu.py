"""The op on GPUs by Triton: what its kernels take, and their launch. Nothing here waits for the device."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from weaveopt.ops.moe_experts.call import ExpertsCall
from weaveopt.ops.moe_experts.plan import Plan, RowTiles, power_of_two
from weaveopt.ops.moe_experts.shapes import Operands, Shape, checked_shape

Tensor = torch.Tensor

ROUTE_BLOCK = 1024
"""Rows that a program of `route` looks at in one step."""
CHUNK, PLACE_STEP = 1024, 64
"""Rows of a program of `count` and `place`, and of one step of the latter."""
LEAST_BINS = 64
MAX_EXPERTS = 1023
"""Of this rank: the routing kernels hold a count of each in registers."""
MAX_CHOICES = 64
"""`combine` is unrolled over them."""


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether they take bf16: compute capability 8.0 on."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def may_launch_early(device: torch.device) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def has_kernels(operands: Operands, shape: Shape) -> bool:
    """Whether the Triton kernels take the call."""
    half = operands.x.dtype in (torch.bfloat16, torch.float16)
    few = shape.experts <= MAX_EXPERTS and shape.choices <= MAX_CHOICES
    near = all(_last_offset(weight) < 1 << 31 for weight in (operands.gate_up, operands.down))
    return half and few and near and has_triton() and has_tensor_cores(operands.x.device)


def launch(operands: Operands, call: ExpertsCall, how: Plan) -> Tensor:
    """All of Triton's kernels of one call; tensors may lie anywhere that Triton runs."""
    from weaveopt.ops.moe_experts import kernels

    shape = checked_shape(operands, call)
    x = operands.x if operands.x.stride(1) == 1 else operands.x.contiguous()
    if not shape.rows:
        return x.new_empty((shape.tokens, shape.hidden))
    early = how.early and may_launch_early(x.device)
    experts = operands.experts.contiguous()
    order, table = route(experts, shape, how, early)
    inner = x.new_empty((shape.rows, shape.inner))
    max_tiles = how.max_tiles(shape)
    gate_up, down = how.gate_up, how.down
    kernels.gate_up[(max_tiles * -(-shape.inner // gate_up.columns),)](
        x, order, table, operands.gate_up, _dense(operands.gate_up_bias, x), inner,
        x.stride(0), *operands.gate_up.stride(), shape.choices, call.alpha, call.limit,
        HIDDEN=shape.hidden, INNER=shape.inner, ACT=str(call.activation), CUT=call.limit > 0,
        GATED=call.gated,
        INTERLEAVED=call.interleaved, BIAS=operands.gate_up_bias is not None,
        BLOCK_M=how.rows, BLOCK_N=gate_up.columns, BLOCK_K=gate_up.depth, GROUP=how.group, SWAP=gate_up.swap,
        PDL=early, num_warps=gate_up.num_warps, num_stages=gate_up.num_stages, launch_pdl=early,
    )  # fmt: skip
    dtype = torch.float32 if how.splits > 1 else x.dtype
    results = x.new_empty((how.splits, shape.rows, shape.hidden), dtype=dtype)
    kernels.down[(max_tiles * -(-shape.hidden // down.columns), how.splits)](
        inner, order, table, operands.down, _dense(operands.down_bias, x), results,
        *operands.down.stride(), shape.rows,
        HIDDEN=shape.hidden, INNER=shape.inner, BIAS=operands.down_bias is not None, SPLITS=how.splits,
        BLOCK_M=how.rows, BLOCK_N=down.columns, BLOCK_K=down.depth, GROUP=how.group, SWAP=down.swap,
        PDL=early, num_warps=down.num_warps, num_stages=down.num_stages, launch_pdl=early,
    )  # fmt: skip
    return combine(results, experts, operands.weights, x.dtype, shape, how, early)


def combine(
    results: Tensor, experts: Tensor, weights: Tensor, dtype: torch.dtype, shape: Shape, how: RowTiles, early: bool
) -> Tensor:
    """The weighted sum over choices of `results` [splits, rows, H], in `dtype`. `experts` is contiguous."""
    from weaveopt.ops.moe_experts import kernels

    y = results.new_empty((shape.tokens, shape.hidden), dtype=dtype)
    columns = min(how.combine_columns, power_of_two(shape.hidden))
    kernels.combine[(shape.tokens, -(-shape.hidden // columns))](
        results, experts, weights, y, *weights.stride(), shape.rows, shape.experts,
        HIDDEN=shape.hidden, CHOICES=shape.choices, SPLITS=results.shape[0], BLOCK=columns, PDL=early,
        num_warps=max(1, min(4, columns // 256)), launch_pdl=early,
    )  # fmt: skip
    return y


def route(experts: Tensor, shape: Shape, how: RowTiles, early: bool) -> tuple[Tensor, Tensor]:
    """Rows by expert, and the tiles they make: see `routing_kernels`. `experts` is contiguous."""
    from weaveopt.ops.moe_experts import routing_kernels

    order = experts.new_empty(shape.rows, dtype=torch.int32)
    table = experts.new_empty((how.max_tiles(shape) + 1, 4), dtype=torch.int32)
    bins = max(LEAST_BINS, power_of_two(shape.experts + 1))
    if how.one_routing:
        routing_kernels.route[(shape.experts,)](
            experts, order, table, shape.rows, shape.experts,
            BINS=bins, BLOCK=min(ROUTE_BLOCK, max(128, power_of_two(shape.rows))), BLOCK_M=how.rows, PDL=early,
            num_warps=4,
        )  # fmt: skip
        return order, table
    chunks = -(-shape.rows // CHUNK)
    counts = experts.new_empty((chunks, bins), dtype=torch.int32)
    routing_kernels.count[(chunks,)](
        experts, counts, shape.rows, shape.experts, BINS=bins, CHUNK=CHUNK, PDL=early, num_warps=4
    )
    routing_kernels.place[(chunks,)](
        experts, counts, order, table, shape.rows, shape.experts, how.max_tiles(shape),
        BINS=bins, CHUNK=CHUNK, STEP=PLACE_STEP, BLOCK_M=how.rows, PDL=early, num_warps=8, launch_pdl=early,
    )  # fmt: skip
    return order, table


def _last_offset(weight: Tensor) -> int:
    """Of an element of an expert, from its first."""
    return sum((size - 1) * stride for size, stride in zip(weight.shape[1:], weight.stride()[1:], strict=True))


def _dense(bias: Tensor | None, other: Tensor) -> Tensor:
    """A kernel takes a pointer where it reads none, too."""
    return other if bias is None else bias.contiguous()
