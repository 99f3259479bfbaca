"""`all_reduce_norm` on the fabric `tcp`: CPU ranks of several hosts. What a call does on its host is that of `shm`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weaveopt.errors import ArenaError
from weaveopt.fabrics import tcp as arena
from weaveopt.ops.reduction.buffers import PARTIAL, expect_world, locate
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.shm import ShmSite, native_site
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: arena.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]


class TcpSite(ShmSite):
    """One site, ready to run."""

    __slots__ = ()

    @staticmethod
    def bind(call: ReductionCall, text: str, op: str, forget: Callable[[], None]) -> TcpSite:
        """`call`, encoded as `text`, in the arena and over the connections that its group has now.

        Raises `ArenaError` if no arena was reserved, the call does not fit it, or the ranks are spread otherwise.
        """
        memory = arena.of(call.group)
        expect_world(call, memory.group)
        hosts = memory.hosts
        if len(hosts.ranks) != call.hosts:
            raise ArenaError(
                f"site {call.site}: planned for {counted(call.hosts, 'host')}, group has {len(hosts.ranks)}"
            )
        buffers = locate(call, memory.layout)
        site = native_site(call, text, buffers)
        ranks = [list(each) for each in hosts.ranks]
        table = [(row.max_tokens, getattr(_native.HostExchange, row.algorithm.value)) for row in call.table]
        memory.expect_wiring(call.site, [row.algorithm.value for row in call.table])
        try:
            native = _native.AllReduceNormOfHosts(
                memory.local.native, memory.wire, hosts.own, ranks, table, site,
                torch.get_num_threads(),
            )  # fmt: skip
        except ValueError as error:
            raise ArenaError(f"site {call.site}: {error}") from None
        memory.at_close(forget)
        return TcpSite(call, op, native, memory, buffers[PARTIAL])
