"""`all_reduce_norm` on the fabric `nvshmem`: GPUs of several hosts. A call is one kernel, as on `peer`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weaveopt.errors import ArenaError
from weaveopt.fabrics import nvshmem as arena
from weaveopt.fabrics import watchdog
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.peer import PeerArena
from weaveopt.fabrics.traits import header_bytes
from weaveopt.ops.reduction.buffers import HOST_BUFFERS, ByteRange, expect_world, locate
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.launches import ReductionLaunch
from weaveopt.ops.reduction.native import host_transfer, native_norm, out_kind
from weaveopt.ops.reduction.peer import PeerReduction
from weaveopt.ops.reduction.variant import KernelRow
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: arena.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from weaveopt import _nvshmem


class NvshmemSite(PeerReduction):
    """One site, ready to run."""

    __slots__ = ()

    @staticmethod
    def bind(call: ReductionCall, text: str, op: str, forget: Callable[[], None]) -> NvshmemSite:
        """`call`, encoded as `text`, in the arena that its group has now; `forget` runs when that one goes.

        Raises `ArenaError` if none was reserved or the call does not fit it.
        """
        memory = arena.of(call.group)
        expect_world(call, memory.group)
        if call.hosts != len(memory.hosts.ranks):
            raise ArenaError(
                f"site {call.site}: planned for {counted(call.hosts, 'host')}, group has {len(memory.hosts.ranks)}"
            )
        if call.max_tokens > watchdog.MAX_TOKENS:
            raise ArenaError(
                f"site {call.site}: {counted(call.max_tokens, 'token')}, the kernels count to {watchdog.MAX_TOKENS}"
            )
        tag = watchdog.tag_of(zlib.crc32(text.encode()))
        site = native_site(call, tag, memory.layout, memory.hosts.ranks)
        try:
            native = arena.module().HostsAllReduceNorm(memory.native, site)
        except ValueError as error:
            raise ArenaError(f"site {call.site}: {error}") from None
        watchdog.name_site(site.tag, watchdog.NamedSite(op, call.site, call.timeout_s))
        memory.at_close(forget)
        rank = memory.group.ranks[memory.group.rank]
        return NvshmemSite(call, native, memory, f"weave::{op} at site {call.site}, group {call.group!r}, rank {rank}")

    @staticmethod
    def launch_of(call: ReductionCall, row: KernelRow, memory: PeerArena) -> ReductionLaunch:
        """How calls of up to as many tokens as `row` says run. Raises `WeaveError` for another kernel."""
        transfer = host_transfer(row)
        why = arena.module().doubling_unsupported(getattr(_native.DType, call.dtype), call.hidden, memory.device)
        return ReductionLaunch(
            row.max_tokens, int(transfer), row.num_ctas, in_place=False, aliases_arena=False, unsupported=why
        )


def native_site(call: ReductionCall, tag: int, layout: Layout, hosts: Sequence[Sequence[int]]) -> _nvshmem.HostsSite:
    """The call for the kernels of a rank whose arena has `layout`; `hosts`: the ranks of the group on each host."""
    site: _nvshmem.HostsSite = arena.module().HostsSite()
    site.tag = tag
    site.hosts = hosts
    site.channel = call.channel
    site.hidden = call.hidden
    site.dtype = getattr(_native.DType, call.dtype)
    site.out_kind = out_kind(call.dtype, call.out_dtype)
    site.quant = getattr(_native.QuantKind, call.quant.value)
    site.post = native_norm(call.post)
    site.norm = native_norm(call.norm)
    site.scale = call.scale
    site.timeout_s = call.timeout_s
    header, found = header_bytes(call.fabric), locate(call, layout)
    for name in HOST_BUFFERS:
        at = found.get(name, ByteRange(0, 0))
        setattr(site.places, name.removeprefix("host_"), arena.module().HostsPlace(header + at.offset, at.num_bytes))
    return site
