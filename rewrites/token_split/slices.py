"""Slices of whole values, pushed down into what a mask is made of, so that a part's mask is read like any mask.

A slice of a finished bias `where(mask, 0, -inf)` is no choice between two numbers any more, and one of a finished mask
no comparison of positions. So a slice of either goes through comparisons, `and`, `where`, expansions and indexing down
to the vectors of positions. Any other value is sliced as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Size
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.values import argument
from weaveopt.rewrites.token_split.builder import VIEWS, Builder
from weaveopt.rewrites.token_split.shapes import viewed
from weaveopt.rewrites.token_split.values import Cut, Mark, Parts, Value, simplified, sizes_of
from weaveopt.sites.shared.masks.bias import BooleanForm, boolean_form, under_padding
from weaveopt.sites.shared.masks.evaluate import POINTWISE

aten = torch.ops.aten
prims = torch.ops.prims
ALIGNED = 16
"""Elements that rows of a mask are padded to: kernels of CUDA read 16 bytes at a time."""


class Slices:
    """Slices of whole nodes of the graph under construction, each made once."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._known: dict[tuple[fx.Node, Mark, Size, Size], fx.Node] = {}

    def of(self, node: fx.Node, mark: Mark, begin: Size, end: Size, length: Size) -> fx.Node:
        """Elements `begin` to `end` of the axis of `length` elements at `mark`."""
        key = (node, mark, begin, end)
        if key not in self._known:
            if mark.is_plain and (_is_mask(node) or _is_repeated(node, mark.dim)):
                self._known[key] = self._pushed(node, mark.dim, begin, end)
            else:
                self._known[key] = self._builder.sliced(node, mark, begin, end, length)
        return self._known[key]

    def taken(self, node: fx.Node, value: Parts, cut: Cut) -> Value | None:
        """A slice along the axis of a value in parts: all of it, or tokens of the last part alone; None for others."""
        source, dim = node.args[0], argument(node, "dim")
        assert isinstance(source, fx.Node), node.args
        if not isinstance(dim, int) or not value.mark.is_plain or dim % len(_sizes(source)) != value.mark.dim:
            return None
        if _sizes(source) == _sizes(node):
            return value
        start, end, step = (argument(node, name) for name in ("start", "end", "step"))
        last, begin = cut.part(cut.num_parts - 1), cut.bounds[-2]
        if not isinstance(start, int) or step != 1:
            return None
        # A part of symbolic length has at least one token.
        if -(last if isinstance(last, int) else 1) <= start < 0 and end in (None, torch.iinfo(torch.int64).max):
            return self._builder.call(aten.slice.Tensor, (value.nodes[-1], dim, start, end), node)
        if not isinstance(begin, int) or not begin <= start or not isinstance(end, int) or end <= start:
            return None
        return self._builder.call(aten.slice.Tensor, (value.nodes[-1], dim, start - begin, end - begin), node)

    def _pushed(self, node: fx.Node, dim: int, begin: Size, end: Size) -> fx.Node:
        """A slice of a mask or of what it is made of, pushed down as far as its operators are known."""
        sizes = _sizes(node)
        if begin == 0 and end == sizes[dim]:
            return node
        key = (node, Mark(dim), begin, end)
        if key not in self._known:
            rule = _PUSHED.get(node.target) if node.op == "call_function" else None
            if rule is None and node.target in POINTWISE:
                rule = Slices._through_pointwise
            made = None if rule is None else rule(self, node, dim, begin, end)
            self._known[key] = made or self._builder.sliced(node, Mark(dim), begin, end, sizes[dim])
        return self._known[key]

    def _through_pointwise(self, node: fx.Node, dim: int, begin: Size, end: Size) -> fx.Node:
        def pushed(each: object) -> object:
            value = tensor_of(each) if isinstance(each, fx.Node) else None
            if not isinstance(each, fx.Node) or value is None:
                return each
            own = dim - (len(_sizes(node)) - value.ndim)
            return each if own < 0 or _sizes(each)[own] == 1 else self._pushed(each, own, begin, end)

        args = tuple(pushed(each) for each in node.args)
        return self._builder.call(node.target, args, node, node.kwargs)  # type: ignore[arg-type]

    def _through_expand(self, node: fx.Node, dim: int, begin: Size, end: Size) -> fx.Node | None:
        source, shape = node.args[:2]
        assert isinstance(source, fx.Node)
        own = dim - (len(_sizes(node)) - len(_sizes(source)))
        if own >= 0 and _sizes(source)[own] != 1:
            source = self._pushed(source, own, begin, end)
        sizes = self._builder.shape_argument(shape, dim, simplified(end - begin))
        return self._builder.call(aten.expand.default, (source, sizes), node)

    def _through_unsqueeze(self, node: fx.Node, dim: int, begin: Size, end: Size) -> fx.Node | None:
        source, added = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(added, int)
        at = added % len(_sizes(node))
        if dim == at:
            return None
        inner = self._pushed(source, dim - (dim > at), begin, end)
        return self._builder.call(aten.unsqueeze.default, (inner, added), node)

    def _through_view(self, node: fx.Node, dim: int, begin: Size, end: Size) -> fx.Node | None:
        source, shape = node.args[:2]
        assert isinstance(source, fx.Node)
        inner = viewed(_sizes(node), _sizes(source), Mark(dim), _sizes(node)[dim])
        if inner is None or not inner.is_plain:
            return None
        part = self._pushed(source, inner.dim, begin, end)
        sizes = self._builder.shape_argument(shape, dim, simplified(end - begin))
        return self._builder.call(node.target, (part, sizes), node)  # type: ignore[arg-type]

    def _through_iota(self, node: fx.Node, dim: int, begin: Size, end: Size) -> fx.Node | None:
        start, step = node.kwargs["start"], node.kwargs["step"]
        if not isinstance(start, int) or not isinstance(step, int):
            return None
        named = {**node.kwargs, "start": self._builder.size(simplified(start + step * begin))}
        length = self._builder.size(simplified(end - begin))
        return self._builder.call(prims.iota.default, (length,), node, named)

    def _through_full(self, node: fx.Node, dim: int, begin: Size, end: Size) -> fx.Node | None:
        sizes = self._builder.shape_argument(node.args[0], dim, simplified(end - begin))
        return self._builder.call(aten.full.default, (sizes, *node.args[1:]), node, node.kwargs)

    def _through_index(self, node: fx.Node, dim: int, begin: Size, end: Size) -> fx.Node | None:
        """Indices that vary along the dimension are sliced; what they read stays whole."""
        source, indices = node.args[:2]
        assert isinstance(indices, list | tuple)
        given = [each for each in indices if isinstance(each, fx.Node)]
        ndim = max(len(_sizes(each)) for each in given)
        if len(given) != len(indices) or dim >= ndim or any(_dtype(each) is torch.bool for each in given):
            return None
        parts = []
        for each in given:
            own = dim - (ndim - len(_sizes(each)))
            varies = own >= 0 and _sizes(each)[own] != 1
            parts.append(self._pushed(each, own, begin, end) if varies else each)
        return self._builder.call(aten.index.Tensor, (source, parts), node)

    def _through_padding(self, node: fx.Node, dim: int, begin: Size, end: Size) -> fx.Node | None:
        """Rows that are padded to an aligned length, `slice(constant_pad_nd(x, [0, n]), -1, 0, size of x)`."""
        padded, last = node.args[0], len(_sizes(node)) - 1
        assert isinstance(padded, fx.Node), node.args
        source = under_padding(node, padded)
        if source is None or node.args[1] not in (-1, last) or len(padded.args[1]) != 2:  # type: ignore[arg-type]
            return None
        inner = self._pushed(source, dim, begin, end)
        columns = _sizes(inner)[last]
        if dim != last:
            wide = self._builder.call(aten.constant_pad_nd.default, (inner, *padded.args[1:]), padded)
        elif isinstance(columns, int):
            missing = -columns % ALIGNED
            wide = self._builder.call(aten.constant_pad_nd.default, (inner, [0, missing], *padded.args[2:]), padded)
        else:
            return None
        return self._builder.call(aten.slice.Tensor, (wide, -1, 0, self._builder.size(columns)), node)


