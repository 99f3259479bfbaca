"""Evaluator of nodes that depend on no graph input: small ones whole, large ones in blocks, by torch's ops on CPU.

A block is a range of indices in every dimension of a node. What the node reads is then asked for exactly the ranges
that this block needs, so a mask of `queries × keys` is never in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.fx as fx

from weaveopt.graph.pattern import Argument, tensor_of

aten = torch.ops.aten
prims = torch.ops.prims

WHOLE_ELEMENTS = 1 << 20
"""Nodes up to this size are evaluated whole and kept: 8 MiB of int64."""

Ranges = tuple[tuple[int, int], ...]
"""`(start, stop)` for each dimension."""

POINTWISE = frozenset(
    {
        *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")),
        *(getattr(aten, name).Scalar for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")),
        *(getattr(aten, f"bitwise_{name}").Tensor for name in ("and", "or", "xor")),
        *(getattr(aten, f"logical_{name}").default for name in ("and", "or", "xor", "not")),
        *(getattr(aten, name).default for name in ("bitwise_not", "neg", "abs", "floor", "floor_divide", "alias")),
        *(getattr(aten, name).default for name in ("minimum", "maximum", "clamp", "clone", "detach")),
        *(getattr(aten, name).Tensor for name in ("remainder", "fmod", "div")),
        *(getattr(aten, name).Scalar for name in ("remainder", "fmod", "div", "floor_divide")),
        aten.rsub.Scalar,
        aten.div.Tensor_mode,
        aten.div.Scalar_mode,
        aten.where.self,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.where.Scalar,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten._to_copy.default,
        aten.lift_fresh_copy.default,
        prims.convert_element_type.default,
        prims.device_put.default,
    }
)
"""Ops whose element at an index depends on their tensor arguments' elements at that index only, by broadcasting."""
ONES_ONLY = frozenset(
    {
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
    }
)
"""Ops that may add and drop dimensions of size 1; a view that does more is not read block by block."""
SHAPES_ONLY = frozenset({aten.full_like.default, aten.zeros_like.default, aten.ones_like.default})


class Unreadable(Exception):
    """A node that cannot be evaluated; `node` says which."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"{node.name} = {node.target}")
        self.node = node


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The static shape of a node; raises `Unreadable` for a symbolic one, and for what makes no tensor."""
    value = tensor_of(node)
    if value is None or not all(isinstance(size, int) for size in value.shape):
        raise Unreadable(node)
    return tuple(value.shape)


def known_constant(node: fx.Node) -> torch.Tensor | None:
    """The tensor that a `get_attr` node stands for, where it is there and real."""
    if node.op != "get_attr":
        return None
    found: object = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    value = found if isinstance(found, torch.Tensor) else None
    if value is None or isinstance(value, torch._subclasses.FakeTensor):
        value = getattr(value if value is not None else tensor_of(node), "constant", None)
    return value if isinstance(value, torch.Tensor) and not value.is_meta else None


