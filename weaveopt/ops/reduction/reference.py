"""Reference of `all_reduce_norm` in plain torch, and the op over the process group's own all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weaveopt.errors import WeaveError
from weaveopt.fabrics import topology
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands, QuantResults, Results
from weaveopt.records.norm import NormKind, NormSpec, Quant

Tensor = torch.Tensor

LARGEST_FP8 = 448.0
LEAST_AMAX = 1e-12
"""A row of zeros gets a scale too."""


def reference(partials: Sequence[Tensor], operands: EpilogueOperands, call: ReductionCall) -> Results:
    """Results that every rank must get from `partials` [..., hidden], one per rank, in plain torch and one process."""
    return reference_quant(partials, operands, call)[:2]


def reference_quant(partials: Sequence[Tensor], operands: EpilogueOperands, call: ReductionCall) -> QuantResults:
    """The same of `all_reduce_norm_quant`."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return finish(total, operands, call)


def through_library(partial: Tensor, operands: EpilogueOperands, call: ReductionCall) -> QuantResults:
    """The op with the process group's own all-reduce, which sums in `call.dtype`; `partial` is overwritten."""
    group = topology.process_group(call.group)
    dist.all_reduce(partial, group=group)
    residual = operands.residual
    if residual is not None and call.residual_sharded:
        # Own rows, zeros elsewhere: the sum over ranks is the whole residual, exactly.
        rows = residual.reshape(-1, call.hidden)
        begin, end = call.share(rows.shape[0], dist.get_rank(group))
        whole = torch.zeros_like(rows)
        whole[begin:end] = rows[begin:end]
        dist.all_reduce(whole, group=group)
        operands = operands._replace(residual=whole.view(residual.shape))
    return finish(partial.float(), operands, call)


def row_scale_shape(shape: torch.Size | tuple[int, ...], call: ReductionCall) -> tuple[int, ...]:
    """Shape of the third result, if the others have `shape`: one value a row, or none."""
    per_token = call.quant is Quant.PER_TOKEN and call.norm is not None
    return (*shape[:-1], 1) if per_token else (0,)


def finish(total: Tensor, operands: EpilogueOperands, call: ReductionCall) -> QuantResults:
    """Everything after the sum over ranks; `total` is that sum in fp32."""
    dtype = getattr(torch, call.dtype)
    if operands.reduced_bias is not None:
        total = total + operands.reduced_bias.float()
    total = total * (call.scale if operands.scale is None else call.scale * operands.scale.float())
    if call.post is not None:
        total = _norm(total, operands.post_weight, operands.post_bias, call.post, dtype)
    if operands.residual is not None:
        total = operands.residual.contiguous().float() + total.view(operands.residual.shape)
    rounded = total.to(dtype)
    empty = rounded.new_empty(0)
    out = rounded if call.sum_out is not SumOut.NONE else empty
    no_scale = rounded.new_empty(0, dtype=torch.float32)
    if call.norm is None:
        return empty.to(getattr(torch, call.out_dtype)), out, no_scale
    normalized = _norm(rounded.float(), operands.weight, operands.bias, call.norm, dtype)
    if call.quant is Quant.NONE:
        return normalized.to(getattr(torch, call.out_dtype)), out, no_scale
    normalized = normalized.to(dtype).float()
    if call.quant is Quant.PER_TOKEN:
        row_scale = normalized.abs().amax(-1, keepdim=True).clamp_min(LEAST_AMAX) / LARGEST_FP8
        return _fp8(normalized, row_scale, call), out, row_scale
    if operands.quant_scale is None:
        raise WeaveError(f"site {call.site}: a static quantization needs quant_scale; call all_reduce_norm_quant")
    return _fp8(normalized, operands.quant_scale.float(), call), out, no_scale


def _fp8(x: Tensor, scale: Tensor, call: ReductionCall) -> Tensor:
    return (x * (1.0 / scale)).clamp(-LARGEST_FP8, LARGEST_FP8).to(getattr(torch, call.out_dtype))


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """`spec` of fp32 `x`, in fp32."""
    if spec.kind is NormKind.LAYER:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps)
    if spec.cast_before_weight:
        x = x.to(dtype).float()
    if weight is not None:
        x = x * (weight.float() + spec.weight_offset)
    return x if bias is None else x + bias.float()
