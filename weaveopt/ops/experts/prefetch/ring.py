"""Order of a group's experts as one rank has them: its own, then those that it lacks, from the next rank on.

A rank of `world` lacks `world - 1` times as many experts as it has. They have positions: 0 is the next rank's first
one, and after the last rank's come those of rank 0. The first `cached` of them, which follow the own ones, are kept for
good in every layer; the others are fetched. Ranks thus begin to pull at different peers (DWDP, section 4.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, zip_longest

SLICE_BYTES = 8 << 20
"""Least size of a slice, where several peers are pulled from in turns."""
ALIGNMENT = 256
"""Alignment in bytes of slices, and of weights in a slot."""
Copy = tuple[int, int, int]
"""Target address, source address, bytes."""


class ExpertSource(Enum):
    """Memory that experts are in, on this rank."""

    OWN = "own"
    CACHED = "cached"
    FETCHED = "fetched"


@dataclass(frozen=True)
class ExpertRange:
    """Consecutive experts, by id, in one memory."""

    source: ExpertSource
    first: int
    """Position of the first one in that memory."""
    count: int


@dataclass(frozen=True)
class Ring:
    """Experts of `world` ranks of `experts` each, as `rank` sees them."""

    world: int
    rank: int
    experts: int
    cached: int = 0

    @property
    def missing(self) -> int:
        """Experts that this rank lacks."""
        return (self.world - 1) * self.experts

    @property
    def fetched(self) -> int:
        return self.missing - self.cached

    def ranges(self) -> tuple[ExpertRange, ...]:
        """All experts in the order of their ids, in at most four ranges."""
        above = (self.world - 1 - self.rank) * self.experts
        own = ExpertRange(ExpertSource.OWN, 0, self.experts)
        return tuple(each for each in (*self._split(above, self.missing), own, *self._split(0, above)) if each.count)

    def _split(self, first: int, end: int) -> Iterator[ExpertRange]:
        middle = min(max(self.cached, first), end)
        yield ExpertRange(ExpertSource.CACHED, first, middle - first)
        yield ExpertRange(ExpertSource.FETCHED, middle - self.cached, end - middle)

    def sources(self, first: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(rank, its first expert, count, position) of what stands at positions `first` to `end`, in ring order."""
        for step in range(self.world - 1):
            begin, stop = max(first, step * self.experts), min(end, (step + 1) * self.experts)
            if begin < stop:
                yield (self.rank + 1 + step) % self.world, begin - step * self.experts, stop - begin, begin


def pulled(ring: Ring, first: int, end: int, places: Sequence[int], expert_bytes: int, to: int) -> list[Copy]:
    """Copies of one weight of the experts at positions `first` to `end` into `to`, in the order of their positions.

    `places`: addresses of all ranks' parts. One source: one copy. Several: slices of `SLICE_BYTES` and more, in turns.
    """
    parts = [
        [(to + (at - first) * expert_bytes, places[rank] + expert * expert_bytes, count * expert_bytes)]
        for rank, expert, count, at in ring.sources(first, end)
    ]
    if ring.world > 2:
        parts = [list(slices(*copy)) for [copy] in parts]
    return [copy for turn in zip_longest(*parts) for copy in turn if copy is not None]


def slices(to: int, source: int, num_bytes: int) -> Iterator[Copy]:
    """A copy in as many parts as have `SLICE_BYTES` each."""
    count = max(num_bytes // SLICE_BYTES, 1)
    ends = [num_bytes * each // count // ALIGNMENT * ALIGNMENT for each in range(count)] + [num_bytes]
    for begin, end in pairwise(ends):
        yield to + begin, source + begin, end - begin
