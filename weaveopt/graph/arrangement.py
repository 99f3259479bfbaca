"""Order of a value's elements after views, transposes, splits and concatenations, as an exact value.

Frameworks move the elements of a tensor around a collective in many spellings: `cat(split(x, n, 1))`, a `view` and a
`permute`, `chunk` and `stack`, slices. An `Arrangement` is what all spellings of one movement have in common. Each
dimension of a moved value is a product of factors; a factor is a digit of the index of one dimension of the source::

    cat(split(x[M, N].view(B, S, N), S / W, 1), 0)   is   [(W, B), S / W, N]   of the factors
    W: dim 0, step S / W    B: dim 0, step S    S / W: dim 0, step 1    N: dim 1, step 1

Sizes are numbers, or symbols of torch where a graph has symbolic sizes: a symbolic size is factored only where the
quotient is exact whatever the symbols are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy  # type: ignore[import-untyped]
import torch

Size: TypeAlias = int | sympy.Expr


@dataclass(frozen=True)
class Factor:
    """A digit of an index of the source: it counts `step` elements of dimension `dim`, from 0 below `size`."""

    dim: int
    step: Size
    size: Size


Dim = tuple[Factor, ...]
"""A dimension of a moved value, slowest digit first; empty where it has one element."""


@dataclass(frozen=True)
class Picked:
    """Digits that a piece of a value has fixed: piece `index` of as many as the product of the factors' sizes."""

    factors: Dim
    index: int


@dataclass(frozen=True)
class Arrangement:
    """The dimensions of a moved value in terms of the source's, and of a piece what it is the piece of."""

    dims: tuple[Dim, ...]
    picked: tuple[Picked, ...] = ()

    @staticmethod
    def of(shape: Sequence[int | torch.SymInt]) -> Arrangement:
        """A value as it is."""
        sizes = [size_of(size) for size in shape]
        return Arrangement(tuple(_factor(dim, 1, size) for dim, size in enumerate(sizes)))

    @property
    def factors(self) -> Dim:
        """Digits in the memory order of a contiguous value, adjacent ones merged where they form one digit."""
        return merged(tuple(factor for dim in self.dims for factor in dim))

    def permuted(self, order: Sequence[int]) -> Arrangement:
        return Arrangement(tuple(self.dims[at] for at in order), self.picked)

    def viewed(self, shape: Sequence[int | torch.SymInt]) -> Arrangement | None:
        """The same elements in the same order in other dimensions; None where the factors do not go into these."""
        rest, dims = self.factors, []
        for size in shape:
            parts = taken(rest, size_of(size))
            if parts is None:
                return None
            dim, rest = parts
            dims.append(dim)
        return None if rest else Arrangement(tuple(dims), self.picked)

    def piece(self, dim: int, num_pieces: Size, index: int) -> Arrangement | None:
        """Piece `index` of `num_pieces` equal ones along `dim`; None where the dimension cannot be cut so."""
        parts = taken(merged(self.dims[dim]), num_pieces)
        if parts is None:
            return None
        lead, rest = parts
        dims = (*self.dims[:dim], rest, *self.dims[dim + 1 :])
        return Arrangement(dims, (*self.picked, Picked(lead, index)) if lead else self.picked)


def joined(pieces: Sequence[Arrangement], dim: int) -> Arrangement | None:
    """The pieces one after the other along `dim`; None where they are not all pieces of one value in their order."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    for position, picked in enumerate(first.picked):
        whole = math.prod(size for factor in picked.factors if isinstance(size := factor.size, int))
        is_known = all(isinstance(factor.size, int) for factor in picked.factors)
        if is_known and whole == len(pieces) and _in_order(pieces, position):
            others = (*first.picked[:position], *first.picked[position + 1 :])
            dims = (*first.dims[:dim], merged((*picked.factors, *first.dims[dim])), *first.dims[dim + 1 :])
            return Arrangement(dims, others)
    return None


def _in_order(pieces: Sequence[Arrangement], position: int) -> bool:
    """True if piece i of those picked at `position` is the i-th, all else being equal."""
    first = pieces[0]
    return all(
        piece.dims == first.dims
        and len(piece.picked) == len(first.picked)
        and all(
            (mine == other) if at != position else (mine.factors == other.factors and mine.index == index)
            for at, (mine, other) in enumerate(zip(piece.picked, first.picked, strict=True))
        )
        for index, piece in enumerate(pieces)
    )


def merged(dim: Dim) -> Dim:
    """Neighbours that count on make one digit: (step 6, size 4)(step 2, size 3) is (step 2, size 12)."""
    found: list[Factor] = []
    for factor in dim:
        last = found[-1] if found else None
        if last is not None and last.dim == factor.dim and last.step == factor.step * factor.size:
            found[-1] = Factor(factor.dim, factor.step, last.size * factor.size)
        else:
            found.append(factor)
    return tuple(found)


def taken(dim: Dim, size: Size) -> tuple[Dim, Dim] | None:
    """The slowest digits with `size` values together, and the rest; None where they do not come out even."""
    lead: list[Factor] = []
    rest = list(dim)
    needed = size
    while needed != 1:
        if not rest:
            return None
        factor = rest.pop(0)
        more = quotient(needed, factor.size)
        if more is not None:
            lead.append(factor)
            needed = more
            continue
        inner = quotient(factor.size, needed)
        if inner is None:
            return None
        lead.append(Factor(factor.dim, factor.step * inner, needed))
        rest.insert(0, Factor(factor.dim, factor.step, inner))
        needed = 1
    return tuple(lead), tuple(rest)


def quotient(a: Size, b: Size) -> Size | None:
    """`a / b` where that is a whole number whatever the symbols are."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    found = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    numerator, denominator = found.as_numer_denom()
    if denominator != 1 or not numerator.is_integer:
        return None
    return int(found) if found.is_Integer else found


def size_of(size: int | torch.SymInt) -> Size:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def _factor(dim: int, step: Size, size: Size) -> Dim:
    return () if size == 1 else (Factor(dim, step, size),)
