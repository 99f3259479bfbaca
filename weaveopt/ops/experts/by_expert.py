"""The experts of one rank on a CPU, on rows that are sorted by expert: the library's GEMMs, two an expert with rows.

    h = rows @ gate_up[e].T + gate_up_bias[e]
    y = act(h) @ down[e].T + down_bias[e]

Experts without rows are not read. Rows are rounded to their dtype after each GEMM and by the activation, as torch does
it in models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

from weaveopt.ops.experts.activation import Activation
from weaveopt.ops.experts.expert_ranges import StackedWeight

Tensor = torch.Tensor

WIDEN_ROWS = 4
"""Number of rows above which a half-precision GEMM without CPU instructions runs in fp32 instead."""
WIDEN_BLOCK_ELEMENTS = 1 << 19
"""Elements of a weight that are upcast at a time: 2 MiB, which the next GEMM finds in the cache."""


BLOCK_ROWS = 512
"""Rows that pass through both GEMMs at a time: what is between them stays in the cache, in memory that is used again.
An expert with more rows is a block by itself."""


class ExpertWeights(NamedTuple):
    """Weights of one rank's E experts, of any strides. Transformers' layout: gpt-oss's are views, transposed."""

    gate_up: Tensor
    """[E, N, hidden], where N is twice the intermediate size if gated."""
    gate_up_bias: Tensor | None
    """[E, N]."""
    down: Tensor
    """[E, hidden, intermediate]."""
    down_bias: Tensor | None
    """[E, hidden]."""


class StackedWeights(NamedTuple):
    """The same, where each weight may be stored in ranges of experts."""

    gate_up: StackedWeight
    gate_up_bias: Tensor | None
    down: StackedWeight
    down_bias: Tensor | None


class RowRange(NamedTuple):
    """Rows of one expert, of those that are sorted."""

    expert: int
    first: int
    end: int


def multiply(rows: Tensor, weight: StackedWeight, bias: Tensor | None, ranges: Sequence[RowRange], out: Tensor) -> None:
    """`out = rows @ weight[expert].T + bias[expert]`, range by range."""
    for expert, first, end in ranges:
        linear(rows[first:end], weight[expert], None if bias is None else bias[expert], out[first:end])


def ranges_of(counts: Sequence[int]) -> list[RowRange]:
    """Row ranges of the experts that have rows, where each has `counts[expert]` of them."""
    ranges, end = [], 0
    for expert, count in enumerate(counts):
        if count:
            ranges.append(RowRange(expert, end, end + count))
            end += count
    return ranges


def blocks_of(ranges: Sequence[RowRange]) -> Iterator[tuple[slice, list[RowRange]]]:
    """The rows of neighbouring experts in blocks of about `BLOCK_ROWS`, and the block's ranges, counted from its first
    row."""
    block: list[RowRange] = []
    for each in ranges:
        if block and each.end - block[0].first > BLOCK_ROWS:
            yield _counted(block)
            block = []
        block.append(each)
    if block:
        yield _counted(block)


def _counted(block: Sequence[RowRange]) -> tuple[slice, list[RowRange]]:
    begin = block[0].first
    return slice(begin, block[-1].end), [RowRange(each.expert, each.first - begin, each.end - begin) for each in block]


def through_experts(
    rows: Tensor, ranges: Sequence[RowRange], weights: ExpertWeights | StackedWeights, act: Activation
) -> Tensor:
    """[rows, hidden]: what the expert of each range makes of its rows, in their dtype; every row is in a range."""
    product = rows.new_empty((len(rows), weights.down.shape[1]))
    for taken, block in blocks_of(ranges):
        own = rows[taken]
        inner = own.new_empty((len(own), weights.gate_up.shape[1]))
        multiply(own, weights.gate_up, weights.gate_up_bias, block, inner)
        multiply(act(inner), weights.down, weights.down_bias, block, product[taken])
    return product


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out = rows @ weight.T + bias`, summed in fp32."""
    if rows.dtype is torch.float32 or len(rows) <= WIDEN_ROWS or not rows.is_cpu or has_gemm(rows.dtype):
        if bias is None:
            torch.mm(rows, weight.T, out=out)
        else:
            torch.addmm(bias, rows, weight.T, out=out)
        return
    wide, columns = rows.float(), weight.shape[0]
    product = wide.new_empty((len(rows), columns))
    block = max(1, WIDEN_BLOCK_ELEMENTS // weight.shape[1])
    for first in range(0, columns, block):
        end = min(first + block, columns)
        torch.mm(wide, weight[first:end].float().T, out=product[:, first:end])
    if bias is not None:
        product += bias
    out.copy_(product)


@cache
def has_gemm(dtype: torch.dtype) -> bool:
    """True if the library has GEMMs of this dtype on this CPU; torch's fallback loops use one core's FMAs."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
