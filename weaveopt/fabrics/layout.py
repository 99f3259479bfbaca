"""Memory layout of an arena: named persistent buffers, followed by one zone for all transient ones.

Offsets count from the end of the arena's header. They are a function of the plans for which the arena was made, in
their order, so they are the same on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from weaveopt.errors import ArenaError
from weaveopt.fabrics.topology import Group, Payload
from weaveopt.records.memory import Lifetime, MemoryPlan, PlacedBuffer
from weaveopt.solver.placement import aligned, arena_bytes, place_kept, transient_begin, unite

GROWTH = 2
_GRAIN_BYTES = 8192
"""Alignment of sizes that a floor enlarges: halves of them still start at page boundaries."""


@dataclass(frozen=True)
class Layout:
    """The buffers of an arena. Equal layouts have equal offsets."""

    buffers: tuple[PlacedBuffer, ...] = ()
    """Buffers that live as long as the arena, in the order of their names."""
    transient_bytes: int = 0
    """Transient bytes of the largest plan."""
    floor_bytes: int = 0
    """The arena is no smaller than this, header excluded; the transient zone has what is left."""

    @staticmethod
    def of(plan: MemoryPlan, floor_bytes: int = 0) -> Layout:
        kept = [b for b in plan.buffers if b.lifetime is Lifetime.ARENA]
        # Owners and intervals are a graph's; the arena outlives it.
        nameless = (replace(buffer, owners=(), first=0, last=0) for buffer in kept)
        ends = (
            aligned(buffer.offset_in_zone + buffer.num_bytes, buffer.alignment)
            for buffer in plan.buffers
            if buffer.lifetime is not Lifetime.ARENA
        )
        return Layout(place_kept(unite(nameless, ())), max(ends, default=0), max(floor_bytes, 0))

    def union(self, other: Layout) -> Layout:
        """Room for either: buffer by buffer the larger one."""
        return Layout(
            place_kept(unite(self.buffers, other.buffers)),
            max(self.transient_bytes, other.transient_bytes),
            max(self.floor_bytes, other.floor_bytes),
        )

    def grown(self, asked: Layout) -> Layout:
        """Room for either, in an arena that takes the place of this one.

        A buffer that was outgrown gets at least twice its bytes, so that an arena is replaced once for each doubling
        and not for every graph that is a little larger.
        """
        exact, own = self.union(asked), {buffer.name: buffer.num_bytes for buffer in self.buffers}
        buffers = (
            replace(each, num_bytes=max(each.num_bytes, GROWTH * own[each.name]))
            if own.get(each.name, each.num_bytes) < each.num_bytes
            else each
            for each in exact.buffers
        )
        transient_bytes = exact.transient_bytes
        if transient_bytes > self.num_bytes - self.transient_begin:
            transient_bytes = max(transient_bytes, GROWTH * self.transient_bytes)
        return Layout(place_kept(buffers), transient_bytes, exact.floor_bytes).filled()

    def filled(self) -> Layout:
        """Enlarge all buffers by the same factor, as far as the floor has room for them.

        Free bytes after the last buffer would be of use to no later graph: larger graphs ask for larger buffers.
        """
        if not 0 < self.num_bytes_asked < self.floor_bytes:
            return self

        def larger(num_bytes: int) -> int:
            scaled = num_bytes * self.floor_bytes // self.num_bytes_asked
            return max(num_bytes, scaled // _GRAIN_BYTES * _GRAIN_BYTES)

        buffers = (replace(each, num_bytes=larger(each.num_bytes)) for each in self.buffers)
        transient_bytes = larger(self.transient_bytes) if self.transient_bytes else 0
        return Layout(place_kept(buffers), transient_bytes, self.floor_bytes)

    def holds(self, other: Layout) -> bool:
        """True if an arena with this layout has room for the buffers of `other`."""
        own = {buffer.name: buffer for buffer in self.buffers}
        return (
            all(b.name in own and own[b.name].num_bytes >= b.num_bytes for b in other.buffers)
            and all(own[b.name].fill == b.fill and own[b.name].alignment >= b.alignment for b in other.buffers)
            and (not other.transient_bytes or self.num_bytes - self.transient_begin >= other.transient_bytes)
            and self.num_bytes >= other.floor_bytes
        )

    @property
    def transient_begin(self) -> int:
        return transient_begin(self.buffers)

    @property
    def num_bytes(self) -> int:
        """Size of a rank's arena without its header."""
        return max(self.num_bytes_asked, self.floor_bytes)

    @property
    def num_bytes_asked(self) -> int:
        """Whatever the floor is."""
        return self.transient_begin + self.transient_bytes if self.transient_bytes else arena_bytes(self.buffers)

    def buffer(self, name: str) -> PlacedBuffer:
        """Return the placement of the named buffer. Raises `ArenaError` if there is none."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        known = ", ".join(f"{buffer.name} ({buffer.num_bytes} bytes)" for buffer in self.buffers)
        raise ArenaError(f"the arena has no buffer {name!r}; it was reserved with {known or 'none'}")

    def fills(self) -> tuple[tuple[int, int, int], ...]:
        """Offset, bytes and word of every buffer that has to be filled before the first call."""
        return tuple((b.offset, b.num_bytes, b.fill) for b in self.buffers if b.fill is not None and b.num_bytes)

    def text(self) -> str:
        """Text for comparing layouts between ranks, and for messages: equal texts are equal layouts."""
        buffers = {b.name: [b.num_bytes, b.alignment, b.fill] for b in self.buffers}
        return json.dumps({"buffers": buffers, "transient": self.transient_bytes, "floor": self.floor_bytes})


class LaidOut(Protocol):
    """An arena."""

    @property
    def layout(self) -> Layout: ...


L = TypeVar("L", bound=LaidOut)


def with_room(current: L | None, asked: Layout, make: Callable[[Layout], L]) -> L:
    """`current` where it has room for what is asked for, else what `make` makes in its place, which has it too.

    Where memory is short, that is just large enough: `make` raises `ArenaError` on all ranks or on none, so all come to
    the same.
    """
    exact = layout = asked.filled()
    if current is not None:
        if current.layout.holds(asked):
            return current
        exact, layout = current.layout.union(asked), current.layout.grown(asked)
    if layout != exact:
        with suppress(ArenaError):
            return make(layout)
    return make(exact)


def expect_equal_layouts(group: Group, answers: Sequence[Payload]) -> None:
    """Check that all ranks announced equal layouts. Raises `ArenaError` if the `layout` texts differ."""
    if len({str(record["layout"]) for record in answers}) > 1:
        asked = "; ".join(f"rank {rank}: {r['layout']}" for rank, r in zip(group.ranks, answers, strict=True))
        raise ArenaError(f"group {group.name!r}: ranks ask for arenas of different buffers: {asked}")
