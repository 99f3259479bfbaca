"""`weave::all_reduce_norm`, its forms `mm_...` and `..._quant`: sum over ranks, residual and norm.

    partial = a @ b (+ addend)                     # mm form only: straight into the arena, no copy
    s = all_reduce(partial, "sum")                 # in fp32, in a fixed order: bitwise the same on all ranks and runs
    s = (s + reduced_bias) * scale
    s = norm_post(s)                               # where call.post
    s = residual + s
    sum = s.to(dtype)                              # rounded once; empty [0] where call.sum_out is none
    normalized = norm(sum)                         # of the rounded sum, in fp32; empty [0] where call.norm is None
    normalized = e4m3(normalized.to(dtype) / scale)    # quant form only: scale is quant_scale, or row_scale by token

Every argument but the first is optional. Shapes: `partial` and `residual` [..., hidden], `a` [tokens, k], `b` [k,
hidden], `addend` [hidden] or [tokens, hidden], `scale` [], the other parameters [hidden]. Results are contiguous and
have the shape of `residual` if given, else of `partial`. Activations are bf16, fp16 or fp32, parameters the same or
fp32. `call` is an encoded `ReductionCall`.

With call.normalized_aliases_arena, `normalized` may be a view of the arena that the group's next call, in whatever
graph, overwrites.

`row_scale` is [..., 1] in fp32, or empty [0] where call.quant is not `per_token`.

On `shm`, up to `call.one_shot_max_tokens` tokens every rank computes all rows (one synchronization); above, its share
of them, and rows are distributed (two). On `peer`, `call.table` says so by token count, and which kernel runs; with
`call.in_pieces` more tokens run in pieces of `call.max_tokens`. Else above `call.max_tokens`, where the device has no
kernel for the rows, or with fabric `library`, the library's all-reduce runs, summing in `dtype`, and the rest in torch.

Raises `PeerTimeoutError` where a peer's signal does not come, `AgreementError` where a peer runs another site or
token count, `ArenaError` where no arena was reserved. After such an error the group's arena stays unusable.
The fused form follows TokenWeave (section 4), the residual that stays sharded by tokens included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from weaveopt.fabrics import multicast
from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.reduction.call import ReductionCall, decode
from weaveopt.ops.reduction.first_call import MulticastCalls
from weaveopt.ops.reduction.host import HostReduction
from weaveopt.ops.reduction.in_flight import empty_results, no_scale
from weaveopt.ops.reduction.nvshmem import NvshmemSite
from weaveopt.ops.reduction.operands import Argument, DeferredGemm, EpilogueOperands, QuantResults, Results, split
from weaveopt.ops.reduction.peer import PeerReduction
from weaveopt.ops.reduction.reference import through_library
from weaveopt.ops.reduction.shm import ShmReduction
from weaveopt.ops.reduction.tcp import TcpSite
from weaveopt.records.candidate import Fabric

Tensor = torch.Tensor

_REST = (
    "Tensor? reduced_bias, Tensor? scale, Tensor? residual, Tensor? post_weight, Tensor? post_bias, "
    "Tensor? weight, Tensor? bias, str call) -> (Tensor normalized, Tensor sum)"
)
_QUANT_REST = _REST.replace("str call", "Tensor? quant_scale, str call").replace(
    "Tensor sum)", "Tensor sum, Tensor row_scale)"
)
# Any strides are taken, so Inductor need not copy inputs into the ones that were traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


class BoundReduction(Protocol):
    """A call bound to the arena of its group."""

    @staticmethod
    def bind(call: ReductionCall, text: str, op: str, forget: Callable[[], None]) -> BoundReduction:
        """`call`, encoded as `text`, of the operator `op`; `forget` runs when the arena goes.

        Raises `ArenaError` if no arena was reserved or the call does not fit it.
        """
        ...

    def run(
        self, partial: Tensor | DeferredGemm, operands: EpilogueOperands
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """normalized, sum, and row_scale where there is one; None where the library has to run."""
        ...


SITES: Mapping[Fabric, type[BoundReduction]] = MappingProxyType({
    Fabric.SHM: ShmReduction,
    Fabric.TCP: TcpSite,
    Fabric.PEER: PeerReduction,
    Fabric.MULTIMEM: PeerReduction,
    Fabric.HOST: HostReduction,
    Fabric.NVSHMEM: NvshmemSite,
})  # fmt: skip
"""Implementation of a call by fabric; the library's is not bound to an arena."""

