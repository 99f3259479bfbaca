"""Where, along token counts, a function changes its value: found exactly by bisection between counts of a grid."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Value = TypeVar("Value")
LARGEST_TOKENS = 1 << 20
"""Where searches end."""


def last_holding(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The last count from `low`, where it holds, before `high`, where it does not (or nobody asks)."""
    return low + bisect_left(range(low + 1, high), True, key=lambda tokens: not holds(tokens))


def runs(value_at: Callable[[int], Value], grid: Iterable[int]) -> Iterator[tuple[int, Value]]:
    """(first count, value) of every maximal run of equal values, as far as the counts of `grid` tell of a change.

    `grid` ascends. A run that lies wholly between two of its counts that have equal values is not seen.
    """
    counts = iter(grid)
    low = next(counts)
    value = value_at(low)
    yield low, value
    for high in counts:
        while value != value_at(high):
            low = 1 + last_holding(low, high, lambda tokens, value=value: value_at(tokens) == value)  # type: ignore[misc]
            value = value_at(low)
            yield low, value
        low = high
