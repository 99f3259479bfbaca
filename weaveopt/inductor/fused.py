"""Inductor's scheduler: loop nests over the same elements that share memory become one kernel.

A nest joins a kernel that writes what it reads (the value then stays in registers) or that reads the same (it is read
once), unless something between the two needs the one and is needed by the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from weaveopt.inductor.loops import LoweredStep

# Inductor's own limits (torch 2.13).
_MAX_STEPS = 64
_MIN_SHARED_BYTES = 10
_NUM_NEIGHBOURS = 4
"""Readers of a value that are tried as partners, latest first."""


@dataclass
class LoopKernel:
    """Steps that run as one kernel; a library call is a kernel by itself."""

    steps: list[int]
    elements: int
    reduced: int
    call: bool
    rows: tuple[int, ...]
    """Sizes of the outer loops that all steps have; none where the elements are tiled anew."""
    parents: set[int] = field(default_factory=set)
    """Steps that make what it reads."""


def fuse(steps: Sequence[LoweredStep], device: str) -> list[LoopKernel]:
    """Kernels in the order of their last steps."""
    # Code for CPUs keeps the loops as they were lowered; Triton tiles the elements anew.
    keeps_loops = device == "cpu"
    kernels: list[LoopKernel] = []
    kernel_of: list[LoopKernel] = []
    writers: dict[int, list[int]] = {}
    readers: dict[tuple[int, object], list[int]] = {}
    for index, step in enumerate(steps):
        parents = {writer for value, _ in step.reads for writer in writers.get(value, ())}
        rows = step.rows if keeps_loops else ()
        mine = LoopKernel([index], step.elements, step.reduced, step.call, rows, parents)
        kernel_of.append(mine)
        kernels.append(mine)
        if not (step.call or step.scattered):
            for partner in _partners(step, steps, kernel_of, writers, readers):
                if partner is not mine and _fits(partner, mine) and not _apart(mine, partner, kernel_of):
                    mine = _joined(partner, mine, kernel_of)
        for place in step.reads:
            readers.setdefault(place, []).append(index)
        for value in step.writes:
            writers.setdefault(value, []).append(index)
    alive = {id(kernel): kernel for kernel in kernel_of}
    return sorted(alive.values(), key=lambda kernel: max(kernel.steps))


def _partners(
    step: LoweredStep,
    steps: Sequence[LoweredStep],
    kernel_of: Sequence[LoopKernel],
    writers: Mapping[int, Sequence[int]],
    readers: Mapping[tuple[int, object], Sequence[int]],
) -> list[LoopKernel]:
    """Kernels that share memory with a step, those that share most first."""
    shared: dict[int, int] = {}
    for place, size in step.reads.items():
        parts = writers.get(place[0], ())
        # A reader of what several steps write (a concatenation) needs them all first.
        for other in parts if len(parts) == 1 else ():
            # Only a value that is read as it was written needs not to be written first.
            if not (steps[other].call or steps[other].scattered) and size >= steps[other].written_bytes:
                shared[other] = shared.get(other, 0) + 2 * size
        for other in readers.get(place, ())[-_NUM_NEIGHBOURS:]:
            if not (steps[other].call or steps[other].scattered):
                shared[other] = shared.get(other, 0) + min(size, steps[other].reads[place])
    enough = [other for other, size in shared.items() if size >= _MIN_SHARED_BYTES]
    return [kernel_of[other] for other in sorted(enough, key=lambda other: -shared[other])]


def _fits(first: LoopKernel, last: LoopKernel) -> bool:
    """True if two loop nests run over the same elements, or share the outer loops.

    The latter are a reduction with producers or consumers of its rows, and for CPUs point-wise work with its consumer
    for each row.
    """
    if first.call or last.call or len(first.steps) + len(last.steps) > _MAX_STEPS:
        return False
    if first.reduced == last.reduced == 1:
        return first.elements == last.elements or _nested(first, last)
    if first.reduced == last.reduced:
        return first.elements == last.elements
    pointwise, reduction = (first, last) if first.reduced == 1 else (last, first)
    return pointwise.reduced == 1 and pointwise.elements in (
        reduction.elements,
        reduction.elements * reduction.reduced,
    )


def _nested(first: LoopKernel, last: LoopKernel) -> bool:
    """True if `last` reads what `first` makes, and its outer loops are the loops of `first`."""
    reads = not last.parents.isdisjoint(first.steps)
    return reads and len(first.rows) > 0 and last.rows[: len(first.rows)] == first.rows


def _apart(a: LoopKernel, b: LoopKernel, kernel_of: Sequence[LoopKernel]) -> bool:
    """True if a third kernel has to run between the two."""
    return _passes(a, b, kernel_of) or _passes(b, a, kernel_of)


def _passes(last: LoopKernel, first: LoopKernel, kernel_of: Sequence[LoopKernel]) -> bool:
    """True if a dependency path from `first` to `last` passes through another kernel."""
    earliest = min(first.steps)
    pending = [kernel_of[step] for step in last.parents if kernel_of[step] is not first and step > earliest]
    seen: set[int] = set()
    while pending:
        kernel = pending.pop()
        if kernel is first:
            return True
        if id(kernel) in seen or kernel is last:
            continue
        seen.add(id(kernel))
        pending.extend(kernel_of[step] for step in kernel.parents if max(kernel_of[step].steps) >= earliest)
    return False


def _joined(into: LoopKernel, kernel: LoopKernel, kernel_of: list[LoopKernel]) -> LoopKernel:
    if kernel.reduced > into.reduced:
        into.elements, into.reduced = kernel.elements, kernel.reduced
    into.steps = sorted((*into.steps, *kernel.steps))
    into.parents |= kernel.parents
    into.rows = min(into.rows, kernel.rows, key=len)
    for step in kernel.steps:
        kernel_of[step] = into
    return into


def traffic_of(
    kernel: LoopKernel,
    steps: Sequence[LoweredStep],
    readers: Mapping[int, Sequence[int]],
    escaping: set[int],
    sizes: Mapping[int, int],
    scaling: Collection[int] = (),
) -> tuple[int, int]:
    """Bytes that a kernel reads from memory and writes there, without values that it alone makes and reads.

    Returned as two counts: for values in `scaling`, and for all others.
    """
    members = set(kernel.steps)
    made = {value for index in kernel.steps for value in steps[index].writes}
    reads: dict[int, int] = {}
    moved = [0, 0]
    for index in kernel.steps:
        step = steps[index]
        for (value, _), size in step.reads.items():
            if value not in made:
                reads[value] = reads.get(value, 0) + size
        if any(value in escaping or not members.issuperset(readers.get(value, ())) for value in step.writes):
            moved[all(value not in scaling for value in step.writes)] += step.written_bytes
    for value, size in reads.items():
        moved[value not in scaling] += min(size, sizes[value])
    return moved[0], moved[1]
