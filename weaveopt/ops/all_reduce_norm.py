"""`weave::all_reduce_norm` and `weave::mm_all_reduce_norm`: sum over ranks, residual and norm in one pass.

    partial = a @ b (+ addend)                 # mm form only: straight into the arena, no copy
    s = all_reduce(partial, "sum")             # in fp32, ranks in order: bitwise alike on all ranks and runs
    s = (s + reduced_bias) * scale
    s = norm_post(s)                           # where call.post
    s = residual + s
    sum = s.to(dtype)                          # rounded once; empty [0] where call.sum_out is none
    normed = norm(sum)                         # of the rounded sum, in fp32; empty [0] where call.norm is None

Every argument but the first is optional. Shapes: `partial` and `residual` [..., hidden], `a` [tokens, k], `b` [k,
hidden], `addend` [hidden] or [tokens, hidden], `scale` [], the other parameters [hidden]. Results are contiguous and
have the shape of `residual` if given, else of `partial`. Activations are bf16, fp16 or fp32, parameters the same or
fp32. `call` is an encoded `AllReduceNormCall`.

Up to `call.one_shot_max_tokens` tokens every rank computes all rows (one synchronization); above, its share of them,
and rows are handed out (two); above `call.max_tokens`, or with fabric `library`, the library's all-reduce runs,
which sums in `dtype`, and the rest in torch.

Raises `PeerTimeoutError` where a peer's signal does not come, `AgreementError` where a peer runs another site or
token count, `ArenaError` where no arena was reserved. After such an error the group's arena stays unusable.
The fused form follows TokenWeave (section 4), the residual that stays sharded by tokens included.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from weaveopt.decision import Fabric
from weaveopt.errors import WeaveError
from weaveopt.ops.all_reduce_norm_call import AllReduceNormCall, NormForm, NormKind, SumOut, decode
from weaveopt.ops.all_reduce_norm_shm import ShmSite
from weaveopt.runtime import topology

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor]

_REST = (
    "Tensor? reduced_bias, Tensor? scale, Tensor? residual, Tensor? post_weight, Tensor? post_bias, "
    "Tensor? weight, Tensor? bias, str call) -> (Tensor normed, Tensor sum)"
)
# Any strides are taken, so Inductor need not copy inputs into the ones that were traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library = torch.library.Library("weave", "FRAGMENT")
_library.define(f"all_reduce_norm(Tensor partial, {_REST}", tags=_TAGS)
_library.define(f"mm_all_reduce_norm(Tensor a, Tensor b, Tensor? addend, {_REST}", tags=_TAGS)

_sites: dict[str, ShmSite] = {}
"""Sites bound to the arena that they ran in last, by encoded call."""


def _site(call: str) -> ShmSite | None:
    """The bound site, or None where the library runs."""
    site = _sites.get(call)
    if site is None:
        decoded = decode(call)
        if decoded.fabric is not Fabric.SHM:
            return None
        site = ShmSite.bind(decoded, call, functools.partial(_forget, call))
        _sites[call] = site
    return site


def _forget(call: str) -> None:
    _sites.pop(call, None)


def _all_reduce_norm(
    partial: Tensor,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    call: str,
) -> Results:
    site = _sites.get(call) or _site(call)
    if site is not None:
        tokens = partial.numel() // site.hidden
        if tokens <= site.max_tokens:
            return site.run(tokens, partial, None, reduced_bias, scale, residual, post_weight, post_bias, weight, bias)
    return _through_library(
        partial.clone(memory_format=torch.contiguous_format),
        reduced_bias, scale, residual, post_weight, post_bias, weight, bias, decode(call),
    )  # fmt: skip


def _mm_all_reduce_norm(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    call: str,
) -> Results:
    # Below autograd: the product goes into an `out=`, which autograd refuses for inputs that require gradients.
    with torch._C._AutoDispatchBelowAutograd():
        site = _sites.get(call) or _site(call)
        if site is not None and a.shape[0] <= site.max_tokens:
            return site.run(
                a.shape[0], None, (a, b, addend),
                reduced_bias, scale, residual, post_weight, post_bias, weight, bias,
            )  # fmt: skip
        partial = torch.mm(a, b) if addend is None else torch.addmm(addend, a, b)
        return _through_library(
            partial, reduced_bias, scale, residual, post_weight, post_bias, weight, bias, decode(call)
        )


def _through_library(
    partial: Tensor,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    call: AllReduceNormCall,
) -> Results:
    """The same with the process group's own all-reduce; `partial` is overwritten."""
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
    return _finish(partial.float(), reduced_bias, scale, residual, post_weight, post_bias, weight, bias, call)


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
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return _finish(total, reduced_bias, scale, residual, post_weight, post_bias, weight, bias, call)


def _finish(
    total: Tensor,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    call: AllReduceNormCall,
) -> Results:
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
    if call.norm is None:
        return empty.to(getattr(torch, call.out_dtype)), out
    return _norm(rounded.float(), weight, bias, call.norm, dtype).to(getattr(torch, call.out_dtype)), out


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


def _fake(shape: torch.Size | tuple[int, ...], like: Tensor, call: str) -> Results:
    decoded = decode(call)
    normed = like.new_empty(0 if decoded.norm is None else shape, dtype=getattr(torch, decoded.out_dtype))
    total = like.new_empty(0 if decoded.sum_out is SumOut.NONE else shape, dtype=getattr(torch, decoded.dtype))
    return normed, total


def _fake_all_reduce_norm(
    partial: Tensor,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    call: str,
) -> Results:
    _expect_dtype(partial, call)
    return _fake(partial.shape if residual is None else residual.shape, partial, call)


def _fake_mm_all_reduce_norm(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    call: str,
) -> Results:
    _expect_dtype(a, call)
    return _fake((a.shape[0], b.shape[1]) if residual is None else residual.shape, a, call)


def _expect_dtype(x: Tensor, call: str) -> None:
    decoded = decode(call)
    if x.dtype is not getattr(torch, decoded.dtype):
        raise WeaveError(f"site {decoded.site}: planned for {decoded.dtype}, called with {x.dtype}")


_library.impl("all_reduce_norm", _all_reduce_norm, "CPU")
_library.impl("mm_all_reduce_norm", _mm_all_reduce_norm, "CPU")
torch.library.register_fake("weave::all_reduce_norm", _fake_all_reduce_norm, lib=_library)
torch.library.register_fake("weave::mm_all_reduce_norm", _fake_mm_all_reduce_norm, lib=_library)
