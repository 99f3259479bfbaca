"""`all_reduce_norm` on GPUs that share memory of their host: the kernels of `peer` in another arena."""

from __future__ import annotations

from collections.abc import Callable

from weaveopt.fabrics import host
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.peer import PeerReduction


class HostReduction(PeerReduction):
    """One site, bound to the arena of its group in memory of the host."""

    __slots__ = ()

    @staticmethod
    def bind(call: ReductionCall, text: str, op: str, forget: Callable[[], None]) -> PeerReduction:
        """As `PeerReduction.bind`. Raises `ArenaError` if no such arena was reserved or the call does not fit it."""
        return PeerReduction.bound_to(host.of(call.group), call, text, op, forget)
