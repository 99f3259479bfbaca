"""Shapes and dtypes of the op's results, for tracing: no memory, no peers."""

from __future__ import annotations

import torch

from weaveopt.ops.gemm_all_reduce.call import decode
from weaveopt.ops.gemm_all_reduce.operands import gemm_of
from weaveopt.ops.reduction.call import SumOut
from weaveopt.ops.reduction.operands import Argument, Results, split

Tensor = torch.Tensor


def gemm_all_reduce_norm(input: Tensor, weight: Tensor, weight_layout: str, *rest: Argument) -> Results:
    operands, text = split(rest)
    call = decode(text)
    gemm, known = gemm_of(input, weight, weight_layout, call), call.reduction
    rows = (input.shape[0], gemm.b.shape[1])
    shape = rows if operands.residual is None else operands.residual.shape
    normalized = input.new_empty(0 if known.norm is None else shape, dtype=getattr(torch, known.out_dtype))
    return normalized, input.new_empty(0 if known.sum_out is SumOut.NONE else shape)
