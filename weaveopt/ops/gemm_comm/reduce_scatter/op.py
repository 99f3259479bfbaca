"""`weave::gemm_reduce_scatter`: this rank's part of the sum over ranks of what GEMMs make.

    partial = a[0] @ b[0] + a[1] @ b[1] + ... + addends    # [tokens, hidden], rounded after each GEMM
    rows = partial.view(outer, world, inner, hidden)[:, r]  # of rank r; of all its columns where call.columns
    return (scale * reduce_scatter_tensor(rows, "sum")).view(-1, hidden)

`a` are [tokens, k] and `b` [k, hidden], with a k for each pair; `addends` [hidden] or [tokens, hidden]. The result is
[tokens / world, hidden], with call.columns [tokens, hidden / world]. All are bf16, fp16 or fp32. `outer` is 1 where
whole activations are cut along their rows, the batch where each sequence is. `call` is an encoded
`GemmReduceScatterCall`. No kernel reads `replicated`: they are what a graph adds this rank's rows to or multiplies them
by, and the first call compares them with the other ranks'.

On `shm` the GEMM writes into the arena, and the owner of a part sums it in fp32 in the order of the ranks and rounds
once: bitwise the same from run to run. So it does on `peer`, either after the library's GEMMs or, with `call.cut`, in
one kernel that computes the GEMM and sends every tile to the owner of its rows as it is finished: for one GEMM of bf16
or fp16 without addends, rows of one block, on compute capability 9.0; other calls use the first form. Above
`call.max_tokens` rows, or with fabric `library`, the library's reduce-scatter runs, summing in `dtype`.

Raises `PeerTimeoutError` where a peer's signal does not come, `AgreementError` where a peer runs another site or token
count, or has other `replicated` values, `ArenaError` where no arena was reserved, `WeaveError` for rows that do not
divide by the ranks. After one of the first two in a kernel the group's arena stays unusable. The form is the GEMM +
reduce-scatter of FlashOverlap (section 2.3.2); on CPU ranks nothing is sent while the GEMM computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from weaveopt.errors import AgreementError
from weaveopt.fabrics import replicated as comparing
from weaveopt.fabrics.rows_call import BoundCalls, decode
from weaveopt.ops.gemm_comm.reduce_scatter import fake
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, GemmReduceScatterNormCall, Products
from weaveopt.ops.gemm_comm.reduce_scatter.peer import PeerGemmReduceScatter
from weaveopt.ops.gemm_comm.reduce_scatter.reference import through_library
from weaveopt.ops.gemm_comm.reduce_scatter.shm import ShmGemmReduceScatter
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer

Tensor = torch.Tensor
NAME = "gemm_reduce_scatter"


class BoundGemmReduceScatter(Protocol):
    """A call bound to the arena of its group."""

    @staticmethod
    def buffers(call: GemmReduceScatterCall) -> tuple[Buffer, ...]:
        """Arena buffers of the call on every rank."""
        ...

    @staticmethod
    def bind(call: GemmReduceScatterCall, text: str, op: str, forget: Callable[[], None]) -> BoundGemmReduceScatter:
        """`call`, encoded as `text`, of the operator `op`; `forget` runs when the arena goes.

        Raises `ArenaError` if no arena was reserved or the call does not fit it.
        """
        ...

    def run(self, products: Products, outer: int) -> Tensor | None:
        """This rank's part; None where the library has to run."""
        ...


SITES: Mapping[Fabric, type[BoundGemmReduceScatter]] = MappingProxyType(
    {Fabric.SHM: ShmGemmReduceScatter, Fabric.PEER: PeerGemmReduceScatter}
)
"""Implementation of a call by fabric; the library's is not bound to an arena."""


_agreed: set[str] = set()
"""Calls whose replicated values were compared, in a call whose values prove something of later ones."""


def _bind(call: GemmReduceScatterCall, text: str, forget: Callable[[], None]) -> BoundGemmReduceScatter | None:
    def forget_all() -> None:
        compare_again(text)
        forget()

    kind = SITES.get(call.fabric)
    return None if kind is None else kind.bind(call, text, NAME, forget_all)


def compare(
    op: str, call: GemmReduceScatterCall | GemmReduceScatterNormCall, text: str, values: Sequence[Tensor]
) -> None:
    """Raises `AgreementError` where a value differs that every rank takes for the others' too.

    Calls are compared until one proves something of later ones.
    """
    if text in _agreed or not values:
        return
    named = list(zip(call.replicated.split(), values, strict=True))
    found = comparing.compare(call.group, f"weave::{op} at site {call.site}", named, call.timeout_s)
    if found.difference is not None:
        raise AgreementError(
            f"{found.difference}; if it is meant to differ, switch the rule of this site off with "
            'options={"disable": [...]} (the report names it)'
        )
    if found.proven:
        _agreed.add(text)


def compare_again(text: str) -> None:
    """In the next call: the arena goes."""
    _agreed.discard(text)


_bound: BoundCalls[GemmReduceScatterCall, BoundGemmReduceScatter] = BoundCalls(GemmReduceScatterCall, _bind)


def _run(
    device: str,
    a: list[Tensor],
    b: list[Tensor],
    addends: list[Tensor],
    outer: int,
    call: str,
    replicated: list[Tensor] | None = None,
) -> Tensor:
    # Below autograd: the GEMM goes into an `out=`, which autograd refuses for inputs that require gradients.
    with torch._C._AutoDispatchBelowAutograd():
        products, site = Products(a, b, addends), _bound.of(device, call)
        compare(NAME, decode(GemmReduceScatterCall, call), call, replicated or ())
        result = None if site is None else site.run(products, outer)
        return through_library(products, outer, decode(GemmReduceScatterCall, call)) if result is None else result


_library = torch.library.Library("weave", "FRAGMENT")
# Any strides are taken, so Inductor need not copy inputs into the ones that were traced.
_library.define(
    f"{NAME}(Tensor[] a, Tensor[] b, Tensor[] addends, SymInt outer, str call, Tensor[]? replicated=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
for _device in ("cpu", "cuda"):
    _library.impl(NAME, functools.partial(_run, _device), _device.upper())
torch.library.register_fake(f"weave::{NAME}", fake.gemm_reduce_scatter, lib=_library)
