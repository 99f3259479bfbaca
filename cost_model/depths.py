"""Time of a kernel that holds a GEMM, from curves by message bytes at several depths `k` of the GEMM.

As `k` grows such a time stays level while other work hides the GEMM, and then grows by the GEMM's own rate: it is
convex. So a straight line between two measured depths is never below it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from weaveopt.records.price import Price


def at_depth_us(by_depth: Mapping[int, Price], depth: int) -> Price | None:
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


def between(by_depth: Mapping[int, Price], depth: int) -> Price:
    """Interpolates `by_depth` at `depth`: linear between its neighbours, constant beyond the ends."""
    depths = sorted(by_depth)
    right = bisect_left(depths, depth)
    if right in (0, len(depths)):
        return by_depth[depths[min(right, len(depths) - 1)]]
    low, high = depths[right - 1], depths[right]
    return by_depth[low] + (by_depth[high] - by_depth[low]) * (depth - low) / (high - low)
