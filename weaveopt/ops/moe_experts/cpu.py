"""The op on CPUs: tokens sorted by expert, then the library's GEMMs, two an expert that has tokens.

Experts that no token chose are not read. Rows are rounded to x's dtype after each GEMM and by the activation, as torch
does it in models.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from weaveopt.ops.moe_experts.activations import activate
from weaveopt.ops.moe_experts.call import ExpertsCall
from weaveopt.ops.moe_experts.shapes import Operands, checked_shape

Tensor = torch.Tensor

WIDEN_ROWS = 4
"""From more rows on, a half-precision GEMM that this CPU has no instructions for runs in fp32 instead."""
WIDEN_BLOCK_ELEMENTS = 1 << 19
"""Of a weight, widened at a time: 2 MiB, which the next GEMM finds in the cache."""


def on_cpu(operands: Operands, call: ExpertsCall) -> Tensor:
    """`weave::moe_experts` on a CPU."""
    shape = checked_shape(operands, call)
    x, chosen = operands.x, operands.experts.reshape(-1)
    own = (chosen >= 0) & (chosen < shape.experts)
    by_expert, order = torch.where(own, chosen, shape.experts).sort(stable=True)
    ranges, end = [], 0
    for expert, count in enumerate(torch.bincount(by_expert, minlength=shape.experts + 1).tolist()[:-1]):
        if count:
            ranges.append(Range(expert, end, end + count))
            end += count
    order = order[:end]
    inner = x.new_empty((end, operands.gate_up.shape[1]))
    multiply(x.index_select(0, order // shape.choices), operands.gate_up, operands.gate_up_bias, ranges, inner)
    product = x.new_empty((end, shape.hidden))
    multiply(activate(inner, call), operands.down, operands.down_bias, ranges, product)
    # Foreign choices' rows are zero.
    results = x.new_empty((shape.rows, shape.hidden)) if end == shape.rows else x.new_zeros((shape.rows, shape.hidden))
    results.index_copy_(0, order, product)
    return combine(results.view(shape.tokens, shape.choices, shape.hidden), operands, own)


class Range(NamedTuple):
    """Rows of one expert, of those that are sorted."""

    expert: int
    first: int
    end: int


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, ranges: list[Range], out: Tensor) -> None:
    """`out = rows @ weight[expert].T + bias[expert]`, range by range."""
    for expert, first, end in ranges:
        linear(rows[first:end], weight[expert], None if bias is None else bias[expert], out[first:end])


def combine(results: Tensor, operands: Operands, own: Tensor) -> Tensor:
    """The weighted sum of `results` [T, k, H] over the own ones of each token's choices, in their order, in fp32."""
    tokens, choices = operands.experts.shape
    # Zero times zero: a foreign choice's weight may be anything.
    weights = operands.weights.float().masked_fill(~own.view(tokens, choices), 0.0)
    y = results[:, 0].float() * weights[:, :1]
    for choice in range(1, choices):
        y.addcmul_(results[:, choice].float(), weights[:, choice : choice + 1])
    return y.to(operands.x.dtype)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out = rows @ weight.T + bias`, summed in fp32."""
    if rows.dtype is torch.float32 or len(rows) <= WIDEN_ROWS or has_gemm(rows.dtype):
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
    """Whether the library multiplies this dtype on this CPU itself; else torch has loops that use one core's FMAs."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
