"""Symmetric memory that a graph needs, known before any of it is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from weaveopt.records.candidate import Fabric


@dataclass(frozen=True)
class Slot:
    """`bytes` of the arena from `offset` on, owned by the named sites (one after the other)."""

    offset: int
    bytes: int
    owners: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """Where a rewritten site works in the arena of its group; offsets and bytes are 0 where sites share regions."""

    site: str
    partial_offset: int
    """This rank's partial result, read by peers: two buffers of `partial_bytes`, used in turn."""
    partial_bytes: int
    output_offset: int
    """Rows that this rank hands out in a two-shot exchange."""
    max_tokens: int
    """The largest token count that fits; more go through the library at run time."""
    residual_sharded: bool = False
    """The residual that comes in holds only this rank's token rows."""
    sum_sharded: bool = False
    """The sum that goes out holds only this rank's token rows (every reader accepts that)."""
    normed_lands: bool = False
    """The normed rows lie in the arena, where peers write them (every reader is through before the next site)."""


@dataclass(frozen=True)
class RegionNeed:
    """Bytes of the regions of a GPU arena, by use; each a multiple of 256. See `csrc/fabric/peer.h`."""

    mailbox_bytes: int = 0
    """Of one of the two mailboxes."""
    staging_bytes: int = 0
    output_bytes: int = 0
    partial_bytes: int = 0
    """Where the product writes for loads that reduce in place."""

    def union(self, other: RegionNeed) -> RegionNeed:
        """Room for either."""
        return RegionNeed(*(max(a, b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class BufferPlan:
    """All symmetric memory that one graph needs in one process group, known before any is allocated."""

    group: str
    bytes: int
    slots: tuple[Slot, ...] = ()
    """On GPUs the regions, in the order of `csrc/fabric/peer.h`: mailboxes, staging, output, partial."""
    placements: tuple[Placement, ...] = ()
    fabric: Fabric = Fabric.SHM
    regions: RegionNeed | None = None
    """On GPUs: all sites of the group share them, and the runtime places them."""
