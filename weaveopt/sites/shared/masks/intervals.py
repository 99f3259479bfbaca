"""Range of keys that each query sees, for a boolean node that depends on no graph input; exact, or the reason why not.

Masks are mostly comparisons of a vector over queries with one over keys, joined by `and`. If the vector over keys
ascends or descends, a comparison admits one range of keys for each query, and a binary search finds it; the
intersection of ranges is a range. So the mask is known in `O(queries · log keys)`. Any other form is evaluated block by
block, every element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import Argument, is_call, tensor_of
from weaveopt.sites.shared.masks.classes import without_empty
from weaveopt.sites.shared.masks.evaluate import ONES_ONLY, Ranges, Unreadable, Values, shape_of

aten = torch.ops.aten
prims = torch.ops.prims

BLOCK_ELEMENTS = 1 << 18
"""Elements of a mask that are evaluated at a time: 2 MiB for each int64 operand of that size."""

COMPARE = {
    target: name
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for target in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
}
_NEGATED = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}
MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
AND = frozenset({aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor})
OR = frozenset({aten.bitwise_or.Tensor, aten.logical_or.default})
NOT = frozenset({aten.bitwise_not.default, aten.logical_not.default})
SAME = frozenset({aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default})
_ADD = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
_SAFE = 1 << 30
"""Sums and differences of a few integers below this do not wrap in int64."""


@dataclass(frozen=True)
class Intervals:
    """Row `[...]` of a boolean `[..., size]` is true for `first <= j < end`; both 0 where it is false throughout."""

    first: torch.Tensor
    end: torch.Tensor
    size: int

    def over(self, size: int) -> Intervals:
        """The same where the last dimension, of size 1, is broadcast."""
        if self.size == size:
            return self
        assert self.size == 1, (self.size, size)
        return Intervals(self.first, self.end * size, size)


def find_intervals(node: fx.Node, is_inverted: bool, values: Values, max_elements: int) -> Intervals | None:
    """The ranges that a boolean node admits (`is_inverted`: its negation), or None where a row's is not one range.

    Raises `Unreadable` for what cannot be evaluated, and for a node of more than `max_elements` that has no short form.
    """
    found = _derived(node, is_inverted, values)
    if found is not None:
        return found
    if math.prod(shape_of(node)) > max_elements:
        raise Unreadable(node)
    return _measured(node, is_inverted, values)


def _derived(node: Argument, is_inverted: bool, values: Values) -> Intervals | None:
    """Derive the intervals by rules, without evaluating elements; None if no rule applies."""
    if not isinstance(node, fx.Node) or _dtype_of(node) is not torch.bool:
        return None
    shape = shape_of(node)
    if not shape:
        everywhere = bool(values.whole(node)) != is_inverted
        return Intervals(torch.tensor(0), torch.tensor(int(everywhere)), 1)
    if shape[-1] == 1 and values.is_small(node):
        on = (values.whole(node).squeeze(-1) != is_inverted).to(torch.int64)
        return Intervals(torch.zeros_like(on), on, 1)
    if node.target in COMPARE:
        return _compared(node, is_inverted, values)
    if is_call(node, AND | OR):
        parts = [_derived(argument, is_inverted, values) for argument in node.args[:2]]
        if parts[0] is None or parts[1] is None:
            return None
        a, b = parts[0].over(shape[-1]), parts[1].over(shape[-1])
        return _both(a, b) if is_call(node, AND) != is_inverted else _either(a, b)
    if is_call(node, NOT):
        return _derived(node.args[0], not is_inverted, values)
    if is_call(node, SAME) or node.target is prims.convert_element_type.default:
        return _derived(node.args[0], is_inverted, values)
    if node.target is aten.full.default:
        everywhere = bool(node.args[1]) != is_inverted
        return Intervals(torch.tensor(0), torch.tensor(shape[-1] if everywhere else 0), shape[-1])
    if node.target is aten.expand.default:
        inner = _derived(node.args[0], is_inverted, values)
        if inner is None:
            return None
        return inner.over(shape[-1])  # the others broadcast as they are
    source = node.args[0] if node.args else None
    if node.target in ONES_ONLY and isinstance(source, fx.Node) and shape_of(source)[-1:] == shape[-1:]:
        inner = _derived(source, is_inverted, values)
        if inner is None:
            return None
        rows = shape_of(source)[:-1]  # a view that keeps the last dimension keeps the rows and their order
        first, end = (value.expand(rows).reshape(shape[:-1]) for value in (inner.first, inner.end))
        return Intervals(first, end, inner.size)
    return _measured(node, is_inverted, values) if values.is_small(node) else None


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    value = tensor_of(node)
    return None if value is None else value.dtype


def _both(a: Intervals, b: Intervals) -> Intervals:
    first, end = torch.maximum(a.first, b.first), torch.minimum(a.end, b.end)
    return Intervals(*without_empty(first, end), a.size)


def _either(a: Intervals, b: Intervals) -> Intervals | None:
    """The union, where it is one range in every row."""
    empty_a, empty_b = a.end == 0, b.end == 0
    if bool((~empty_a & ~empty_b & ((a.first > b.end) | (b.first > a.end))).any()):
        return None
    first = torch.where(empty_a, b.first, torch.where(empty_b, a.first, torch.minimum(a.first, b.first)))
    return Intervals(first, torch.maximum(a.end, b.end), a.size)


@dataclass(frozen=True)
class _Sum:
    """An integer node as `row + column`: one over the dimensions before the last, one over the last (or of size 1)."""

    row: torch.Tensor
    column: torch.Tensor


def _summed(argument: Argument, values: Values) -> _Sum | None:
    zero = torch.zeros((1, 1), dtype=torch.int64)
    if isinstance(argument, int):
        return _Sum(zero + argument, zero) if abs(argument) < _SAFE else None
    if not isinstance(argument, fx.Node):
        return None
    dtype, shape = _dtype_of(argument), shape_of(argument)
    if dtype not in (torch.int32, torch.int64):  # narrower ones wrap in comparisons with Python's numbers
        return None
    if argument.target in _ADD and dtype is torch.int64 and len(argument.args) == 2 and not argument.kwargs:
        a, b = (_summed(part, values) for part in argument.args)
        if a is None or b is None:
            return None
        sign = _ADD[argument.target]
        return _Sum(a.row + sign * b.row, a.column + sign * b.column)
    if not values.is_small(argument):
        return None
    if not shape or shape[-1] == 1:
        value = values.whole(argument).to(torch.int64)
        return _Sum(value.reshape((1,) * (2 - value.ndim) + value.shape), zero) if _is_safe(value) else None
    if len(shape) == 1 or shape[-2] == 1:
        value = values.whole(argument).to(torch.int64)
        return _Sum(zero, value.reshape((1,) * (2 - value.ndim) + value.shape)) if _is_safe(value) else None
    return None


def _is_safe(value: torch.Tensor) -> bool:
    return value.numel() > 0 and int(value.min()) > -_SAFE and int(value.max()) < _SAFE


def _compared(node: fx.Node, is_inverted: bool, values: Values) -> Intervals | None:
    """`row + column <= row' + column'` as `column - column' <= row' - row`: a search where the left side is sorted."""
    a, b = (_summed(argument, values) for argument in node.args[:2])
    if a is None or b is None:
        return None
    name = COMPARE[node.target]
    name = _NEGATED[name] if is_inverted else name
    keys, bound = a.column - b.column, b.row - a.row
    if bool((keys.diff(dim=-1) < 0).any()):
        keys, bound, name = -keys, -bound, MIRRORED[name]
        if bool((keys.diff(dim=-1) < 0).any()):
            return None
    shape = shape_of(node)
    keys, bound = _with_rank(keys, len(shape)), _with_rank(bound, len(shape))
    lead = torch.broadcast_shapes(keys.shape[:-2], bound.shape[:-2])
    size = keys.shape[-1]
    line = keys.squeeze(-2).expand(*lead, size).contiguous()
    wanted = bound.squeeze(-1).expand(*lead, bound.shape[-2]).contiguous()
    below, through = (torch.searchsorted(line, wanted, right=right) for right in (False, True))
    zero, whole = torch.zeros_like(below), torch.full_like(below, size)
    ranges = {
        "lt": (zero, below),
        "le": (zero, through),
        "gt": (through, whole),
        "ge": (below, whole),
        "eq": (below, through),
    }
    if name == "ne":
        before = Intervals(*without_empty(zero, below), size)
        found = _either(before, Intervals(*without_empty(through, whole), size))
    else:
        found = Intervals(*without_empty(*ranges[name]), size)
    if found is None:
        return None
    if len(shape) == 1:  # there is no dimension of queries
        found = Intervals(found.first.squeeze(-1), found.end.squeeze(-1), size)
    return found.over(shape[-1])


def _with_rank(value: torch.Tensor, rank: int) -> torch.Tensor:
    return value.reshape((1,) * (rank - value.ndim) + value.shape)


def _measured(node: fx.Node, is_inverted: bool, values: Values) -> Intervals | None:
    """Evaluate every element, one block at a time; None if some query's keys are not contiguous."""
    shape = shape_of(node)
    first = torch.zeros(shape[:-1], dtype=torch.int64)
    end = torch.zeros(shape[:-1], dtype=torch.int64)
    for ranges in _blocks(shape):
        block = values.block(node, ranges) != is_inverted
        count = block.sum(dim=-1)
        # `argmax` of equal bytes is the first of them: of true ones from the left, and from the right.
        data = block.to(torch.uint8)
        start = data.argmax(dim=-1)
        stop = shape[-1] - data.flip(-1).argmax(dim=-1)
        if bool(((count > 0) & (stop - start != count)).any()):
            return None
        rows = tuple(slice(*part) for part in ranges[:-1])
        first[rows], end[rows] = torch.where(count > 0, start, 0), torch.where(count > 0, stop, 0)
    return Intervals(first, end, shape[-1])


def _blocks(shape: tuple[int, ...]) -> list[Ranges]:
    """Parts of `shape` that together are all of it: whole rows, `BLOCK_ELEMENTS` elements or one row each."""
    found: list[Ranges] = [tuple((0, size) for size in shape)]
    for dim, size in enumerate(shape[:-1]):
        inner = math.prod(shape[dim + 1 :])
        step = max(BLOCK_ELEMENTS // max(inner, 1), 1)
        found = [
            (*part[:dim], (start, min(start + step, size)), *part[dim + 1 :])
            for part in found
            for start in range(0, size, step)
        ]
    return found