_bound: Mapping[str, dict[str, BoundReduction]] = MappingProxyType({"cpu": {}, "cuda": {}})
"""Sites by device and encoded call, bound to the arena that they ran in last."""


def _bind(device: str, call: str, op: str) -> BoundReduction | None:
    """The bound site; None where the library runs, as for tensors of a device that the fabric does not join."""
    decoded = decode(call)
    kind = SITES.get(decoded.fabric)
    if kind is None or TRAITS[decoded.fabric].device != device:
        return None
    site = _bound[device][call] = kind.bind(decoded, call, op, functools.partial(_forget, device, call))
    return site


def _forget(device: str, call: str) -> None:
    _bound[device].pop(call, None)


def _run(
    device: str, op: str, partial: Tensor | DeferredGemm, operands: EpilogueOperands, call: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    site = _bound[device].get(call) or _bind(device, call, op)
    results = None if site is None else site.run(partial, operands)
    if results is not None:
        return results
    own = (
        partial.compute() if isinstance(partial, DeferredGemm) else partial.clone(memory_format=torch.contiguous_format)
    )
    return through_library(own, operands, decode(call))


def _all_reduce_norm(device: str, partial: Tensor, *rest: Argument) -> Results:
    return _run(device, "all_reduce_norm", partial, *split(rest))[:2]


def _mm_all_reduce_norm(device: str, a: Tensor, b: Tensor, addend: Tensor | None, *rest: Argument) -> Results:
    # Below autograd: the GEMM goes into an `out=`, which autograd refuses for inputs that require gradients.
    with torch._C._AutoDispatchBelowAutograd():
        return _run(device, "mm_all_reduce_norm", DeferredGemm(a, b, addend), *split(rest))[:2]


def _all_reduce_norm_quant(device: str, partial: Tensor, *rest: Argument) -> QuantResults:
    normalized, total, row_scale = _run(device, "all_reduce_norm_quant", partial, *split(rest))
    return normalized, total, no_scale(total) if row_scale is None else row_scale


def _fake_all_reduce_norm(partial: Tensor, *rest: Argument) -> Results:
    operands, call = split(rest)
    return empty_results(partial, partial.shape, operands, decode(call))[:2]


def _fake_mm_all_reduce_norm(a: Tensor, b: Tensor, addend: Tensor | None, *rest: Argument) -> Results:
    operands, call = split(rest)
    return empty_results(a, (a.shape[0], b.shape[1]), operands, decode(call))[:2]


def _fake_all_reduce_norm_quant(partial: Tensor, *rest: Argument) -> QuantResults:
    operands, call = split(rest)
    return empty_results(partial, partial.shape, operands, decode(call))


multicast.register(MulticastCalls())
_library = torch.library.Library("weave", "FRAGMENT")


def _register(schema: str, run: Callable[..., tuple[Tensor, ...]], traced: Callable[..., tuple[Tensor, ...]]) -> None:
    """One implementation for every device; the call's fabric says what runs."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    for device in _bound:
        _library.impl(name, functools.partial(run, device), device.upper())
    torch.library.register_fake(f"weave::{name}", traced, lib=_library)


_register(f"all_reduce_norm(Tensor partial, {_REST}", _all_reduce_norm, _fake_all_reduce_norm)
_register(
    f"mm_all_reduce_norm(Tensor a, Tensor b, Tensor? addend, {_REST}", _mm_all_reduce_norm, _fake_mm_all_reduce_norm
)
_register(f"all_reduce_norm_quant(Tensor partial, {_QUANT_REST}", _all_reduce_norm_quant, _fake_all_reduce_norm_quant)
