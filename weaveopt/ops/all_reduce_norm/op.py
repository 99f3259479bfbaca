"""`weave::all_reduce_norm`, `mm_all_reduce_norm` and `all_reduce_norm_quant`: sum over ranks, residual and norm.

    partial = a @ b (+ addend)                 # mm form only: straight into the arena, no copy
    s = all_reduce(partial, "sum")             # in fp32, in a fixed order: bitwise alike on all ranks and runs
    s = (s + reduced_bias) * scale
    s = norm_post(s)                           # where call.post
    s = residual + s
    sum = s.to(dtype)                          # rounded once; empty [0] where call.sum_out is none
    normed = norm(sum)                         # of the rounded sum, in fp32; empty [0] where call.norm is None
    normed = e4m3(normed.to(dtype) / scale)    # quant form only: scale is quant_scale, or row_scale by token

Every argument but the first is optional. Shapes: `partial` and `residual` [..., hidden], `a` [tokens, k], `b` [k,
hidden], `addend` [hidden] or [tokens, hidden], `scale` [], the other parameters [hidden]. Results are contiguous and
have the shape of `residual` if given, else of `partial`. Activations are bf16, fp16 or fp32, parameters the same or
fp32. `call` is an encoded `AllReduceNormCall`.

With call.normed_lands, `normed` may be a view of the arena that the group's next call, in whatever graph, overwrites.

`row_scale` is [..., 1] in fp32, or empty [0] where call.quant is not `per_token`.

On `shm`, up to `call.one_shot_max_tokens` tokens every rank computes all rows (one synchronization); above, its share
of them, and rows are handed out (two). On `peer`, `call.lowerings` says so by token count, and which kernel runs; with
`call.in_pieces` more tokens run in pieces of `call.max_tokens`. Else above `call.max_tokens`, where the device has no
kernel for the rows, or with fabric `library`, the library's all-reduce runs, summing in `dtype`, and the rest in torch.

Raises `PeerTimeoutError` where a peer's signal does not come, `AgreementError` where a peer runs another site or
token count, `ArenaError` where no arena was reserved. After such an error the group's arena stays unusable.
The fused form follows TokenWeave (section 4), the residual that stays sharded by tokens included.
"""

from __future__ import annotations

import functools

import torch

from weaveopt.errors import WeaveError
from weaveopt.ops.all_reduce_norm.call import GPU_FABRICS, SumOut, decode
from weaveopt.ops.all_reduce_norm.peer import PeerSite
from weaveopt.ops.all_reduce_norm.reference import QuantResults, Results, row_scale_shape, through_library
from weaveopt.ops.all_reduce_norm.reference import reference as reference
from weaveopt.ops.all_reduce_norm.reference import reference_quant as reference_quant
from weaveopt.ops.all_reduce_norm.shm import ShmSite
from weaveopt.records.candidate import Fabric

Tensor = torch.Tensor

_REST = (
    "Tensor? reduced_bias, Tensor? scale, Tensor? residual, Tensor? post_weight, Tensor? post_bias, "
    "Tensor? weight, Tensor? bias, str call) -> (Tensor normed, Tensor sum)"
)
_QUANT_REST = _REST.replace("str call", "Tensor? quant_scale, str call").replace(
    "Tensor sum)", "Tensor sum, Tensor row_scale)"
)
# Any strides are taken, so Inductor need not copy inputs into the ones that were traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library = torch.library.Library("weave", "FRAGMENT")
_library.define(f"all_reduce_norm(Tensor partial, {_REST}", tags=_TAGS)
_library.define(f"mm_all_reduce_norm(Tensor a, Tensor b, Tensor? addend, {_REST}", tags=_TAGS)
_library.define(f"all_reduce_norm_quant(Tensor partial, {_QUANT_REST}", tags=_TAGS)

_sites: dict[str, ShmSite] = {}
"""Sites bound to the arena that they ran in last, by encoded call."""
_peer_sites: dict[str, PeerSite] = {}
"""The same on GPUs."""


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


def _peer_site(call: str, op: str) -> PeerSite | None:
    """The bound site, or None where the library runs."""
    decoded = decode(call)
    if decoded.fabric not in GPU_FABRICS:
        return None
    site = _peer_sites[call] = PeerSite.bind(decoded, call, op, functools.partial(_forget, call))
    return site