class Values:
    """Evaluates the nodes of one graph that depend on no input. Small values are cached as long as this object
    exists."""

    def __init__(self) -> None:
        self._whole: dict[fx.Node, torch.Tensor] = {}

    def is_small(self, node: fx.Node) -> bool:
        return math.prod(shape_of(node)) <= WHOLE_ELEMENTS

    def whole(self, node: fx.Node) -> torch.Tensor:
        """The value of a small node, on the CPU."""
        if node not in self._whole:
            if not self.is_small(node):
                raise Unreadable(node)
            self._whole[node] = self._call(node, self.whole)
        return self._whole[node]

    def block(self, node: fx.Node, ranges: Ranges) -> torch.Tensor:
        """Elements of a node within `ranges`, on the CPU."""
        return self._block(node, ranges, {})

    def _block(self, node: fx.Node, ranges: Ranges, seen: dict[tuple[fx.Node, Ranges], torch.Tensor]) -> torch.Tensor:
        key = (node, ranges)
        if key not in seen:
            if self.is_small(node):
                seen[key] = self.whole(node)[tuple(slice(start, stop) for start, stop in ranges)]
            else:
                seen[key] = self._large(node, ranges, lambda source, part: self._block(source, part, seen))
        return seen[key]

    def _large(self, node: fx.Node, ranges: Ranges, read: Callable[[fx.Node, Ranges], torch.Tensor]) -> torch.Tensor:
        sizes = tuple(stop - start for start, stop in ranges)
        target = node.target
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        constant = known_constant(node)
        if constant is not None:
            return constant.detach()[tuple(slice(*part) for part in ranges)].cpu()
        if target in POINTWISE:
            result = self._call(node, lambda argument: read(argument, _broadcast(argument, ranges)))
            return result.expand(sizes)
        if target in SHAPES_ONLY or target is aten.full.default:
            return self._filled(node).expand(sizes)
        if target is prims.iota.default:
            step = node.kwargs["step"]
            assert isinstance(step, int), step
            start = int(node.kwargs["start"]) + step * ranges[0][0]  # type: ignore[arg-type]
            stop = start + step * sizes[0]
            return torch.arange(start, stop, step, dtype=node.kwargs["dtype"], device="cpu")  # type: ignore[arg-type]
        if target is aten.index.Tensor:
            return self._indexed(node, ranges, read)
        if source is None:
            raise Unreadable(node)
        if target is aten.expand.default:
            return read(source, _broadcast(source, ranges)).expand(sizes)
        if target in ONES_ONLY:
            return read(source, _across_ones(node, source, ranges)).reshape(sizes)
        if target is aten.permute.default:
            order = node.args[1]
            assert isinstance(order, list | tuple), order
            dims = [int(dim) % len(ranges) for dim in order]  # type: ignore[arg-type]
            inner = tuple(ranges[dims.index(dim)] for dim in range(len(dims)))
            return read(source, inner).permute(dims)
        if target is aten.slice.Tensor:
            dim, start, step = _slice_of(node, source)
            part = [*ranges]
            part[dim] = (start + step * ranges[dim][0], start + step * (ranges[dim][1] - 1) + 1)
            return read(source, tuple(part))[(slice(None),) * dim + (slice(None, None, step),)]
        raise Unreadable(node)

    def _indexed(self, node: fx.Node, ranges: Ranges, read: Callable[[fx.Node, Ranges], torch.Tensor]) -> torch.Tensor:
        """`index(source, [i, j, ...])` with an index for each leading dimension, so its shape is that of the result."""
        source, indices = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(indices, list | tuple), node.args
        nodes = [index for index in indices if isinstance(index, fx.Node)]
        if len(nodes) != len(indices) or len(nodes) != len(shape_of(source)):
            raise Unreadable(node)
        parts = tuple(read(index, _broadcast(index, ranges)) for index in nodes)
        return self.whole(source)[parts].expand(tuple(stop - start for start, stop in ranges))

    def _filled(self, node: fx.Node) -> torch.Tensor:
        value = tensor_of(node)
        assert value is not None, node.name
        if node.target is aten.zeros_like.default:
            fill: Argument = 0
        else:
            fill = 1 if node.target is aten.ones_like.default else node.args[1]
        return torch.tensor(fill, dtype=value.dtype, device="cpu")

    def _call(self, node: fx.Node, read: Callable[[fx.Node], torch.Tensor]) -> torch.Tensor:
        """Run the node's op on the values of its arguments, on the CPU."""
        constant = known_constant(node)
        if constant is not None:
            return constant.detach().cpu()
        if node.target in SHAPES_ONLY:
            return self._filled(node).expand(shape_of(node))
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not _is_function(target):
            raise Unreadable(node)

        def argument(value: Argument) -> Argument:
            if isinstance(value, fx.Node):
                return read(value)
            if isinstance(value, list | tuple):
                return [argument(item) for item in value]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        arguments = [argument(value) for value in node.args]
        keywords = {name: argument(value) for name, value in node.kwargs.items()}
        if keywords.get("pin_memory"):
            keywords["pin_memory"] = False
        result = target(*arguments, **keywords)
        if not isinstance(result, torch.Tensor):
            raise Unreadable(node)
        return result


def _is_function(target: torch._ops.OpOverload) -> bool:
    """True if an op is pure: its result depends only on its arguments, and it has no other effect."""
    random = torch.Tag.nondeterministic_seeded in target.tags
    empty = target._schema.name.startswith(("aten::empty", "prims::empty"))
    return target.namespace in ("aten", "prims") and not target._schema.is_mutable and not random and not empty


def _broadcast(source: fx.Node, ranges: Ranges) -> Ranges:
    """The part of an argument that a block of the result reads: all of a dimension of size 1, else the same range."""
    shape = shape_of(source)
    return tuple(
        (0, 1) if size == 1 else part for size, part in zip(shape, ranges[len(ranges) - len(shape) :], strict=True)
    )


def _across_ones(node: fx.Node, source: fx.Node, ranges: Ranges) -> Ranges:
    """The same elements in the source of a view that only adds and drops dimensions of size 1."""
    shape, inner = shape_of(node), shape_of(source)
    if [size for size in shape if size != 1] != [size for size in inner if size != 1]:
        raise Unreadable(node)
    kept = iter([part for size, part in zip(shape, ranges, strict=True) if size != 1])
    return tuple((0, 1) if size == 1 else next(kept) for size in inner)


def _slice_of(node: fx.Node, source: fx.Node) -> tuple[int, int, int]:
    """Dimension, first index and step of a slice."""
    arguments = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, _, step = (
        node.kwargs.get(name, arguments[at]) for at, name in enumerate(("dim", "start", "end", "step"))
    )
    assert isinstance(dim, int) and isinstance(step, int) and isinstance(start, int | None), node.args
    shape = shape_of(source)
    dim %= len(shape)
    begin = 0 if start is None else start
    return dim, min(max(begin + shape[dim] if begin < 0 else begin, 0), shape[dim]), step
