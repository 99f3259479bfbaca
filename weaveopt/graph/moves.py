"""The arrangement that a graph gives a value between one node and another: every spelling of a movement, followed.

Casts are passed too, since they change no element's place. Scalings and sums are not: they are no movements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Arrangement, Size, joined, quotient, size_of
from weaveopt.graph.pattern import CAST, SHAPE_ONLY, is_call, is_rounding, tensor_of
from weaveopt.graph.values import argument
from weaveopt.records.candidate import Rejection

aten = torch.ops.aten
BITS = frozenset({aten.view.dtype})
"""Views of the same bytes under another dtype: torch sends FP8 this way through a library that does not support it."""
_COPIES = frozenset({aten.clone.default, aten.contiguous.default, aten.squeeze.default}) | SHAPE_ONLY
_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int})
_JOINS = frozenset({aten.cat.default, aten.stack.default})
_ORDERS = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
_EXPANDS = frozenset({aten.expand.default})
_PARTS = frozenset({aten.slice.Tensor, aten.select.int, operator.getitem})
MOVES = frozenset(_COPIES | _EXPANDS | _SPLITS | _JOINS | _ORDERS | _PARTS | BITS | CAST)
"""Operations that only move elements, or cast them."""
OTHER_MOVES = frozenset(
    {
        aten.constant_pad_nd.default,
        aten.as_strided.default,
        aten.flip.default,
        aten.roll.default,
        aten.index.Tensor,
        aten.index_select.default,
        torch.ops.prims.rev.default,
    }
)
"""Operations that move elements in ways that no arrangement expresses: their result is incomplete or padded."""

Moved = Arrangement | tuple[Arrangement, ...] | Rejection | None
"""Arrangement of a node, one for each of several results, the reason why there is none, or None if it is no
movement."""


class Moves:
    """Arrangements of nodes relative to one or more sources, memoized."""

    def __init__(self, sources: Mapping[fx.Node, Arrangement]) -> None:
        self.known: dict[fx.Node, Moved] = dict(sources)
        """Every node that was asked for, and what led to it."""

    def of(self, node: fx.Node) -> Moved:
        """Return what `node` holds. No recursion limit applies: a chain of movements is never that deep."""
        if node not in self.known:
            self.known[node] = self._follow(node)
        return self.known[node]

    def arrangement(self, node: object) -> Arrangement | Rejection | None:
        """Return the arrangement of a node with one result."""
        found = self.of(node) if isinstance(node, fx.Node) else None
        return None if isinstance(found, tuple) else found

    def _follow(self, node: fx.Node) -> Moved:
        if is_call(node, OTHER_MOVES):
            return self._lost(node, "elements are padded, repeated or picked one by one")
        if not is_call(node, MOVES):
            return None
        if is_call(node, _JOINS):
            return self._join(node)
        if node.target is operator.getitem:
            whole = self.of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
            index = node.args[1]
            return whole[index] if isinstance(whole, tuple) and isinstance(index, int) else _none_or_why(whole)
        before = self.arrangement(node.args[0])
        if not isinstance(before, Arrangement):
            return before
        if is_call(node, CAST):
            return before if is_rounding(node) else self._lost(node, "a cast changes values by more than rounding")
        step = next(follow for targets, follow in _STEPS if node.target in targets)
        found = step(node, before)
        return found if found is not None else self._lost(node, _WHY.get(node.target, "the sizes do not divide"))

    def _join(self, node: fx.Node) -> Moved:
        inputs = node.args[0]
        assert isinstance(inputs, Sequence), f"{node.name} joins {inputs!r}"
        pieces = [self.arrangement(each) for each in inputs]
        why = next((each for each in pieces if isinstance(each, Rejection)), None)
        if why is not None or not any(isinstance(each, Arrangement) for each in pieces):
            return why
        value = tensor_of(node)
        whole = [each for each in pieces if isinstance(each, Arrangement)]
        if len(whole) != len(pieces) or value is None:
            return self._lost(node, "other values are joined with it")
        dim = _dim(node, value.ndim)
        if node.target is aten.stack.default:
            whole = [Arrangement((*a.dims[:dim], (), *a.dims[dim:]), a.picked) for a in whole]
        return joined(whole, dim) or self._lost(node, "pieces are joined in another order than they were cut")

    def _lost(self, node: fx.Node, why: str) -> Rejection | None:
        """The reason, if what is lost was a movement of a source."""
        sources = [each for each in node.all_input_nodes if self.of(each) is not None]
        if not sources:
            return None
        shapes = [tuple(value.shape) for each in sources if (value := tensor_of(each)) is not None]
        values = (("node", node.name), ("op", str(node.target)), ("shape", str(shapes[0]) if shapes else "several"))
        return Rejection(_code(node), f"the rows cannot be followed: {why}", values)


def _code(node: fx.Node) -> str:
    uneven = _SPLITS | {aten.slice.Tensor, aten.constant_pad_nd.default}
    return "uneven_shards" if is_call(node, frozenset(uneven)) else "form_not_known"


def _none_or_why(found: Moved) -> Rejection | None:
    return found if isinstance(found, Rejection) else None


def _shape(node: fx.Node) -> list[int | torch.SymInt]:
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    return list(value.shape)


def _source_shape(node: fx.Node) -> list[int | torch.SymInt]:
    assert isinstance(node.args[0], fx.Node), node.args
    return _shape(node.args[0])


def _dim(node: fx.Node, rank: int) -> int:
    dim = argument(node, "dim")
    assert isinstance(dim, int), f"{node.name} has no dim"
    return dim % max(rank, 1)


def _view(node: fx.Node, before: Arrangement) -> Arrangement | None:
    return before.viewed(_shape(node))


def _expand(node: fx.Node, before: Arrangement) -> Arrangement | None:
    """Follow an expand that repeats nothing, as `matmul` expands operands that have the shape already."""
    return before if [*map(str, _shape(node))] == [*map(str, _source_shape(node))] else None


def _bits(node: fx.Node, before: Arrangement) -> Arrangement | None:
    value, source = tensor_of(node), tensor_of(node.args[0])  # type: ignore[arg-type]
    if value is None or source is None or value.dtype.itemsize != source.dtype.itemsize:
        return None
    # As integers bytes only travel; as floats of another dtype they are other numbers.
    both_floats = value.dtype.is_floating_point and source.dtype.is_floating_point
    return None if both_floats and value.dtype != source.dtype else before


def _order(node: fx.Node, before: Arrangement) -> Arrangement | None:
    rank = len(before.dims)
    if node.target is aten.permute.default:
        dims = argument(node, "dims")
        assert isinstance(dims, Sequence), f"{node.name} has no dims"
        return before.permuted([int(dim) % rank for dim in dims])
    order = list(range(rank))
    if node.target is aten.t.default:
        return before.permuted(order[::-1])
    dim0, dim1 = argument(node, "dim0"), argument(node, "dim1")
    assert isinstance(dim0, int) and isinstance(dim1, int), f"{node.name} has no dims"
    order[dim0 % rank], order[dim1 % rank] = order[dim1 % rank], order[dim0 % rank]
    return before.permuted(order)


def _split(node: fx.Node, before: Arrangement) -> tuple[Arrangement, ...] | None:
    shape = _source_shape(node)
    dim = _dim(node, len(shape))
    pieces = node.meta.get("val")
    assert isinstance(pieces, list | tuple), f"{node.name} makes no pieces"
    if node.target is not aten.unbind.int and len({str(piece.shape[dim]) for piece in pieces}) != 1:
        return None
    found = [before.piece(dim, len(pieces), index) for index in range(len(pieces))]
    if node.target is aten.unbind.int:
        found = [None if each is None else _without(each, dim) for each in found]
    return tuple(each for each in found if each is not None) if None not in found else None


def _without(each: Arrangement, dim: int) -> Arrangement:
    assert not each.dims[dim], f"dimension {dim} of {each} has more than one element"
    return Arrangement((*each.dims[:dim], *each.dims[dim + 1 :]), each.picked)


def _part(node: fx.Node, before: Arrangement) -> Arrangement | None:
    shape = _source_shape(node)
    dim = _dim(node, len(shape))
    length = size_of(shape[dim])
    if node.target is aten.select.int:
        index = argument(node, "index")
        if not isinstance(index, int) or not isinstance(length, int):
            return None
        piece = before.piece(dim, length, index % length)
        return None if piece is None else _without(piece, dim)
    size, start = size_of(_shape(node)[dim]), argument(node, "start") or 0
    if argument(node, "step") != 1:
        return None
    if size == length:
        return before
    first = size_of(start) if isinstance(start, int | torch.SymInt) else None
    num, index = quotient(length, size), None if first is None else _index(first, size, length)
    return before.piece(dim, num, index) if num is not None and isinstance(index, int) else None


def _index(start: Size, size: Size, length: Size) -> Size | None:
    if isinstance(start, int) and start < 0:
        start = length + start
    return quotient(start, size)


_WHY: dict[object, str] = {
    aten.view.dtype: "bytes are read as elements of another size, or as other numbers",
    aten.expand.default: "elements are repeated",
}
_Step = Callable[[fx.Node, Arrangement], Arrangement | tuple[Arrangement, ...] | None]
_STEPS: tuple[tuple[frozenset[object], _Step], ...] = (
    (_COPIES, _view),
    (BITS, _bits),
    (_EXPANDS, _expand),
    (_ORDERS, _order),
    (_SPLITS, _split),
    (_PARTS, _part),
)
