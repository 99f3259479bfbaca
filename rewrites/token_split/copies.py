"""Copies of nodes for a part of one or two axes: operands, shape arguments and slices of what stays whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Size, quotient
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.values import argument
from weaveopt.rewrites.token_split.builder import VIEWS, Builder
from weaveopt.rewrites.token_split.local import follow, operands, rebuilt
from weaveopt.rewrites.token_split.shapes import Place
from weaveopt.rewrites.token_split.slices import Slices
from weaveopt.rewrites.token_split.values import Mark, simplified, sizes_of

aten = torch.ops.aten
CREATED = frozenset({aten.full.default, aten.empty.memory_format, torch.ops.prims.iota.default})


class NotCopied(Exception):
    """A node that cannot be computed for a part alone."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(f"{node.name} = {node.target}: {why}")
        self.node = node


@dataclass(frozen=True)
class AxisRange:
    """Elements `begin` to `end` of an axis of `length` elements: what a copy has of it."""

    length: Size
    begin: Size
    end: Size

    @property
    def size(self) -> Size:
        return simplified(self.end - self.begin)


@dataclass(frozen=True)
class Copied:
    """A node of the new graph, and where it has the axes, by name; without marks it is whole."""

    node: fx.Node
    marks: Mapping[str, Mark] = field(default_factory=dict)


Read = Callable[[fx.Node], Copied]


