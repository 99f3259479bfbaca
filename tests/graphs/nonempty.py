"""Iterables that hold something: a loop over nothing asserts nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def some(values: Iterable[T], of: str = "values to check") -> list[T]:
    """`values` as a list, of at least one; fails if there is none, with `of` as the name of what is missing."""
    found = list(values)
    assert found, f"found no {of}: the loop over them would check nothing"
    return found
