"""What `all_reduce_norm` computes, in plain torch, and the form that the process group's own all-reduce runs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weaveopt.errors import WeaveError
from weaveopt.fabrics import topology
from weaveopt.ops.all_reduce_norm.call import AllReduceNormCall, NormForm, NormKind, Quant, SumOut

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor]
QuantResults = tuple[Tensor, Tensor, Tensor]

LARGEST_FP8 = 448.0
LEAST_AMAX = 1e-12
"""A row of zeros gets a scale too."""


def reference(
    partials: list[Tensor],
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    call: AllReduceNormCall,
) -> Results:
    """What every rank must get from `partials`, one per rank, in plain torch and one process."""
    return reference_quant(
        partials, reduced_bias, scale, residual, post_weight, post_bias, weight, bias, None, call
    )[:2]  # fmt: skip


def reference_quant(
    partials: list[Tensor],
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    call: AllReduceNormCall,
) -> QuantResults:
    """The same of `all_reduce_norm_quant`."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return _finish(total, reduced_bias, scale, residual, post_weight, post_bias, weight, bias, quant_scale, call)


def through_library(
    partial: Tensor,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    call: AllReduceNormCall,
) -> QuantResults:
    """The op with the process group's own all-reduce; `partial` is overwritten."""
    group = topology.process_group(call.group)
    dist.all_reduce(partial, group=group)
    if residual is not None and call.residual_sharded:
        # Own rows, zeros elsewhere: the sum over ranks is the whole residual, exactly.
        rows = residual.reshape(-1, call.hidden)
        begin, end = call.share(rows.shape[0], dist.get_rank(group))
        whole = torch.zeros_like(rows)
        whole[begin:end] = rows[begin:end]
        dist.all_reduce(whole, group=group)
        residual = whole.view(residual.shape)
    total = partial.float()
    return _finish(total, reduced_bias, scale, residual, post_weight, post_bias, weight, bias, quant_scale, call)


def row_scale_shape(shape: torch.Size | tuple[int, ...], call: AllReduceNormCall) -> tuple[int, ...]:
    """Of the third result, where normed has `shape`: one value a row, or none."""
    return (*shape[:-1], 1) if call.quant is Quant.PER_TOKEN else (0,)


def _finish(
    total: Tensor,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    call: AllReduceNormCall,
) -> QuantResults:
    """Everything after the sum over ranks; `total` is that sum in fp32."""
    dtype = getattr(torch, call.dtype)
    if reduced_bias is not None:
        total = total + reduced_bias.float()
    total = total * (call.scale if scale is None else call.scale * scale.float())
    if call.post is not None:
        total = _norm(total, post_weight, post_bias, call.post, dtype)
    if residual is not None:
        total = residual.contiguous().float() + total.view(residual.shape)
    rounded = total.to(dtype)
    empty = rounded.new_empty(0)
    out = rounded if call.sum_out is not SumOut.NONE else empty
    no_scale = rounded.new_empty(0, dtype=torch.float32)
    if call.norm is None:
        return empty.to(getattr(torch, call.out_dtype)), out, no_scale
    normed = _norm(rounded.float(), weight, bias, call.norm, dtype)
    if call.quant is Quant.NONE:
        return normed.to(getattr(torch, call.out_dtype)), out, no_scale
    normed = normed.to(dtype).float()
    if call.quant is Quant.PER_TOKEN:
        row_scale = normed.abs().amax(-1, keepdim=True).clamp_min(LEAST_AMAX) / LARGEST_FP8
        return _fp8(normed, row_scale, call), out, row_scale
    if quant_scale is None:
        raise WeaveError(f"site {call.site}: a static quantization needs quant_scale; call all_reduce_norm_quant")
    return _fp8(normed, quant_scale.float(), call), out, no_scale


def _fp8(x: Tensor, scale: Tensor, call: AllReduceNormCall) -> Tensor:
    return (x * (1.0 / scale)).clamp(-LARGEST_FP8, LARGEST_FP8).to(getattr(torch, call.out_dtype))


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, form: NormForm, dtype: torch.dtype) -> Tensor:
    """`form` of fp32 `x`, in fp32."""
    if form.kind is NormKind.LAYER:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + form.eps)
    if form.cast_before_weight:
        x = x.to(dtype).float()
    if weight is not None:
        x = x * (weight.float() + form.weight_offset)
    return x if bias is None else x + bias.float()
