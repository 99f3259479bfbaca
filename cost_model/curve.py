"""Reading a measured curve: log-log between its points, α–β outside them."""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log

from weaveopt.cost_model.machine import Point, Rate


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
