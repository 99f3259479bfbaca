"""Reading measured curves: log-log between points, α–β outside them; at the nearest world size, between row lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from math import exp, hypot, log, sqrt

from weaveopt.cost_model.machine import Curve, Machine, Point, Rate
from weaveopt.cost_model.uncertainty import away_error, read
from weaveopt.records.price import Price, PriceSource, Reading, Uncertainty


def _power_law(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
    share = log(x / x0) / log(x1 / x0)
    between = exp(log(y0) + share * (log(y1) - log(y0)))
    # Rounding must not carry it past an end, or times would fall between equal points.
    return min(max(between, min(y0, y1)), max(y0, y1))


def interpolate_us(points: tuple[Point, ...], num_bytes: float) -> float:
    """Time of `num_bytes` from `points` (bytes strictly growing, times never falling).

    Hits every point exactly and never falls as bytes grow. Below the first point the time is the first
    point's (latency); beyond the last it goes on with the last two points' cost per byte.
    """
    if num_bytes <= points[0].bytes:
        return points[0].us
    last = points[-1]
    if num_bytes >= last.bytes:
        before = points[-2] if len(points) > 1 else Point(0, 0.0)
        return last.us + (num_bytes - last.bytes) * (last.us - before.us) / (last.bytes - before.bytes)
    right = bisect_left(points, num_bytes, key=lambda point: point.bytes)
    high, low = points[right], points[right - 1]
    if num_bytes == high.bytes:
        return high.us
    return _power_law(num_bytes, low.bytes, low.us, high.bytes, high.us)


def read_points(machine: Machine, origin: str, points: tuple[Point, ...], size: float, away: float = 0.0) -> Price:
    """`interpolate_us` with its error; `away` is what the points themselves are off by, as those of another row are."""
    reading: Reading = (origin, points[0].us, points[-1].us, size)
    return read(machine, origin, interpolate_us(points, size), reading, lambda: hypot(away, points_error(points, size)))


def first_point(curve: Curve) -> Reading:
    """Name of the reading of a curve's first point: its latency."""
    return (curve.origin, curve.points[0].us, curve.points[-1].us, float(curve.points[0].bytes))


def points_error(points: tuple[Point, ...], size: float) -> float:
    """Relative error of `interpolate_us` beyond that at a point: leave-one-out residuals of the points next to it."""
    right = bisect_left(points, size, key=lambda point: point.bytes)
    if right < len(points) and points[right].bytes == size:
        return 0.0
    near = points[max(right - 3, 0) : right + 2] if len(points) > 1 else points
    # Times may be 0 in profiles made by hand: there is nothing relative to such a point.
    if size <= 0 or any(point.us <= 0 or point.bytes <= 0 for point in near):
        return 0.0
    sizes, values = [float(point.bytes) for point in near], [log(point.us) for point in near]

    def extended(end: int, others: tuple[int, ...]) -> float:
        """The time of the last point as `interpolate_us` goes on; that of the first is its neighbour's."""
        if len(others) < 2 or end == 0:
            return values[others[0]]
        return log(interpolate_us((near[others[1]], near[others[0]]), near[end].bytes))

    return away_error(sizes, values, size, extended)


def interpolate_rate(rates: tuple[Rate, ...], rows: int) -> float:
    """Rate at `rows` rows, log-log between the measured ones and constant outside."""
    if rows <= rates[0].m:
        return rates[0].flops_per_s
    if rows >= rates[-1].m:
        return rates[-1].flops_per_s
    right = bisect_left(rates, rows, key=lambda rate: rate.m)
    high, low = rates[right], rates[right - 1]
    if rows == high.m:
        return high.flops_per_s
    return _power_law(rows, low.m, low.flops_per_s, high.m, high.flops_per_s)


def nearest_world(curves: Iterable[Curve], world: int) -> int:
    """The world size nearest to `world`, by ratio, that one of `curves` was measured at; the larger of two as near."""
    return min((curve.world for curve in curves), key=lambda other: (abs(log(other / world)), -other))


def nearest_curve(curves: Sequence[Curve], world: int) -> Curve | None:
    """The first of `curves` that was measured at the world size nearest to `world`."""
    if not curves:
        return None
    nearest = nearest_world(curves, world)
    return next(curve for curve in curves if curve.world == nearest)


@cache
def at_row(curves: tuple[Curve, ...], row: int) -> Curve:
    """The curve for rows of `row` elements, of one kernel's curves that were measured at several row lengths.

    Between two row lengths, times of equal bytes are interpolated along log row; beyond them the last curve holds.
    `row_error` of the curve is what that may be off by.
    """
    found = between_rows(curves, row)
    if found.row in (0, row) and any(each is found for each in curves):
        return found
    return replace(found, row_error=_row_error(sorted(curves, key=lambda curve: curve.row), row))


def between_rows(curves: Iterable[Curve], row: int) -> Curve:
    """`at_row` without its error."""
    by_row = sorted(curves, key=lambda curve: curve.row)
    above = next((curve for curve in by_row if curve.row >= row), by_row[-1])
    below = next((curve for curve in reversed(by_row) if curve.row <= row), by_row[0])
    if above is below or not below.row:
        return above
    points = blend(below, above, log(row / below.row) / log(above.row / below.row))
    ends = [end for end in (below.last_bytes, above.last_bytes) if end is not None]
    last_bytes = min(ends, default=None)
    if last_bytes is not None:
        points = tuple(point for point in points if point.bytes <= last_bytes)
    first_bytes = min(below.first_bytes, above.first_bytes)
    changed = replace(below, row=row, points=points, first_bytes=first_bytes, last_bytes=last_bytes)
    return changed if points else above


def carried(machine: Machine, known: Price, floor_us: float, rest_us: float, reading: Reading) -> Price:
    """The part that grows with bytes of a time carried over from another number of ranks or hosts. How far it was
    carried is how far it may be off: nothing was measured there."""
    moved_us = abs(float(floor_us) + float(rest_us) - float(known))
    rest = rest_us if isinstance(rest_us, Price) else Price(rest_us)
    return rest + Price(
        0.0, Uncertainty({reading: bool(machine.relative_error) * moved_us / 2.0}, PriceSource.ESTIMATED)
    )


def _row_error(by_row: Sequence[Curve], row: int) -> float:
    """Relative error of a reading at another row length than those measured: root mean square over message sizes."""
    rows = tuple(float(curve.row) for curve in by_row)
    if len(set(rows)) < len(rows) or min(rows) <= 0.0:
        return 0.0
    errors = []
    for size in dict.fromkeys(point.bytes for curve in by_row for point in curve.points if curve.covers(point.bytes)):
        times = [interpolate_us(curve.points, size) for curve in by_row if curve.covers(size)]
        if len(times) == len(rows) and min(times) > 0.0:
            errors.append(away_error(rows, [log(us) for us in times], row))
    return sqrt(sum(error * error for error in errors) / len(errors)) if errors else 0.0


def blend(below: Curve, above: Curve, share: float) -> tuple[Point, ...]:
    """Times at `share` of the way from one curve to the other, in the logarithm, wherever one of them has a point."""
    sizes = sorted({point.bytes for curve in (below, above) for point in curve.points})
    return tuple(
        Point(size, interpolate_us(below.points, size) ** (1 - share) * interpolate_us(above.points, size) ** share)
        for size in sizes
    )
