"""Time of a kernel that holds a GEMM and its exchange, as measured: by message bytes, at several sizes of the GEMM.

As a GEMM's depth `k` grows, such a time stays level while other work hides the GEMM, and then grows by the GEMM's own
rate: it is convex. So a straight line between two measured depths is never below it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Generic, TypeVar

from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.curve import at_row, between_rows, interpolate_us, read_points
from weaveopt.cost_model.machine import Curve, Machine, Point
from weaveopt.cost_model.uncertainty import away_error
from weaveopt.records.candidate import Fabric, Values
from weaveopt.records.price import Price, PriceSource, Uncertainty

C = TypeVar("C")
"""How a kernel is cut: each operation's own."""
ByDepth = Mapping[int, tuple[Curve, ...]]
"""Curves of one kernel by depth: one for each length of rows."""
Waves = Callable[[int, int, int], int]
"""How many tiles the busiest cluster computes one after the other, of (rows, elements of a row, depth); 0: unknown."""


@dataclass(frozen=True)
class Message:
    """The rows that are exchanged."""

    tokens: int
    row: int
    """Elements of each."""
    element_bytes: int

    @property
    def bytes(self) -> int:
        return self.tokens * self.row * self.element_bytes


@dataclass(frozen=True)
class OperationCurves(Generic[C]):
    """Curves of an operation's kernels at one world size; those of other world sizes do not apply."""

    machine: str
    world: int
    depth: str
    """The operation's name of the depth: `k` or `n`."""
    by_cut: Mapping[C, ByDepth]


@dataclass(frozen=True)
class Unmeasured:
    """Why no kernel's time is known: a stable code, one sentence, and the values that decided it."""

    code: str
    message: str
    values: Values


def kernels_of(
    machine: Machine, fabric: Fabric, world: int, op: str, depth: str, parse: Callable[[str], tuple[C, int] | None]
) -> OperationCurves[C]:
    """Collects an operation's curves at a world size. `parse` returns the cut and depth of a variant, or None for other
    kernels of the operation."""
    found: dict[C, dict[int, tuple[Curve, ...]]] = {}
    for curve in fabric_costs(machine, fabric).curves_of(op) if fabric in machine.fabrics else ():
        parsed = parse(curve.variant)
        if parsed is not None and curve.world == world:
            by_depth = found.setdefault(parsed[0], {})
            by_depth[parsed[1]] = (*by_depth.get(parsed[1], ()), curve)
    return OperationCurves(machine.name, world, depth, found)


def fastest(
    kernels: OperationCurves[C],
    machine: Machine,
    message: Message,
    depth: int,
    waves: Callable[[C, int, int, int], int],
    gemm_us: float,
) -> tuple[C, float] | Unmeasured:
    """The cut that is predicted fastest, and its time; `waves`: as `Waves`, of a cut.

    No less than `gemm_us`, the library's GEMM alone, where rows are longer than any that were measured: there curves
    are extended, and a kernel that was chosen since they promised less was slower (docs/figures.md).
    """
    if not kernels.by_cut:
        where = (("machine", kernels.machine), ("world", kernels.world))
        return Unmeasured("not_measured", "the kernel was not measured on the machine with so many ranks", where)
    found: list[tuple[C, float]] = []
    for cut, by_depth in kernels.by_cut.items():
        known_us = overlapped_us(machine, by_depth, message, depth, partial(waves, cut))
        if known_us is not None:
            found.append((cut, known_us))
    if not found:
        sizes = (("bytes", message.bytes), (kernels.depth, depth))
        return Unmeasured("beyond_measured", "the kernel was not measured at this size, and is not used there", sizes)
    cut, us = min(found, key=lambda each: each[1])
    return cut, us if message.row <= _longest_row(kernels) else max(us, gemm_us)


def _longest_row(kernels: OperationCurves[C]) -> float:
    """Longest measured row; infinite if curves do not record it."""
    rows = {curve.row for by_depth in kernels.by_cut.values() for curves in by_depth.values() for curve in curves}
    return max(rows) if all(rows) else float("inf")


