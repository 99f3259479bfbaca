"""Token counts at which predictions are asked: between two neighbours they change smoothly."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from weaveopt.cost_model.machine import Machine, Point
from weaveopt.records.site import DTYPE_BYTES

LARGEST_TOKENS = 1 << 20
"""Upper bound of searches for a token count."""


def token_grid(machine: Machine, hidden: int, dtype: str, min_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """Token counts between which predictions for rows of `hidden` change smoothly.

    From `min_tokens` to `max_tokens` in steps of an eighth, and both sides of every size that was measured.
    """
    points = set(machine.memory.points)
    for costs in machine.fabric_costs:
        for curve in costs.curves:
            points.update(curve.points)
    return grid_of(corners_of(points, hidden * DTYPE_BYTES[dtype]), max_tokens, min_tokens)


def corners_of(points: Iterable[Point], row_bytes: int) -> tuple[int, ...]:
    """Token counts on both sides of every point, for rows of `row_bytes`: between two of them, times are power laws."""
    return tuple(tokens for point in points for tokens in (point.bytes // row_bytes, point.bytes // row_bytes + 1))


def grid_of(corners: Iterable[int], max_tokens: int, min_tokens: int = 1) -> tuple[int, ...]:
    """`min_tokens` to `max_tokens` in steps of an eighth, and the corners between, ascending."""
    grid = {max_tokens, *(tokens for tokens in corners if min_tokens <= tokens <= max_tokens)}
    tokens = min_tokens
    while tokens < max_tokens:
        grid.add(tokens)
        tokens = max(tokens + 1, tokens * 9 // 8)
    return tuple(sorted(grid))


def last_where(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The last count from `low`, where it holds, before `high`, where it does not (or which is not asked): by
    bisection."""
    return low + bisect_left(range(low + 1, high), True, key=lambda tokens: not holds(tokens))