Pushed = Callable[[Slices, fx.Node, int, Size, Size], fx.Node | None]
_PUSHED: dict[object, Pushed] = {
    aten.expand.default: Slices._through_expand,
    aten.unsqueeze.default: Slices._through_unsqueeze,
    **dict.fromkeys(VIEWS, Slices._through_view),
    aten.full.default: Slices._through_full,
    prims.iota.default: Slices._through_iota,
    aten.index.Tensor: Slices._through_index,
    aten.slice.Tensor: Slices._through_padding,
}


def _is_mask(node: fx.Node) -> bool:
    """True for booleans, and for a bias that is made from one."""
    value = tensor_of(node)
    if value is None or value.dtype is torch.bool or not value.dtype.is_floating_point:
        return value is not None and value.dtype is torch.bool
    return node.op == "call_function" and isinstance(boolean_form(node), BooleanForm)


def _is_repeated(node: fx.Node, dim: int) -> bool:
    """True for one number throughout, and for one element that is repeated along the dimension."""
    if is_call(node, frozenset({aten.full.default})):
        return True
    source = node.args[0] if is_call(node, frozenset({aten.expand.default})) else None
    own = dim - len(_sizes(node)) + len(_sizes(source)) if isinstance(source, fx.Node) else 0
    return isinstance(source, fx.Node) and (own < 0 or _sizes(source)[own] == 1)


def _sizes(node: fx.Node) -> tuple[Size, ...]:
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    return sizes_of(value)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = tensor_of(node)
    return None if value is None else value.dtype