def _forget(call: str) -> None:
    _sites.pop(call, None)
    _peer_sites.pop(call, None)


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
    return through_library(
        partial.clone(memory_format=torch.contiguous_format),
        reduced_bias, scale, residual, post_weight, post_bias, weight, bias, None, decode(call),
    )[:2]  # fmt: skip


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
        return through_library(
            partial, reduced_bias, scale, residual, post_weight, post_bias, weight, bias, None, decode(call)
        )[:2]


def _all_reduce_norm_quant(
    partial: Tensor,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    call: str,
) -> QuantResults:
    """On the CPU no fabric quantizes."""
    return through_library(
        partial.clone(memory_format=torch.contiguous_format),
        reduced_bias, scale, residual, post_weight, post_bias, weight, bias, quant_scale, decode(call),
    )  # fmt: skip


def _all_reduce_norm_quant_cuda(
    partial: Tensor,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    call: str,
    op: str = "all_reduce_norm_quant",
) -> QuantResults:
    site = _peer_sites.get(call) or _peer_site(call, op)
    if site is not None:
        tokens = partial.numel() // site.hidden
        pieces = site.pieces(tokens)
        if pieces:
            return site.run(
                pieces, tokens, partial, None,
                reduced_bias, scale, residual, post_weight, post_bias, weight, bias, quant_scale,
            )  # fmt: skip
    return through_library(
        partial.clone(memory_format=torch.contiguous_format),
        reduced_bias, scale, residual, post_weight, post_bias, weight, bias, quant_scale, decode(call),
    )  # fmt: skip


def _all_reduce_norm_cuda(
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
    return _all_reduce_norm_quant_cuda(
        partial, reduced_bias, scale, residual, post_weight, post_bias, weight, bias, None, call, "all_reduce_norm"
    )[:2]


def _mm_all_reduce_norm_cuda(
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
    with torch._C._AutoDispatchBelowAutograd():
        site = _peer_sites.get(call) or _peer_site(call, "mm_all_reduce_norm")
        pieces = site.pieces(a.shape[0]) if site is not None else ()
        if site is not None and pieces:
            return site.run(
                pieces, a.shape[0], None, (a, b, addend),
                reduced_bias, scale, residual, post_weight, post_bias, weight, bias, None,
            )[:2]  # fmt: skip
        partial = torch.mm(a, b) if addend is None else torch.addmm(addend, a, b)
        return through_library(
            partial, reduced_bias, scale, residual, post_weight, post_bias, weight, bias, None, decode(call)
        )[:2]


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


def _fake_all_reduce_norm_quant(
    partial: Tensor,
    reduced_bias: Tensor | None,
    scale: Tensor | None,
    residual: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    call: str,
) -> QuantResults:
    _expect_dtype(partial, call)
    shape = partial.shape if residual is None else residual.shape
    decoded = decode(call)
    row_scale = partial.new_empty(
        row_scale_shape(shape, decoded) if decoded.norm is not None else 0, dtype=torch.float32
    )
    return *_fake(shape, partial, call), row_scale


def _expect_dtype(x: Tensor, call: str) -> None:
    decoded = decode(call)
    if x.dtype is not getattr(torch, decoded.dtype):
        raise WeaveError(f"site {decoded.site}: planned for {decoded.dtype}, called with {x.dtype}")


_library.impl("all_reduce_norm", _all_reduce_norm, "CPU")
_library.impl("mm_all_reduce_norm", _mm_all_reduce_norm, "CPU")
_library.impl("all_reduce_norm_quant", _all_reduce_norm_quant, "CPU")
_library.impl("all_reduce_norm", _all_reduce_norm_cuda, "CUDA")
_library.impl("mm_all_reduce_norm", _mm_all_reduce_norm_cuda, "CUDA")
_library.impl("all_reduce_norm_quant", _all_reduce_norm_quant_cuda, "CUDA")
torch.library.register_fake("weave::all_reduce_norm", _fake_all_reduce_norm, lib=_library)
torch.library.register_fake("weave::mm_all_reduce_norm", _fake_mm_all_reduce_norm, lib=_library)
torch.library.register_fake("weave::all_reduce_norm_quant", _fake_all_reduce_norm_quant, lib=_library)
