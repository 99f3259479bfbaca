"""`weave::all_gather_gemm`: the rows of all ranks, multiplied by every weight that reads them.

    whole = all_gather_tensor(shard.view(outer, inner, hidden), 1)     # rows [outer, world, inner]
    rows = whole.view(-1, hidden)
    return [rows, rows @ b[0] + addends[0], rows @ b[1] + addends[1], ...]

`shard` holds this rank's [outer, inner] rows of `hidden` elements, `b` are [hidden, n] with an n for each GEMM, and an
addend is [n], [tokens, n] or None. All are bf16, fp16 or fp32. `outer` is 1 where whole activations are gathered along
their rows, the batch where each sequence is. The first result is empty [0] where call.returns_rows is false, else
[tokens, hidden]; the others are [tokens, n]. `call` is an encoded `AllGatherGemmCall`.

On `shm` a rank copies its shard into its segment and signals; the others copy it to its place as soon as they see that,
in the order of the GEMM's rows. On `peer` copy engines push shards to all peers; GEMMs follow, or with `call.cut` begin
with the rows that are here: those of bf16 or fp16 to which no rows are added, rows of one block, on compute capability
9.0. Above `call.max_tokens` rows, or with fabric `library`, the library's all-gather runs. The rows are the same bits
on every way.

Raises `PeerTimeoutError` where a peer's signal does not come, `AgreementError` where a peer runs another site or token
count, `ArenaError` where no arena was reserved. After one of the first two the group's arena stays unusable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Protocol

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.rows_call import BoundCalls, decode
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall, Weights
from weaveopt.ops.gemm_comm.all_gather.peer import PeerAllGatherGemm
from weaveopt.ops.gemm_comm.all_gather.shm import ShmAllGatherGemm
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional
NAME = "all_gather_gemm"


class BoundAllGatherGemm(Protocol):
    """A call bound to the arena of its group."""

    @staticmethod
    def buffers(call: AllGatherGemmCall) -> tuple[Buffer, ...]:
        """Arena buffers of the call on every rank."""
        ...

    @staticmethod
    def bind(call: AllGatherGemmCall, text: str, op: str, forget: Callable[[], None]) -> BoundAllGatherGemm:
        """`call`, encoded as `text`, of the operator `op`; `forget` runs when the arena goes.

        Raises `ArenaError` if no arena was reserved or the call does not fit it.
        """
        ...

    def run(self, shard: Tensor, weights: Weights, outer: int) -> tuple[Tensor, list[Tensor]] | None:
        """The gathered rows and the results of the GEMMs; None where the library has to run."""
        ...


SITES: Mapping[Fabric, type[BoundAllGatherGemm]] = MappingProxyType(
    {Fabric.SHM: ShmAllGatherGemm, Fabric.PEER: PeerAllGatherGemm}
)
"""Implementation of a call by fabric; the library's is not bound to an arena."""


def _bind(call: AllGatherGemmCall, text: str, forget: Callable[[], None]) -> BoundAllGatherGemm | None:
    kind = SITES.get(call.fabric)
    return None if kind is None else kind.bind(call, text, NAME, forget)


_bound: BoundCalls[AllGatherGemmCall, BoundAllGatherGemm] = BoundCalls(AllGatherGemmCall, _bind)


def gathered(shards: Sequence[Tensor], outer: int, call: AllGatherGemmCall) -> Tensor:
    """The rows [outer, world, inner] of all ranks' `shards`, as [tokens, hidden], in one process."""
    blocks = torch.stack([shard.reshape(outer, -1, call.hidden) for shard in shards], dim=1)
    return blocks.reshape(-1, call.hidden)


def through_library(shard: Tensor, outer: int, call: AllGatherGemmCall) -> Tensor:
    """The gathered rows by the process group's own all-gather."""
    own = shard.reshape(-1, call.hidden).contiguous()
    whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(own, call.world, call.group))
    return gathered(whole.chunk(call.world), outer, call) if outer > 1 else whole


def _run(
    device: str, shard: Tensor, b: list[Tensor], addends: list[Tensor | None], outer: int, call: str
) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        site, decoded, weights = _bound.of(device, call), decode(AllGatherGemmCall, call), Weights(b, addends)
        results = None if site is None else site.run(shard, weights, outer)
        if results is None:
            rows = through_library(shard, outer, decoded)
            results = rows, weights.multiply(rows)
        rows, products = results
        return [rows if decoded.returns_rows else rows.new_empty(0), *products]


def _fake(shard: Tensor, b: Sequence[Tensor], addends: Sequence[Tensor | None], outer: int, call: str) -> list[Tensor]:
    site = decode(AllGatherGemmCall, call)
    if shard.dtype is not getattr(torch, site.dtype):
        raise WeaveError(f"site {site.site}: planned for {site.dtype}, called with {shard.dtype}")
    *leading, last = shard.shape
    own = prod(leading) if last == site.hidden else shard.numel() // site.hidden
    tokens = own * site.world
    rows = shard.new_empty((tokens, site.hidden) if site.returns_rows else (0,))
    return [rows, *(shard.new_empty(tokens, each.shape[1]) for each in b)]


_library = torch.library.Library("weave", "FRAGMENT")
# Any strides are taken, so Inductor need not copy inputs into the ones that were traced.
_library.define(
    f"{NAME}(Tensor shard, Tensor[] b, Tensor?[] addends, SymInt outer, str call) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
for _device in ("cpu", "cuda"):
    _library.impl(NAME, functools.partial(_run, _device), _device.upper())
torch.library.register_fake(f"weave::{NAME}", _fake, lib=_library)
