"""Place named buffers with lifetimes in an arena.

The arena has two zones. Buffers that live as long as the arena come first, by name, one after the other: one place for
all sites that name them. After them, in the transient zone, buffers whose intervals do not intersect share their bytes:
the largest is placed first, each in the smallest gap that holds it (best fit, as in Pisarchyk and Lee, "Efficient
Memory Management for Deep Neural Net Inference", 2020, by decreasing size).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from weaveopt.errors import WeaveError
from weaveopt.records.memory import Buffer, Lifetime, PlacedBuffer

ZONE_ALIGNMENT = 4096
"""The transient zone begins on a page: what is aligned within it is aligned in the arena. No buffer asks for more."""


class PlacementRequest(NamedTuple):
    """A buffer that a site asks for, in use from one position among the group's rewritten sites to another."""

    owner: str
    buffer: Buffer
    first: int
    last: int


def place(requests: Sequence[PlacementRequest], zone_start: int = 0) -> tuple[PlacedBuffer, ...]:
    """Return the offsets of all buffers, from `zone_start` on: ARENA ones in the order of their names, then the
    transient ones.

    ARENA buffers of one name are one buffer, as large as the largest, with all their owners. Of the others, two whose
    intervals intersect never overlap. A function of the requests alone, so equal on all ranks. Raises `WeaveError` if
    two buffers of one name contradict each other or a buffer cannot be placed.
    """
    for owner, buffer, first, last in requests:
        if buffer.num_bytes < 0 or buffer.alignment < 1 or ZONE_ALIGNMENT % buffer.alignment or first > last:
            raise WeaveError(
                f"buffer {buffer.name!r} of {owner}: {buffer.num_bytes} bytes aligned to {buffer.alignment}, from "
                f"{first} to {last}; expected 0 or more, a divisor of {ZONE_ALIGNMENT}, and first <= last"
            )
        if buffer.fill is not None and buffer.lifetime is not Lifetime.ARENA:
            raise WeaveError(f"buffer {buffer.name!r} of {owner}: only what lives as long as the arena is filled")
    kept = place_kept(united(request for request in requests if request.buffer.lifetime is Lifetime.ARENA), zone_start)
    zone_begin = transient_begin(kept, zone_start)
    return (*kept, *_transient([r for r in requests if r.buffer.lifetime is not Lifetime.ARENA], zone_begin))


def united(requests: Iterable[PlacementRequest]) -> tuple[PlacedBuffer, ...]:
    """ARENA buffers, one for each name, not placed yet."""
    found: dict[str, PlacedBuffer] = {}
    for owner, buffer, first, last in requests:
        new = PlacedBuffer(
            buffer.name, 0, buffer.num_bytes, buffer.lifetime, (owner,), first, last, buffer.fill, buffer.alignment
        )
        found[buffer.name] = _union(found[buffer.name], new) if buffer.name in found else new
    return tuple(found.values())


def unite(a: Iterable[PlacedBuffer], b: Iterable[PlacedBuffer]) -> tuple[PlacedBuffer, ...]:
    """The ARENA buffers of two plans, one for each name: the larger of both; not placed yet."""
    found: dict[str, PlacedBuffer] = {}
    for buffer in (*a, *b):
        if buffer.lifetime is Lifetime.ARENA:
            found[buffer.name] = _union(found[buffer.name], buffer) if buffer.name in found else buffer
    return tuple(found.values())


def _union(a: PlacedBuffer, b: PlacedBuffer) -> PlacedBuffer:
    if a.fill != b.fill:
        raise WeaveError(
            f"buffer {a.name!r}: {', '.join(a.owners)} wants it filled with {a.fill}, "
            f"{', '.join(b.owners)} with {b.fill}"
        )
    return PlacedBuffer(
        name=a.name,
        offset=0,
        num_bytes=max(a.num_bytes, b.num_bytes),
        lifetime=Lifetime.ARENA,
        owners=tuple(dict.fromkeys((*a.owners, *b.owners))),
        first=min(a.first, b.first),
        last=max(a.last, b.last),
        fill=a.fill,
        alignment=max(a.alignment, b.alignment),
    )


def place_kept(buffers: Iterable[PlacedBuffer], zone_start: int = 0) -> tuple[PlacedBuffer, ...]:
    """Place ARENA buffers of different names one after the other in the order of their names; empty ones take no
    room."""
    placed, offset = [], zone_start
    for buffer in sorted(buffers, key=lambda each: each.name):
        offset = aligned(offset, buffer.alignment)
        placed.append(_at(buffer, offset, 0))
        offset += buffer.num_bytes
    return tuple(placed)


def _at(buffer: PlacedBuffer, offset: int, zone_begin: int) -> PlacedBuffer:
    return replace(buffer, offset=offset, zone_begin=zone_begin)


def transient_begin(buffers: Iterable[PlacedBuffer], zone_start: int = 0) -> int:
    """Offset of the transient zone after these ARENA buffers."""
    ends = (buffer.offset + buffer.num_bytes for buffer in buffers if buffer.lifetime is Lifetime.ARENA)
    return aligned(max(ends, default=zone_start), ZONE_ALIGNMENT)


def arena_bytes(buffers: Iterable[PlacedBuffer], zone_start: int = 0) -> int:
    """Return the end of the last buffer, alignment included: the size of the arena without its header."""
    ends = (aligned(buffer.offset + buffer.num_bytes, buffer.alignment) for buffer in buffers if buffer.num_bytes)
    return max(ends, default=zone_start)


def aligned(offset: int, alignment: int) -> int:
    """The first multiple of `alignment` from `offset` on."""
    return -(-offset // alignment) * alignment


def _transient(requests: Sequence[PlacementRequest], zone_begin: int) -> list[PlacedBuffer]:
    order = sorted(range(len(requests)), key=lambda i: (-requests[i].buffer.num_bytes, requests[i].first, i))
    offsets: dict[int, int] = {}
    for index in order:
        offsets[index] = _lowest_best_fit(requests[index], requests, offsets)
    found = []
    for index, (owner, buffer, first, last) in enumerate(requests):
        unplaced = PlacedBuffer(
            buffer.name, 0, buffer.num_bytes, buffer.lifetime, (owner,), first, last, None, buffer.alignment
        )
        found.append(_at(unplaced, zone_begin + offsets[index], zone_begin))
    return found


def _lowest_best_fit(
    request: PlacementRequest, requests: Sequence[PlacementRequest], offsets: Mapping[int, int]
) -> int:
    """Find the smallest gap between buffers that live at the same time, the lowest of several; else the end of all
    of them."""
    _, buffer, first, last = request
    taken = sorted(
        (offset, offset + other.num_bytes)
        for index, offset in offsets.items()
        for _, other, other_first, other_last in (requests[index],)
        if other_first <= last and first <= other_last and other.num_bytes
    )
    best: tuple[int, int] | None = None  # (bytes of the gap, offset)
    free_from = 0
    for begin, end in taken:
        offset = aligned(free_from, buffer.alignment)
        gap = begin - free_from
        if offset + buffer.num_bytes <= begin and (best is None or gap < best[0]):
            best = (gap, offset)
        free_from = max(free_from, end)
    return aligned(free_from, buffer.alignment) if best is None else best[1]
