"""Largest token count of any rank, which GPU ranks with batches of their own need before a call.

How many a rank has is known on its host, before its device comes to the call, and GPUs that reach each other's memory
are of one host. So the hosts exchange counts in memory that their processes share: a call waits for the slowest host,
and for no device. All ranks learn the same number, which says how much room each source gets in the call, that no rank
has anything to send, or that there is more than was planned for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import shm
from weaveopt.fabrics.rows_call import memory_plan
from weaveopt.fabrics.shm_calls import Caller, failure, tag_of
from weaveopt.fabrics.topology import Topology
from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: buffer() says so
    _native = None  # type: ignore[assignment]


def buffer() -> Buffer:
    """Buffer of a call in the memory of every rank's host. Raises `WeaveError` without the native module."""
    if _native is None:
        raise WeaveError("weaveopt was installed without its native part, which knows what its kernels need: build it")
    need = _native.token_counts_need()
    return Buffer(need.name, need.num_bytes, Lifetime.ARENA, need.fill, TRAITS[Fabric.SHM].buffer_alignment)


def reserve(known: Topology, call: ExpertExchangeCall) -> None:
    """Memory that the hosts of the group's ranks share; all ranks together. Raises as `shm.reserve` does."""
    plan = memory_plan(call.group, [(replace(call, fabric=Fabric.SHM), (buffer(),))])
    shm.reserve(known, plan, 0, call.timeout_s)


class ExchangedCounts:
    """The counts of one call's site, in the memory that `reserve` made."""

    __slots__ = ("_caller", "_native")

    def __init__(self, call: ExpertExchangeCall, text: str, op: str, forget: Callable[[], None]) -> None:
        """`call`, encoded as `text`, of the operator `op`; `forget` runs when the memory goes.

        Raises `ArenaError` if none was reserved.
        """
        arena = shm.of(call.group)
        group = arena.group
        if len(group.ranks) != call.world:
            raise ArenaError(
                f"site {call.site}: planned for {counted(call.world, 'rank')}, group has {len(group.ranks)}"
            )
        offset = arena.buffer(buffer().name).offset
        self._caller = Caller(op, call.site, group, call.timeout_s)
        self._native = _native.TokenCounts(arena.native, offset, tag_of(call.site, text), call.timeout_s)
        arena.at_close(forget)

    def largest(self, tokens: int) -> int:
        """The largest number of tokens of any rank, of which this one has `tokens`: the same on all ranks.

        Every rank asks once a call. Raises `PeerTimeoutError` where one does not come within the call's timeout, and
        `AgreementError` where one asks for another site.
        """
        code, most = self._native.largest(tokens)
        if code:
            raise failure(self._caller, code, self._native.status)
        return most
