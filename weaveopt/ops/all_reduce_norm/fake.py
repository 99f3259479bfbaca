"""Shapes and dtypes of the ops' results, for tracing: no memory, no peers."""

from __future__ import annotations

import torch

from weaveopt.errors import WeaveError
from weaveopt.reductions.call import ReductionCall, SumOut, decode
from weaveopt.reductions.operands import Argument, Operands, QuantResults, Results, split
from weaveopt.reductions.reference import row_scale_shape

Tensor = torch.Tensor


def all_reduce_norm(partial: Tensor, *rest: Argument) -> Results:
    operands, call = split(rest)
    return _results(partial, partial.shape, operands, decode(call))


def mm_all_reduce_norm(a: Tensor, b: Tensor, addend: Tensor | None, *rest: Argument) -> Results:
    operands, call = split(rest)
    return _results(a, (a.shape[0], b.shape[1]), operands, decode(call))


def all_reduce_norm_quant(partial: Tensor, *rest: Argument) -> QuantResults:
    operands, text = split(rest)
    call = decode(text)
    normalized, total = _results(partial, partial.shape, operands, call)
    shape = row_scale_shape(_shape(partial.shape, operands), call)
    return normalized, total, partial.new_empty(shape, dtype=torch.float32)


def _shape(shape: torch.Size | tuple[int, ...], operands: Operands) -> torch.Size | tuple[int, ...]:
    """Shape of the results: the residual's, if there is one."""
    return shape if operands.residual is None else operands.residual.shape


def _results(like: Tensor, shape: torch.Size | tuple[int, ...], operands: Operands, call: ReductionCall) -> Results:
    if like.dtype is not getattr(torch, call.dtype):
        raise WeaveError(f"site {call.site}: planned for {call.dtype}, called with {like.dtype}")
    shape = _shape(shape, operands)
    normalized = like.new_empty(0 if call.norm is None else shape, dtype=getattr(torch, call.out_dtype))
    total = like.new_empty(0 if call.sum_out is SumOut.NONE else shape, dtype=getattr(torch, call.dtype))
    return normalized, total
