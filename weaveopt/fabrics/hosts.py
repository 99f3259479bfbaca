"""The hosts of a group, and its ranks on each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weaveopt.errors import ArenaError
from weaveopt.fabrics.topology import Topology

try:
    from weaveopt import _native
except ImportError:  # built without it: the library path still works
    _native = None  # type: ignore[assignment]


def ranks_by_host(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Group ranks by host, in the order of the hosts' first ranks."""
    names = dict.fromkeys(topology.hosts)
    return tuple(tuple(rank for rank, host in enumerate(topology.hosts) if host == name) for name in names)


@dataclass(frozen=True)
class Hosts:
    """Ranks of a group by host, in group order; equal on all ranks except for `own`."""

    own: int
    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each host; hosts are ordered by their first ranks."""

    @staticmethod
    def of(topology: Topology) -> Hosts:
        """Build the hosts of a topology. Raises `ArenaError` if hosts have different numbers of ranks."""
        ranks = ranks_by_host(topology)
        if len({len(each) for each in ranks}) > 1:
            raise ArenaError(f"hosts have {[len(each) for each in ranks]} ranks of group {topology.group.name!r}")
        return Hosts(next(at for at, each in enumerate(ranks) if topology.group.rank in each), ranks)

    def local_rank(self, rank: int) -> int:
        return self.ranks[self.own].index(rank)

    def peers(self, exchanges: Iterable[str]) -> frozenset[int]:
        """The hosts that this one exchanges messages with."""
        found: set[int] = set()
        for name in exchanges:
            found.update(_native.host_peers(getattr(_native.HostExchange, name), self.own, len(self.ranks)))
        return frozenset(found)
