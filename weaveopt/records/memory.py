"""Symmetric memory that a graph needs, known before any of it is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from weaveopt.records.candidate import Fabric


class Lifetime(StrEnum):
    """Lifetime of a buffer's bytes."""

    CALL = "call"
    """During the calls of its site: when one ends on a rank, no peer reads or writes that rank's part any more."""
    UNTIL_READ = "until_read"
    """Lifetime from the site's call until its last reader in the graph has run on every rank."""
    ARENA = "arena"
    """Lifetime of the arena: one place, shared by all sites and graphs that name the buffer."""


@dataclass(frozen=True)
class Buffer:
    """A named range of symmetric memory that a rewritten site asks for."""

    name: str
    num_bytes: int
    lifetime: Lifetime = Lifetime.CALL
    fill: int | None = None
    """The 32-bit word that every word holds before the first call; only of buffers that live as long as the arena."""
    alignment: int = 256


@dataclass(frozen=True)
class PlacedBuffer:
    """A buffer and its place in an arena: it starts at `offset`, counted from the end of the arena's header."""

    name: str
    offset: int
    num_bytes: int
    lifetime: Lifetime
    owners: tuple[str, ...]
    """Ids of the sites that use it, in the order of the graph."""
    first: int = 0
    last: int = 0
    """Positions, among the rewritten sites of the group, between which it is in use."""
    fill: int | None = None
    alignment: int = 256
    zone_begin: int = 0
    """Offset of its zone: 0 for buffers that live as long as the arena; all others are in the zone after those."""

    @property
    def offset_in_zone(self) -> int:
        """Offset from the start of its zone, stored by ops: it holds in arenas with more or larger ARENA buffers
        too."""
        return self.offset - self.zone_begin


@dataclass(frozen=True)
class Channel:
    """Signal words and a call counter of one stream of calls in one group."""

    name: str
    index: int


@dataclass(frozen=True)
class MemoryPlan:
    """All symmetric memory that one graph needs in one process group, known before any is allocated."""

    group: str
    fabric: Fabric
    num_bytes: int
    """Size of a rank's arena, header included."""
    buffers: tuple[PlacedBuffer, ...] = ()
    channels: tuple[Channel, ...] = ()
    wiring: tuple[str, ...] = ()
    """Exchanges between hosts, by name: they say which ranks need a connection."""

    def of_site(self, site: str) -> dict[str, PlacedBuffer]:
        """The buffers of one site by name."""
        return {buffer.name: buffer for buffer in self.buffers if site in buffer.owners}
