"""The ops on GPUs: which kernel runs, and its launch. Nothing here waits for the device."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from functools import cache

import torch

from weaveopt.kernel_memory import shared_bytes
from weaveopt.ops.attention import reference
from weaveopt.ops.attention.plan import AttentionLaunch, fitting, plan, power_of_two
from weaveopt.ops.attention.shapes import (
    RANGE_ROWS,
    AttentionOperands,
    AttentionShape,
    Scores,
    checked_shape,
    empty_result,
)

Tensor = torch.Tensor

LARGEST_HEAD = 256
RANGE_BYTES = 16384
"""Mask bytes that a program of `key_ranges` reads."""
COMBINE_SPLITS = 64
SPLIT_STEP = 16
"""Keys: what a split takes is a multiple of that."""


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def lacks_triton() -> bool:
    """True if this host has GPUs but no Triton, so that calls would run the plain expression."""
    return torch.cuda.is_available() and not has_triton()


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def may_launch_early(device: torch.device) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def key_ranges(mask: Tensor, rows: int) -> Tensor:
    """`weave::key_ranges` of a mask on a GPU."""
    return launch_key_ranges(mask, rows) if has_triton() else reference.key_ranges(mask, rows)


def masked_attention(operands: AttentionOperands, scores: Scores) -> Tensor:
    """`weave::masked_attention` on a GPU."""
    shape = checked_shape(operands)
    sizes = (shape.key_size, shape.value_size)
    half, device = operands.query.dtype in (torch.bfloat16, torch.float16), operands.query.device
    if not (half and max(sizes) <= LARGEST_HEAD and scores.scale > 0 and scores.softcap >= 0 and has_triton()):
        return reference.reference(operands, scores)
    ranges = operands.ranges
    if operands.mask is not None and ranges is None:
        ranges = launch_key_ranges(operands.mask, RANGE_ROWS)
        operands = AttentionOperands(
            operands.query, operands.key, operands.value, operands.mask, ranges, operands.sinks
        )
    may_pack = ranges is None or ranges.shape[1] == 1
    how = plan(shape, num_sms(device), may_pack, operands.mask is not None)
    fit = fitting(how.block_m, how.block_n, how.num_stages, sizes, shared_bytes(device))
    if fit is None:
        return reference.reference(operands, scores)
    return launch_attention(operands, scores, replace(how, block_n=fit[0], num_stages=fit[1]))


def launch_key_ranges(mask: Tensor, rows: int) -> Tensor:
    """Launches one kernel, or two for more keys than one program reads; on any device that Triton supports."""
    from weaveopt.ops.attention import kernels

    batch, heads, queries, keys = mask.shape
    tiles = -(-queries // rows)
    out = mask.new_empty((batch, heads, tiles, 4), dtype=torch.int32)
    if out.numel() == 0:
        return out
    tile_rows = power_of_two(min(rows, queries))
    block_keys = min(power_of_two(max(keys, 128)), max(RANGE_BYTES // tile_rows, 128))
    blocks = -(-keys // block_keys)
    # With one program a tile most SMs would be idle: a mask of 2729 queries has 22 tiles.
    partial = mask.new_empty((5, out.numel() // 4, blocks), dtype=torch.int32) if blocks > 1 else out
    kernels.key_ranges[(tiles, batch * heads, max(blocks, 1))](
        mask.view(torch.uint8), partial, *mask.stride(), heads, queries, keys, rows,
        BLOCK_ROWS=min(tile_rows, 32), BLOCK_KEYS=block_keys, PARTIAL=blocks > 1, num_warps=8,
    )  # fmt: skip
    if blocks > 1:
        kernels.join_ranges[(out.numel() // 4,)](
            partial, out, partial.stride(0), keys, blocks,
            BLOCK_KEYS=block_keys, BLOCKS=power_of_two(blocks), num_warps=min(8, max(1, power_of_two(blocks) // 64)),
        )  # fmt: skip
    return out


def launch_attention(operands: AttentionOperands, scores: Scores, how: AttentionLaunch) -> Tensor:
    """Launches one kernel, and `combine` if keys are split; tensors may be on any device that Triton supports."""
    from weaveopt.ops.attention import kernels

    shape = checked_shape(operands)
    query, key, value = (_dense_rows(tensor) for tensor in (operands.query, operands.key, operands.value))
    out = empty_result(query, value)
    if out.numel() == 0:
        return out
    if not shape.keys:
        return out.zero_()
    split = how.num_splits > 1
    early = split and how.early_combine and may_launch_early(out.device)
    acc, ml = _partials(out, how, shape)
    mask, mask_strides, kind = _mask_arguments(operands.mask, shape, how, query)
    ranges = None if operands.ranges is None else operands.ranges.contiguous()
    sinks = None if operands.sinks is None else operands.sinks.contiguous()
    if ranges is not None and ranges.shape[1] > 1 and how.packed > 1:
        raise AssertionError(f"{how.packed} heads share a tile, and have {ranges.shape[1]} ranges")
    unit, cap_rate = scores.scale * math.log2(math.e), 0.0
    if scores.softcap:
        unit, cap_rate = scores.softcap * math.log2(math.e), 2 * unit / scores.softcap
    range_strides = (0, 0, 0) if ranges is None else _broadcast_strides(ranges)[:3]
    kernels.attention[(how.num_splits * how.num_bundles(shape), how.num_tiles(shape))](
        query, key, value, mask, query if ranges is None else ranges, query if sinks is None else sinks,
        out, acc, ml,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *mask_strides, *range_strides, out.stride(0), out.stride(1), out.stride(2),
        shape.heads, shape.group, how.packed, shape.queries, shape.keys,
        1 if ranges is None else ranges.shape[2], unit, cap_rate, how.num_splits,
        D=shape.key_size, DV=shape.value_size,
        BLOCK_D=power_of_two(max(shape.key_size, 16)), BLOCK_DV=power_of_two(max(shape.value_size, 16)),
        BLOCK_M=how.block_m, BLOCK_N=how.block_n, MASK=kind, RANGES=ranges is not None, SINKS=sinks is not None,
        CAUSAL=scores.causal, SOFTCAP=scores.softcap > 0, SPLIT=split, PDL=early,
        INNER=how.inner, STEP=SPLIT_STEP,
        num_warps=how.num_warps, num_stages=how.num_stages,
    )  # fmt: skip
    if split:
        columns = min(how.combine_columns, power_of_two(max(shape.value_size, 16)))
        kernels.combine[(how.num_bundles(shape) * shape.queries * how.packed, -(-shape.value_size // columns))](
            acc, ml, query if sinks is None else sinks, out, out.stride(0), out.stride(1), out.stride(2),
            shape.heads, how.packed, shape.queries, how.num_splits,
            DV=shape.value_size, BLOCK_DV=columns, BLOCK_SPLITS=min(power_of_two(how.num_splits), COMBINE_SPLITS),
            SINKS=sinks is not None, PDL=early, num_warps=how.combine_warps, launch_pdl=early,
        )  # fmt: skip
    return out


def _dense_rows(tensor: Tensor) -> Tensor:
    """Elements of a head one after another, as the kernel reads them."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _partials(out: Tensor, how: AttentionLaunch, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Room for each split's sums: [bundle, row, split, Dv], and m and l of each."""
    if how.num_splits == 1:
        return out, out
    num_rows = how.num_bundles(shape) * shape.queries * how.packed
    acc = out.new_empty((num_rows, how.num_splits, shape.value_size), dtype=torch.float32)
    return acc, out.new_empty((num_rows, how.num_splits, 2), dtype=torch.float32)


def _mask_arguments(
    mask: Tensor | None, shape: AttentionShape, how: AttentionLaunch, other: Tensor
) -> tuple[Tensor, tuple[int, ...], int]:
    """The mask's bytes, its strides, and how it is read: 0 not at all, 1 a row for all of a tile, 2 a row for each."""
    if mask is None:
        return other, (0, 0, 0, 0), 0
    strides = _broadcast_strides(mask)
    one_row = (strides[2] == 0 or shape.queries == 1) and (strides[1] == 0 or how.packed == 1)
    return mask.view(torch.uint8), strides, 1 if one_row else 2


def _broadcast_strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(
        0 if size == 1 and at < 3 else stride
        for at, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    )
