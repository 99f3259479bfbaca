"""The transport of fabric `tcp`: CPU ranks of several hosts, shared memory within each, one connection a pair between.

Rank l of a host is connected to rank l of those hosts that a plan's exchanges send to: all of them, or as many as have
a number that differs in one bit. Within a host ranks share segments as on fabric `shm`. All hosts have equally many
ranks of the group. See `weaveopt.fabrics.connections` for how connections are made.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable

import torch

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import connections, shm
from weaveopt.fabrics import topology as topologies
from weaveopt.fabrics.arenas import Arenas
from weaveopt.fabrics.call_queue import CallQueue
from weaveopt.fabrics.hosts import Hosts
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.shm import ShmArena
from weaveopt.fabrics.topology import Group, RecordExchange, Topology
from weaveopt.records.memory import MemoryPlan, PlacedBuffer

try:
    from weaveopt import _native
except ImportError:  # built without it: the library path still works
    _native = None  # type: ignore[assignment]

FIRST_EPOCH = 0


class TcpArena:
    """This rank's segment, shared on its host, and its connections to the other hosts."""

    def __init__(
        self,
        group: Group,
        hosts: Hosts,
        local: ShmArena,
        channel: RecordExchange,
        wire: _native.Connections,
        wiring: frozenset[str],
    ) -> None:
        self.group = group
        self.hosts = hosts
        self.local = local
        self.channel = channel
        """Exchange among the ranks of this host."""
        self.begun = CallQueue(group.name)
        """Calls that were begun; one in line comes after them."""
        self.error: WeaveError | None = None
        """The first failure of a call; every later one raises it."""
        self._wire: _native.Connections | None = wire
        self.wiring = wiring
        """Exchanges whose hosts are connected; the same on all ranks."""

    @property
    def wire(self) -> _native.Connections:
        """Connections to the other hosts. Raises `ArenaError` once closed."""
        if self._wire is None:
            raise ArenaError(f"the arena of group {self.group.name!r} was released")
        return self._wire

    @property
    def closed(self) -> bool:
        return self.local.closed

    @property
    def layout(self) -> Layout:
        return self.local.layout

    @property
    def num_bytes(self) -> int:
        return self.local.num_bytes

    @property
    def transient_begin(self) -> int:
        return self.local.transient_begin

    def expect_wiring(self, site: str, exchanges: Iterable[str]) -> None:
        """Check that connections exist. Raises `ArenaError` if `exchanges` send to hosts that no plan asked a
        connection to."""
        missing = self.hosts.peers(exchanges) - self.hosts.peers(self.wiring)
        if missing:
            raise ArenaError(f"site {site}: group {self.group.name!r} has no connection to hosts {sorted(missing)}")

    def buffer(self, name: str) -> PlacedBuffer:
        return self.local.buffer(name)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.local.tensor(offset, shape, dtype)

    def at_close(self, callback: Callable[[], None]) -> None:
        self.local.at_close(callback)

    def close(self) -> None:
        """Gives the memory back, once no call is in flight. Connections end with the last arena and call that use
        them."""
        self.begun.close()
        self.local.close()
        self._wire = None


_arenas = Arenas[TcpArena]("arena")
of, release = _arenas.of, _arenas.release
release_all = atexit.register(_arenas.release_all)


def reserve(topology: Topology, plan: MemoryPlan, floor_bytes: int, timeout_s: float) -> TcpArena:
    """Reserve an arena on each host, as `weaveopt.fabrics.shm.reserve` does; before that ranks connect to the hosts
    that `plan` sends to."""
    name, group = topology.group.name, topology.group
    if topology.fake:
        raise ArenaError(f"group {name!r}: no connections without peers")
    channel = topologies.exchange(name, timeout_s)
    known = _arenas.current(name)
    hosts = Hosts.of(topology) if known is None else known.hosts
    wiring = frozenset(plan.wiring) | (frozenset() if known is None else known.wiring)
    holds = known is not None and known.layout.holds(Layout.of(plan, floor_bytes))
    if known is not None and holds and wiring == known.wiring:
        return known
    locals_ = hosts.ranks[hosts.own]
    own = Group(f"{name}/host{hosts.own}", tuple(group.ranks[r] for r in locals_), hosts.local_rank(group.rank))
    local_channel = known.channel if known is not None else RecordExchange(own)
    error, local = "", None
    current = known.local if known is not None else None
    try:
        local = current if holds else shm.grown(current, own, plan, floor_bytes, local_channel, timeout_s)
    except ArenaError as failure:  # the other hosts must hear of it
        error = str(failure)
    answers = channel.gather({"error": error}, "memory of every host", timeout_s)
    failed = [str(each["error"]) for each in answers if each["error"]]
    try:
        if failed or local is None:
            raise ArenaError(failed[0])
        wire = _connected(hosts, channel, wiring, known, timeout_s)
    except BaseException:
        # The previous arena stays, on all hosts.
        if local is not None and local is not current:
            local.close()
        raise
    if known is not None and holds:
        known.wiring = wiring
        return known
    arena = TcpArena(group, hosts, local, local_channel, wire, wiring)
    # Its connections and its channel go on in the larger one.
    _arenas.put(name, arena, TcpArena.close)
    return arena


def _connected(
    hosts: Hosts, channel: RecordExchange, wiring: frozenset[str], known: TcpArena | None, timeout_s: float
) -> _native.Connections:
    """Connect to the hosts that exchanges of `wiring` send to; connections of `known` are reused."""
    own = hosts.local_rank(channel.group.rank)
    alike = [ranks[own] for ranks in hosts.ranks]
    before = frozenset() if known is None else known.wiring
    new = sorted(hosts.peers(wiring) - hosts.peers(before))
    # All ranks connect or none does: some ranks may have all that they need already.
    found = connections.connect(channel, [alike[host] for host in new], timeout_s) if wiring != before else {}
    if known is not None:
        for host in new:
            known.wire.add(host, found[alike[host]].detach())
        return known.wire
    sockets = [found[rank].detach() if rank in found else -1 for rank in alike]
    return _native.Connections(sockets, hosts.own, shm.num_local_processes(), FIRST_EPOCH)