def overlapped_us(machine: Machine, by_depth: ByDepth, message: Message, depth: int, waves: Waves) -> Price | None:
    """Time at `depth`, from curves of one kernel by depth: one for each length of rows. What is called depth is the
    size of the GEMM that rows do not imply: k where its results are exchanged, n where its input is. Of more columns
    waves of tiles are more, each of which takes as long as one of the nearest measured sizes; a last one counts whole.

    None where it was not measured at such a size.
    """
    found: dict[int, Price] = {}
    for measured, curves in by_depth.items():
        if at_row(curves, message.row).covers(message.bytes):
            found[measured] = _at_size_us(machine, curves, message, measured, waves)
    plain_us = _at_depth_us(found, depth)
    if plain_us is None:
        return None
    here = waves(message.tokens, message.row, depth)
    waves_at = {each: waves(message.tokens, message.row, each) for each in found}
    if here == 0 or set(waves_at.values()) == {here}:
        us = plain_us
    else:
        us = _between({each: us / waves_at[each] for each, us in found.items()}, depth) * here
    kernel = next(iter(by_depth.values()))[0]

    def away() -> float:
        """Between depths, as at any other size."""
        depths = sorted(found)
        error = away_error([float(each) for each in depths], [log(found[each]) for each in depths], depth)
        return bool(machine.relative_error) * error

    return us.with_error((kernel.op, kernel.variant, message, depth), away, PriceSource.INTERPOLATED)


def _at_depth_us(by_depth: Mapping[int, Price], depth: int) -> Price | None:
    """The time at `depth` from those at measured depths.

    Linear between two depths. Beyond the last it grows as the depth does: where the exchange still hides the GEMM at
    the last depth, the slope between the last two says nothing of what comes. Below the first it is the first's: a
    smaller GEMM takes no longer. None where that takes two depths and there is one.
    """
    depths = sorted(by_depth)
    if not depths:
        return None
    if depth <= depths[0]:
        return by_depth[depths[0]]
    if len(depths) == 1:
        return None
    if depth > depths[-1]:
        return by_depth[depths[-1]] * depth / depths[-1]
    right = bisect_left(depths, depth)
    low, high = depths[right - 1], depths[right]
    slope = max(by_depth[high] - by_depth[low], Price(0.0)) / (high - low)
    return by_depth[low] + slope * (depth - low)


def _between(by_depth: Mapping[int, Price], depth: int) -> Price:
    """Interpolates `by_depth` at `depth`: linear between its neighbours, constant beyond the ends."""
    depths = sorted(by_depth)
    right = bisect_left(depths, depth)
    if right in (0, len(depths)):
        return by_depth[depths[min(right, len(depths) - 1)]]
    low, high = depths[right - 1], depths[right]
    return by_depth[low] + (by_depth[high] - by_depth[low]) * (depth - low) / (high - low)


def _at_size_us(machine: Machine, curves: tuple[Curve, ...], message: Message, depth: int, waves: Waves) -> Price:
    """Read from curves of one depth, as it is and by what a wave of tiles takes; the longer of the two.

    Times were measured at sizes whose tiles fill whole waves. A few rows more may take a wave more.
    """
    size = message.bytes
    plain = at_row(curves, message.row)
    plain_us = read_points(machine, plain.origin, plain.points, size, plain.row_error)
    # A profile may omit the SMs, and the length of rows at which a time was measured.
    here = waves(message.tokens, message.row, depth)
    if here == 0 or not all(curve.row for curve in curves):
        return plain_us
    of_a_wave = []
    for curve in curves:
        row_bytes = curve.row * message.element_bytes
        tokens_of = ((point, max(round(point.bytes / row_bytes), 1)) for point in curve.points)
        points = tuple(Point(point.bytes, point.us / waves(tokens, curve.row, depth)) for point, tokens in tokens_of)
        of_a_wave.append(replace(curve, points=points))
    waves_us = interpolate_us(between_rows(of_a_wave, message.row).points, size) * here
    # Read one way or the other, and the truth is between: half of what they differ by is not known.
    apart_us = waves_us - float(plain_us)
    if apart_us <= 0.0:
        return plain_us
    reading = ("waves", plain.op, plain.variant, size)
    return plain_us + Price(apart_us, Uncertainty({reading: apart_us / 2.0}, PriceSource.INTERPOLATED))
