"""Builder of the graph that takes a captured graph's place: calls with their fake values, and sizes as arguments."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch.fx.node import Argument
from torch.utils._sympy.functions import FloorDiv

from weaveopt.graph.arrangement import Size, size_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.splice import fake_mode_of
from weaveopt.rewrites.token_split.values import Mark, simplified, sizes_of

aten = torch.ops.aten
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


class Builder:
    """A graph under construction. Nodes are appended; `StageOrder` puts them in their final order."""

    def __init__(self, captured: fx.Graph) -> None:
        self.graph = fx.Graph()
        self.graph._codegen = copy.copy(captured._codegen)
        self._mode = fake_mode_of(captured)
        assert self._mode is not None, "the captured graph has no fake values"
        self._sizes: dict[Size, fx.Node] = {}
        self.made: list[fx.Node] = []
        """Every node in the order in which it was made."""

    def copied(self, node: fx.Node, read: Callable[[fx.Node], Argument]) -> fx.Node:
        """A node as it is, with other operands."""
        made = self.graph.node_copy(node, read)
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._sizes.setdefault(size_of(value), made)
        self.made.append(made)
        return made

    def call(
        self,
        target: Callable[..., object],
        args: Sequence[Argument],
        like: fx.Node,
        named: Mapping[str, Argument] = MappingProxyType({}),
    ) -> fx.Node:
        """`target(*args, **named)` with its fake value; provenance is that of `like`."""
        arguments = tuple(args)
        if target in VIEWS:
            arguments = (self._viewable(arguments[0], arguments[1], like), *arguments[1:])
        node = self.graph.call_function(target, arguments, dict(named))
        node.meta.update({key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta")})
        assert self._mode is not None
        with self._mode:
            node.meta["val"] = target(*_values(arguments), **_named(named))
        self.made.append(node)
        return node

    def _viewable(self, source: Argument, shape: Argument, like: fx.Node) -> Argument:
        """A value whose strides allow the view: a slice of the second dimension has to be copied first."""
        assert isinstance(source, fx.Node) and self._mode is not None
        with self._mode:
            try:
                aten.view.default(source.meta["val"], _values([shape])[0])
                return source
            except (RuntimeError, ValueError):
                pass
        return self.call(aten.clone.default, (source,), like, {"memory_format": torch.contiguous_format})

    def size(self, size: Size) -> int | fx.Node:
        """A size as an argument: a number, or a node that computes it from sizes that the graph has."""
        size = simplified(size)
        if isinstance(size, int):
            return size
        if size not in self._sizes:
            self._sizes[size] = self._computed(size)
        return self._sizes[size]

    def _computed(self, size: sympy.Expr) -> fx.Node:
        if size.is_Symbol:
            return self._symbol(size)
        joins = {sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv}
        join = joins.get(size.func)
        assert join is not None, f"a size of this form is computed nowhere: {size}"
        parts = [self.size(each) for each in size.args]
        total = parts[0]
        for part in parts[1:]:
            args = (total, part)
            total = self.graph.call_function(join, args)
            total.meta["val"] = join(*_values(args))
            self.made.append(total)
        assert isinstance(total, fx.Node), size
        return total

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        """The first input that has the symbol as a dimension."""
        for node in self.graph.find_nodes(op="placeholder"):
            value = tensor_of(node)
            for dim, each in enumerate(() if value is None else sizes_of(value)):
                if each == symbol:
                    return self.call(aten.sym_size.int, (node, dim), node)
        raise AssertionError(f"no input of the graph has the size {symbol}")

    def shape_argument(self, shape: Argument, dim: int, size: Size) -> list[Argument]:
        """The shape argument of a view or an expansion with another size of one dimension; `-1` stays."""
        assert isinstance(shape, list | tuple), shape
        sizes: list[Argument] = list(shape)
        if sizes[dim] != -1:
            sizes[dim] = self.size(size)
        return sizes

    def sliced(self, node: fx.Node, mark: Mark, begin: Size, end: Size, length: Size) -> fx.Node:
        """Elements `begin` to `end` of the axis of `length` elements at `mark`."""
        value = tensor_of(node)
        assert value is not None, f"{node.name} makes no tensor"
        if mark.before == 1:
            first, last = (simplified(each * mark.after) for each in (begin, end))
            if first == 0 and last == sizes_of(value)[mark.dim]:
                return node
            return self.call(aten.slice.Tensor, (node, mark.dim, self.size(first), self.size(last)), node)
        shape = [self.size(size) for size in sizes_of(value)]
        before = self.size(mark.before)
        inner = [*shape[: mark.dim], before, self.size(simplified(length * mark.after)), *shape[mark.dim + 1 :]]
        wide = self.call(aten.view.default, (node, inner), node)
        part = self.sliced(wide, Mark(mark.dim + 1, after=mark.after), begin, end, length)
        outer = [*shape[: mark.dim], self.size(mark.size(simplified(end - begin))), *shape[mark.dim + 1 :]]
        return self.call(aten.view.default, (part, outer), node)

    def joined(self, nodes: Sequence[fx.Node], mark: Mark, lengths: Sequence[Size], like: fx.Node) -> fx.Node:
        """The parts of a value as one, with the strides of `like` where its layout is dense."""
        if len(nodes) == 1:
            return nodes[0]
        if mark.before != 1:
            wide = []
            for node, length in zip(nodes, lengths, strict=True):
                shape = [self.size(size) for size in sizes_of(node.meta["val"])]
                inner = [*shape[: mark.dim], self.size(mark.before), self.size(simplified(length * mark.after))]
                wide.append(self.call(aten.view.default, (node, [*inner, *shape[mark.dim + 1 :]]), like))
            whole = self.call(aten.cat.default, (wide, mark.dim + 1), like)
            shape = [self.size(size) for size in sizes_of(nodes[0].meta["val"])]
            shape[mark.dim] = self.size(mark.size(simplified(sum(lengths, start=0))))
            return self.call(aten.view.default, (whole, shape), like)
        wanted = tensor_of(like)
        order = list(range(nodes[0].meta["val"].ndim)) if wanted is None else _dense_order(wanted)
        if order == sorted(order):
            return self.call(aten.cat.default, (list(nodes), mark.dim), like)
        turned = [self.call(aten.permute.default, (node, order), like) for node in nodes]
        whole = self.call(aten.cat.default, (turned, order.index(mark.dim)), like)
        return self.call(aten.permute.default, (whole, [order.index(dim) for dim in range(len(order))]), like)


def _dense_order(value: torch.Tensor) -> list[int]:
    """Dimensions from the slowest to the fastest of a dense value in another order; as they are for any other."""
    dims = list(range(value.ndim))
    if not all(isinstance(each, int) for each in (*value.shape, *value.stride())):
        hints = [each if isinstance(each, int) else int(each.node.hint or 1) for each in value.stride()]
    else:
        hints = [int(each) for each in value.stride()]
    order = sorted(dims, key=lambda dim: (-hints[dim], dim))
    sizes = [each if isinstance(each, int) else int(each.node.hint or 1) for each in value.shape]
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and hints[dim] != expected:
            return dims
        expected *= sizes[dim]
    ones = [dim for dim in dims if sizes[dim] == 1]
    return dims if all(dim in ones or order.index(dim) == dim for dim in dims) else order


def _values(arguments: Sequence[Argument]) -> list[object]:
    return [_value(argument) for argument in arguments]


def _named(arguments: Mapping[str, Argument]) -> dict[str, object]:
    return {name: _value(argument) for name, argument in arguments.items()}


def _value(argument: Argument) -> object:
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    if isinstance(argument, list | tuple):
        return [_value(part) for part in argument]
    return argument
