"""Boundaries of a piecewise constant function of the token count, found exactly by bisection between grid points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from weaveopt.cost_model.token_grid import last_where

Value = TypeVar("Value")


def runs(value_at: Callable[[int], Value], grid: Iterable[int]) -> Iterator[tuple[int, Value]]:
    """Return (first count, value) of every maximal run of equal values, as far as the counts of `grid` show a change.

    `grid` ascends. A run entirely between two of its counts that have equal values is not seen.
    """
    counts = iter(grid)
    low = next(counts)
    value = value_at(low)
    yield low, value
    for high in counts:
        while value != value_at(high):
            low = 1 + last_where(low, high, lambda tokens, value=value: value_at(tokens) == value)  # type: ignore[misc]
            value = value_at(low)
            yield low, value
        low = high