@dataclass(frozen=True)
class Copier:
    """Copies nodes for one part."""

    builder: Builder
    slices: Slices
    spans: Mapping[str, AxisRange]
    """The part of each axis, by the axis's name."""
    multiples: Mapping[str, tuple[Size, ...]] = field(default_factory=dict)
    """Factors of an axis's length that sizes of made-up values have: `full([tokens * choices], 0)`."""

    def copy(self, node: fx.Node, read: Read) -> Copied:
        """The node for this part. Raises `NotCopied` where its sizes do not follow from those of its operands."""
        given = {place: read(each) for place, each in operands(node)}
        if node.target in CREATED:
            return self._created(node)
        marks = {name: mark for name in self.spans if (mark := self._mark(node, given, name)) is not None}
        dims = [mark.dim for mark in marks.values()]
        if len(set(dims)) != len(dims):
            raise NotCopied(node, "two axes share a dimension")

        def new(place: Place, each: fx.Node) -> fx.Node:
            return self._fitting(node, place, each, given[place], marks)

        args, named = rebuilt(node, new)
        args = self._resized(node, args, marks)
        if not marks and not any(each.marks for each in given.values()):
            return Copied(self.builder.copied(node, lambda each: read(each).node))
        made = self.builder.call(node.target, args, node, named)  # type: ignore[arg-type]
        copied = Copied(made, {name: self._settled(node, mark) for name, mark in marks.items()})
        self._check(node, copied)
        return copied

    def _mark(self, node: fx.Node, given: Mapping[Place, Copied], name: str) -> Mark | None:
        """Place of an axis in the result, on which all operands have to agree."""
        length, found = self.spans[name].length, None
        for place, each in given.items():
            if name not in each.marks:
                continue
            mark = follow(node, place, each.marks[name], length).mark
            if mark is None and node.target in VIEWS:
                raise NotCopied(node, "the axis is in no single dimension")
            if mark is not None and found is not None and (mark.dim, mark.before, mark.after) != found:
                raise NotCopied(node, "operands have the axis in different places")
            if mark is not None and found is None:
                found, first = (mark.dim, mark.before, mark.after), mark
        if found is None:
            return None
        if is_call(node, frozenset({aten.cat.default})):
            return replace(first, extra=simplified(first.extra + self._appended(node, given, name, first)))
        return first

    def _appended(self, node: fx.Node, given: Mapping[Place, Copied], name: str, mark: Mark) -> Size:
        """Elements that a concatenation appends to the axis."""
        dim = argument(node, "dim")
        if not isinstance(dim, int) or dim % _ndim(node) != mark.dim:
            return 0
        plain = [place for place, each in given.items() if name not in each.marks]
        if not mark.is_plain or len(plain) != len(given) - 1 or (0, 0) in plain:
            raise NotCopied(node, "the axis is concatenated with itself, or with something before it")
        return sum((sizes_of(given[place].node.meta["val"])[mark.dim] for place in plain), start=0)

    def _fitting(
        self, node: fx.Node, place: Place, each: fx.Node, copied: Copied, marks: Mapping[str, Mark]
    ) -> fx.Node:
        """An operand as this copy reads it: what is whole is sliced where its dimensions are those of the axes."""
        made = copied.node
        value = tensor_of(each)
        if value is None or node.target in VIEWS:
            return made
        for name, mark in marks.items():
            span = self.spans[name]
            if name in copied.marks:
                continue
            for dim, size in enumerate(sizes_of(value)):
                own = replace(mark, dim=dim, extra=0)
                target = follow(node, place, own, span.length).mark
                if target is None or target.dim != mark.dim or size == 1:
                    continue
                if is_call(node, frozenset({aten.cat.default})) and target.dim == _concatenated(node):
                    continue
                if size != own.size(span.length):
                    raise NotCopied(node, f"{each.name} has {size} elements along the axis")
                made = self.slices.of(made, own, span.begin, span.end, span.length)
        return made

    def _resized(self, node: fx.Node, args: tuple[object, ...], marks: Mapping[str, Mark]) -> tuple[object, ...]:
        """Arguments with the sizes of this part."""
        changed = list(args)
        for name, mark in marks.items():
            size = mark.size(self.spans[name].size)
            if node.target in VIEWS or node.target is aten.expand.default:
                changed[1] = self.builder.shape_argument(changed[1], mark.dim, size)  # type: ignore[arg-type]
            elif node.target is aten.split.Tensor and _dim_of(node) == mark.dim:
                changed[1] = self.builder.size(size)
            elif node.target is aten.slice.Tensor and _dim_of(node) == mark.dim:
                changed[3] = self.builder.size(self._kept(node, mark, name))
        return tuple(changed)

    def _kept(self, node: fx.Node, mark: Mark, name: str) -> Size:
        """End of a slice that keeps the axis and drops what was appended to it."""
        start, end = argument(node, "start"), argument(node, "end")
        ends = (self.spans[name].length, -mark.extra) if mark.extra != 0 else (self.spans[name].length,)
        if start not in (0, None) or end not in ends or mark.before != 1 or mark.after != 1:
            raise NotCopied(node, "it takes a part of the axis")
        return self.spans[name].size

    def _settled(self, node: fx.Node, mark: Mark) -> Mark:
        is_cut = node.target is aten.slice.Tensor and _dim_of(node) == mark.dim
        return replace(mark, extra=0) if is_cut else mark

    def _created(self, node: fx.Node) -> Copied:
        """A value that is made from sizes alone, with those that are multiples of an axis's length."""
        value = tensor_of(node)
        assert value is not None, f"{node.name} makes no tensor"
        args, marks = list(node.args), {}
        for name, factors in self.multiples.items():
            span = self.spans[name]
            for dim, size in enumerate(sizes_of(value)):
                inner = quotient(size, span.length)
                if inner is None or inner not in factors or size == 1:
                    continue
                marks[name] = Mark(dim, after=inner)
                new = marks[name].size(span.size)
                if node.target is torch.ops.prims.iota.default:
                    args[0] = self.builder.size(new)
                else:
                    args[0] = self.builder.shape_argument(args[0], dim, new)
                break
        if not marks:
            return Copied(self.builder.copied(node, lambda each: each))
        return Copied(self.builder.call(node.target, args, node, node.kwargs), marks)  # type: ignore[arg-type]

    def _check(self, node: fx.Node, copied: Copied) -> None:
        """Raise `NotCopied` where the fake value has another shape than the marks say."""
        before, after = tensor_of(node), tensor_of(copied.node)
        if before is None or after is None:
            return
        expected = list(sizes_of(before))
        for name, mark in copied.marks.items():
            expected[mark.dim] = mark.size(self.spans[name].size)
        found = sizes_of(after)
        if len(found) != len(expected) or any(_hint(a) != _hint(b) for a, b in zip(found, expected, strict=True)):
            raise NotCopied(node, f"its part has the shape {found} in place of {tuple(expected)}")


def _hint(size: Size) -> Size:
    return size if isinstance(size, int) else -1


def _ndim(node: fx.Node) -> int:
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    return value.ndim


def _dim_of(node: fx.Node) -> int:
    """The dimension along which a slice or split cuts its operand."""
    dim, source = argument(node, "dim"), node.args[0]
    assert isinstance(dim, int) and isinstance(source, fx.Node), node.args
    return dim % _ndim(source)


def _concatenated(node: fx.Node) -> int:
    dim = argument(node, "dim")
    assert isinstance(dim, int), node.args
    return dim % _ndim(node)
