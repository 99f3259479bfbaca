"""Agreement and reservation in the first call of a kind, among ranks that hold batches of their own.

Such ranks compile graphs of other sizes, at other times, so nothing can be compared or reserved while they compile.
But they make the same calls in the same order, and every rank comes to its first one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from weaveopt.errors import AgreementError, ArenaError
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.fabrics.rows_call import memory_plan
from weaveopt.ops.moe_sharded import counts
from weaveopt.ops.moe_sharded.call import ExpertExchangeCall
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer


def reserve(call: ExpertExchangeCall, text: str, buffers: Sequence[Buffer]) -> bool:
    """Reserves an arena for `call` and returns true on all ranks, or warns of the reason and returns false: the library
    runs then.

    `text` is the encoded call. Raises `AgreementError` where a rank calls something else, or does not come within the
    call's timeout.
    """
    group, timeout_s = call.group, call.timeout_s
    known = topology.discover(group, timeout_s)
    channel = topology.exchange(group, timeout_s)
    told = channel.gather({"call": text}, "an exchange of experts", timeout_s)
    calls, ranks = [str(record["call"]) for record in told], known.group.ranks
    for rank, other in zip(ranks, calls, strict=True):
        if other != calls[0]:
            channel.settle()
            raise AgreementError(
                f"group {group!r}: rank {ranks[0]} exchanges experts by {calls[0]}, rank {rank} by {other}. Start all "
                "ranks with the same options, versions and model."
            )
    plan = memory_plan(group, [(call, buffers)])
    try:
        transport(call.fabric).reserve(known, plan, call.arena_bytes, timeout_s)
        if call.fabric is Fabric.PEER:
            counts.reserve(known, call)
    except ArenaError as error:
        warnings.warn(f"weaveopt: experts are exchanged through the library: {error}", stacklevel=2)
        return False
    return True
