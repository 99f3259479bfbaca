"""Operators that move elements: the place of an axis after views, transposes, slices, splits, concatenations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Size, quotient, size_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.values import argument
from weaveopt.rewrites.token_split.builder import VIEWS
from weaveopt.rewrites.token_split.values import Mark, sizes_of

aten = torch.ops.aten
Place = tuple[int, ...]
"""Position of an operand in a call: of the argument, and of the item where that is a list."""


@dataclass(frozen=True)
class Moved:
    """Place of an operand's axis in a call's result."""

    mark: Mark | None
    """None: the axis is no dimension of the result."""
    is_local: bool = True
    """True if an element of the result reads only elements of the operand that are at its own place on the axis."""


NOWHERE = Moved(None, is_local=False)
Follow = Callable[[fx.Node, Place, Mark, Size], Moved]
"""Call, operand, place of the axis in the operand, length of the axis."""


def viewed(before: Sequence[Size], after: Sequence[Size], mark: Mark, length: Size) -> Mark | None:
    """Place of an axis after a view; None where the axis is in no single dimension of it."""
    outer = math.prod(before[: mark.dim], start=1) * mark.before
    inner = math.prod(before[mark.dim + 1 :], start=1) * mark.after
    if mark.extra != 0:
        return None
    for dim in range(len(after)):
        more, less = quotient(outer, math.prod(after[:dim])), quotient(inner, math.prod(after[dim + 1 :]))
        if more is not None and less is not None:
            return Mark(dim, more, less)
    return None


def _view(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    found = viewed(sizes_of(_operand(node)), sizes_of(_result(node)), mark, length)
    return Moved(found, found is not None)


def _expand(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    return Moved(mark.at(mark.dim + _result(node).ndim - _operand(node).ndim))


def _permute(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    ndim = _operand(node).ndim
    if node.target is aten.t.default:
        return Moved(mark.at(ndim - 1 - mark.dim))
    if node.target is aten.transpose.int:
        a, b = (int(each) % ndim for each in node.args[1:3])  # type: ignore[arg-type]
        return Moved(mark.at({a: b, b: a}.get(mark.dim, mark.dim)))
    order = node.args[1]
    assert isinstance(order, list | tuple), order
    return Moved(mark.at([int(each) % ndim for each in order].index(mark.dim)))  # type: ignore[arg-type]


def _unsqueeze(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    added = int(node.args[1]) % _result(node).ndim  # type: ignore[arg-type]
    return Moved(mark.at(mark.dim + (mark.dim >= added)))


def _squeeze(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    ndim = _operand(node).ndim
    named = node.args[1] if len(node.args) > 1 else list(range(ndim))
    dims = [named] if isinstance(named, int) else named
    assert isinstance(dims, list | tuple), dims
    shape = _operand(node).shape
    gone = {int(dim) % ndim for dim in dims if shape[int(dim) % ndim] == 1}
    return Moved(mark.at(mark.dim - sum(dim < mark.dim for dim in gone)))


def _along(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    """An operator that keeps dimensions and reads along one of them, its argument `dim`."""
    dim = argument(node, "dim")
    operand = _operand(node, place)
    along = (dim if isinstance(dim, int) else -1) % max(operand.ndim, 1)
    return Moved(mark, mark.dim != along)


def _select(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    dim = argument(node, "dim")
    gone = (dim if isinstance(dim, int) else 0) % _operand(node).ndim
    return NOWHERE if mark.dim == gone else Moved(mark.at(mark.dim - (mark.dim > gone)))


def _split(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    """Pieces of a size along the axis divide the factor before it: what a gather of ranks put there."""
    kept = _along(node, place, mark, length)
    pieces = node.args[1]
    if kept.is_local or node.target is not aten.split.Tensor or not isinstance(pieces, int | fx.Node):
        return kept
    size = pieces if isinstance(pieces, int) else size_of(pieces.meta["val"])
    before = quotient(size, length * mark.after)
    fits = before is not None and mark.extra == 0 and quotient(mark.before, before) is not None
    return Moved(replace(mark, before=before)) if fits and before is not None else kept


def _pad(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    pads = node.args[1]
    assert isinstance(pads, list | tuple), pads
    from_the_end = _operand(node).ndim - 1 - mark.dim
    return Moved(mark, all(pad == 0 for pad in pads[2 * from_the_end : 2 * from_the_end + 2]))


def _item(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    return Moved(mark)


def _operand(node: fx.Node, place: Place = (0,)) -> torch.Tensor:
    found: object = node.args[place[0]]
    if len(place) > 1:
        assert isinstance(found, list | tuple), found
        found = found[place[1]]
    value = tensor_of(found) if isinstance(found, fx.Node) else None
    assert value is not None, f"operand {place} of {node.name} is no tensor"
    return value


def _result(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    return value


SHAPES: dict[object, Follow] = {
    **dict.fromkeys(VIEWS, _view),
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.slice.Tensor: _along,
    aten.slice_scatter.default: _along,
    aten.cat.default: _along,
    aten.select.int: _select,
    aten.unbind.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.constant_pad_nd.default: _pad,
    operator.getitem: _item,
}
"""Operators that move elements, by how an axis of an operand is followed to the result."""
