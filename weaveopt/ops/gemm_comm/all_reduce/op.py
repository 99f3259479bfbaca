"""`weave::gemm_all_reduce_norm`: GEMM, sum over ranks, residual and norm; rows are exchanged while others are made.

    partial = input @ weight.t()                   # weight_layout "nk"; input @ weight where it is "kn"
    s = all_reduce(partial, "sum")                 # in fp32, in a fixed order: bitwise the same on all ranks and runs
    s = (s + reduced_bias) * scale
    s = norm_post(s)                               # where call.reduction.post
    s = residual + s
    sum = s.to(dtype)                              # rounded once; empty [0] where call.reduction.sum_out is none
    normalized = norm(sum)                         # of the rounded sum, in fp32; empty [0] where there is no norm

Shapes: `input` [tokens, k], `weight` [hidden, k] or [k, hidden], `residual` [..., hidden] of as many rows, `scale` [],
the other parameters [hidden]; all but the first two are optional. Results are contiguous and have the shape of
`residual` if given, else [tokens, hidden]. Activations and `weight` are bf16, fp16 or fp32, parameters the same or
fp32. `call` is an encoded `GemmReductionCall`.

Variant `chunks`: rows in chunks of `call.reduction.max_tokens`, the last one perhaps shorter. On `peer` the GEMM of a
chunk runs while the one before is exchanged; on `shm` chunks follow one another. Rows are divided among ranks chunk by
chunk, so neither residual nor sum can stay sharded by tokens.

Variant `tiles`, on `peer`, compute capability 9.0: one kernel computes the GEMM, tiled as `call.cut` says, sends every
tile to the owner of its rows as it is finished, and the owner's rows to everyone as their tiles are complete. Rows are
divided as by any two-shot exchange; residual and sum may stay sharded by tokens, and normalized rows may be a view of
the arena. It takes bf16 and fp16, rows and depths of multiples of 8 elements, no first norm, and an RMS norm without a
bias or none.

Where ranks hold different residuals or parameters, where the device has no kernel for the rows, or with fabric
`library`, the library reduces the whole result of the GEMM.

Raises `PeerTimeoutError` where a peer's signal does not come, `AgreementError` where a peer runs another site or
token count, `ArenaError` where no arena was reserved. After such an error the group's arena stays unusable.
Chunks follow FlashOverlap (section 4): whole groups of tiles are exchanged while the GEMM goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.gemm_comm.all_reduce import peer
from weaveopt.ops.gemm_comm.all_reduce.call import GemmReductionCall, decode
from weaveopt.ops.gemm_comm.all_reduce.operands import gemm_of
from weaveopt.ops.gemm_comm.all_reduce.shm import ShmGemm
from weaveopt.ops.reduction.call import SumOut
from weaveopt.ops.reduction.operands import Argument, DeferredGemm, EpilogueOperands, Results, split
from weaveopt.ops.reduction.reference import through_library
from weaveopt.records.candidate import Fabric

Tensor = torch.Tensor
NAME = "gemm_all_reduce_norm"


class BoundGemmAllReduce(Protocol):
    """A call bound to the arena of its group."""

    def run(self, gemm: DeferredGemm, operands: EpilogueOperands) -> Results | None:
        """normalized and sum; None where the library has to run."""
        ...


Bind = Callable[[GemmReductionCall, str, str, Callable[[], None]], BoundGemmAllReduce]

SITES: Mapping[Fabric, Bind] = MappingProxyType({Fabric.SHM: ShmGemm.bind, Fabric.PEER: peer.bind})
"""Function that binds a call, by fabric; the library's is not bound to an arena."""

_bound: Mapping[str, dict[str, BoundGemmAllReduce]] = MappingProxyType({"cpu": {}, "cuda": {}})
"""Sites by device and encoded call, bound to the arena that they ran in last."""


def _bind(device: str, text: str) -> BoundGemmAllReduce | None:
    """The bound site; None where the library runs, as for tensors of a device that the fabric does not join."""
    call = decode(text)
    fabric = call.reduction.fabric
    if fabric not in SITES or TRAITS[fabric].device != device:
        return None
    site = _bound[device][text] = SITES[fabric](call, text, NAME, functools.partial(_forget, device, text))
    return site


def _forget(device: str, text: str) -> None:
    _bound[device].pop(text, None)


def _run(device: str, input: Tensor, weight: Tensor, weight_layout: str, *rest: Argument) -> Results:
    operands, text = split(rest)
    call = decode(text)
    # Below autograd: the GEMM goes into an `out=`, which autograd refuses for inputs that require gradients.
    with torch._C._AutoDispatchBelowAutograd():
        gemm = gemm_of(input, weight, weight_layout, call)
        site = _bound[device].get(text) or _bind(device, text)
        results = None if site is None else site.run(gemm, operands)
        if results is None:
            results = through_library(gemm.compute(), operands, call.reduction)[:2]
    return results


def _fake(input: Tensor, weight: Tensor, weight_layout: str, *rest: Argument) -> Results:
    operands, text = split(rest)
    call = decode(text)
    gemm, known = gemm_of(input, weight, weight_layout, call), call.reduction
    rows = (input.shape[0], gemm.b.shape[1])
    shape = rows if operands.residual is None else operands.residual.shape
    normalized = input.new_empty(0 if known.norm is None else shape, dtype=getattr(torch, known.out_dtype))
    return normalized, input.new_empty(0 if known.sum_out is SumOut.NONE else shape)


_library = torch.library.Library("weave", "FRAGMENT")
_library.define(
    f"{NAME}(Tensor input, Tensor weight, str weight_layout, Tensor? reduced_bias, Tensor? scale, Tensor? residual, "
    "Tensor? post_weight, Tensor? post_bias, Tensor? norm_weight, Tensor? norm_bias, str call) "
    "-> (Tensor normalized, Tensor sum)",
    # Any strides are taken, so Inductor need not copy inputs into the ones that were traced.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
for _device in _bound:
    _library.impl(NAME, functools.partial(_run, _device), _device.upper())
torch.library.register_fake(f"weave::{NAME}", _fake, lib=_library)
