"""Values of a graph that is split: whole, or in parts along the token axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch.utils._sympy.functions import FloorDiv

from weaveopt.graph.arrangement import Size, size_of


@dataclass(frozen=True)
class Mark:
    """Place of an axis of `length` elements in a value: dimension `dim` is `[before, length, after]` flattened.

    Rows `[B * S, H]` of `[B, S, H]` have the sequence at `Mark(0, before=B)` and the batch at `Mark(0, after=S)`, so
    flattened rows need no copy to be cut.
    """

    dim: int
    before: Size = 1
    after: Size = 1
    extra: Size = 0
    """Elements of the dimension after those of the axis: a column of attention sinks."""

    @property
    def is_plain(self) -> bool:
        """True if the dimension is the axis and nothing else."""
        return self.before == 1 and self.after == 1 and self.extra == 0

    def at(self, dim: int) -> Mark:
        return replace(self, dim=dim)

    def size(self, length: Size) -> Size:
        """Size of the dimension where the axis has `length` elements."""
        return simplified(self.before * length * self.after + self.extra)


@dataclass(frozen=True)
class Parts:
    """A value in parts: one node of the new graph for each."""

    nodes: tuple[fx.Node, ...]
    mark: Mark


Value: TypeAlias = "fx.Node | Parts"
"""Counterpart of a captured node in the new graph: one node, or one for each part."""


@dataclass(frozen=True)
class Cut:
    """An axis and where it is cut: part `k` has the elements from `bounds[k]` up to `bounds[k + 1]`."""

    name: str
    """`batch` or `sequence`."""
    bounds: tuple[Size, ...]

    @property
    def length(self) -> Size:
        return self.bounds[-1]

    @property
    def num_parts(self) -> int:
        return len(self.bounds) - 1

    def part(self, index: int) -> Size:
        """Number of elements of a part."""
        return simplified(self.bounds[index + 1] - self.bounds[index])


def simplified(size: Size) -> Size:
    """A size as a number if it is one."""
    if isinstance(size, sympy.Expr):
        return int(size) if size.is_Integer else size
    return size


def sizes_of(value: torch.Tensor) -> tuple[Size, ...]:
    return tuple(size_of(size) for size in value.shape)


def fraction(size: Size, part: int, num_parts: int) -> Size:
    """`part` of `num_parts` equal parts of a size, rounded down."""
    total = simplified(size * part)
    return total // num_parts if isinstance(total, int) else FloorDiv(total, num_parts)
