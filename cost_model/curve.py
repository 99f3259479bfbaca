"""Reading measured curves: log-log between points, α–β outside them; at the nearest world size, between row lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log

from weaveopt.cost_model.machine import Curve, Point, Rate


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


def at_row(curves: Iterable[Curve], row: int) -> Curve:
    """The curve for rows of `row` elements, of one kernel's curves that were measured at several row lengths.

    Between two row lengths, times of equal bytes are interpolated along log row; beyond them the last curve holds.
    """
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


def blend(below: Curve, above: Curve, share: float) -> tuple[Point, ...]:
    """Times at `share` of the way from one curve to the other, in the logarithm, wherever one of them has a point."""
    sizes = sorted({point.bytes for curve in (below, above) for point in curve.points})
    return tuple(
        Point(size, interpolate_us(below.points, size) ** (1 - share) * interpolate_us(above.points, size) ** share)
        for size in sizes
    )
