"""Operators that compute: the place of an axis in their results, and whether its elements stay independent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Size
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.values import argument
from weaveopt.rewrites.token_split.shapes import NOWHERE, SHAPES, Follow, Moved, Place, _along, _operand, _result
from weaveopt.rewrites.token_split.values import Mark
from weaveopt.sites.shared.masks.evaluate import POINTWISE

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "any", "all", "max", "min", "argmax", "argmin", "logsumexp", "prod", "var",
     "var_mean", "std", "std_mean"}
)  # fmt: skip
ALONG = frozenset(
    {"_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "gather", "scatter", "scatter_add",
     "scatter_reduce"}
)  # fmt: skip
LIKE = frozenset({"zeros_like", "ones_like", "full_like", "empty_like"})
ALSO_POINTWISE = frozenset({aten.copy.default, aten.where.self, aten.bitwise_not.default})
STARTS = frozenset({c10d.all_reduce.default})
WAIT = frozenset({c10d.wait_tensor.default})


def follow(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    """Follow the axis of one operand to the result; nowhere for an operator that is in no table."""
    known = _table(node)
    return NOWHERE if known is None else known(node, place, mark, length)


def _table(node: fx.Node) -> Follow | None:
    if node.op != "call_function":
        return None
    if node.target in SHAPES:
        return SHAPES[node.target]
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target in _NAMED:
        return _NAMED[target]
    name = target._schema.name.partition("::")[2]
    if name.startswith("_scaled_dot_product_") and "backward" not in name:
        return None if argument(node, "dropout_p") else _attention
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if target.namespace not in ("aten", "prims"):
        return _GROUPED.get(name)
    if torch.Tag.pointwise in target.tags or target in POINTWISE | ALSO_POINTWISE or name in LIKE:
        return _pointwise
    if name in REDUCTIONS:
        return _reduction
    if name in ALONG:
        return _along
    return _GROUPED.get(name)


def _pointwise(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    return Moved(mark.at(mark.dim + _result(node).ndim - _operand(node, place).ndim))


def _reduction(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    dims, ndim = argument(node, "dim"), _operand(node).ndim
    if dims is None or dims == []:
        return NOWHERE
    listed = dims if isinstance(dims, list | tuple) else [dims]
    gone = {dim % ndim for dim in listed if isinstance(dim, int)}
    if mark.dim in gone:
        return NOWHERE
    return Moved(mark if argument(node, "keepdim") else mark.at(mark.dim - sum(dim < mark.dim for dim in gone)))


def _product(rows: tuple[int | None, ...], columns: tuple[int | None, ...], first: int = 0) -> Follow:
    """A GEMM: dimension of the result for each dimension of the two operands, None for the one that is summed."""

    def moved(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
        if place[0] < first:  # a bias, broadcast to the result
            return _pointwise(node, place, mark, length)
        at = place[0] - first
        if at == 0 or at == 1:
            dim = (rows, columns)[at][mark.dim]
            return NOWHERE if dim is None else Moved(mark.at(dim))
        return _pointwise(node, place, mark, length)  # scales of rows or columns

    return moved


def _grouped(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    """Rows of a GEMM that is grouped by expert keep their place, but other rows decide which weights they get."""
    return Moved(mark, is_local=False) if place == (0,) and mark.dim == 0 else NOWHERE


def _histogram(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    return NOWHERE


def _embedding(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    if place[0] == 1:
        return Moved(mark)
    return NOWHERE if mark.dim == 0 else Moved(mark.at(_result(node).ndim - 1))


def _index(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    """Indices for leading dimensions: theirs come first in the result, and then what they leave of the source's."""
    indices = node.args[1]
    assert isinstance(indices, list | tuple), indices
    leading = [tensor_of(each) for each in indices if isinstance(each, fx.Node)]
    if len(leading) != len(indices) or any(each is None or each.dtype is torch.bool for each in leading):
        return NOWHERE
    ndim = max(each.ndim for each in leading if each is not None)
    if place[0] == 1:
        return Moved(mark.at(mark.dim + ndim - _operand(node, place).ndim))
    return NOWHERE if mark.dim < len(indices) else Moved(mark.at(mark.dim - len(indices) + ndim))


def _index_put(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    """A mask over leading dimensions and one number, or one vector of positions in one dimension."""
    indices, values = node.args[1:3]
    assert isinstance(indices, list | tuple) and isinstance(values, fx.Node), node.args
    value, given = tensor_of(values), [(at, each) for at, each in enumerate(indices) if isinstance(each, fx.Node)]
    index = tensor_of(given[0][1]) if len(given) == 1 else None
    if value is None or index is None:
        return NOWHERE
    position = given[0][0]
    if index.dtype is torch.bool:
        return Moved(mark) if position == 0 and value.ndim == 0 and mark.dim < index.ndim else NOWHERE
    if index.ndim != 1 or place[0] == 1:
        return NOWHERE
    placed = mark.at(mark.dim + _result(node).ndim - value.ndim) if place[0] == 2 else mark
    return Moved(placed, placed.dim != position)


def _attention(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    """The library's attention `[batch, heads, rows, head_dim]`: batch and heads throughout, rows of the queries."""
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    name = names[place[0]] if place[0] < len(names) else ""
    if name == "query":
        return Moved(mark, mark.dim < 3 and not (mark.dim == 2 and argument(node, "is_causal")))
    if name in ("key", "value"):
        return Moved(mark) if mark.dim < 2 else NOWHERE
    if name in ("attn_mask", "attn_bias"):
        placed = mark.dim + 4 - _operand_at(node, place).ndim
        return Moved(mark.at(placed)) if placed < 3 else NOWHERE
    return NOWHERE


def _operand_at(node: fx.Node, place: Place) -> torch.Tensor:
    found = dict(operands(node))[place]
    value = tensor_of(found)
    assert value is not None, f"operand {place} of {node.name} is no tensor"
    return value


def _gather(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    """An all-gather along the first dimension: the ranks are a factor before what is cut there."""
    if mark.dim != 0:
        return Moved(mark)
    world = node.args[1]
    return Moved(replace(mark, before=mark.before * world)) if isinstance(world, int) else NOWHERE


def _reduce_scatter(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    return Moved(mark, mark.dim != 0)


def _each(node: fx.Node, place: Place, mark: Mark, length: Size) -> Moved:
    return Moved(mark)


_NAMED: dict[object, Follow] = {
    aten.mm.default: _product((0, None), (None, 1)),
    aten.addmm.default: _product((0, None), (None, 1), first=1),
    aten.bmm.default: _product((0, 1, None), (0, None, 2)),
    aten.baddbmm.default: _product((0, 1, None), (0, None, 2), first=1),
    aten._scaled_mm.default: _product((0, None), (None, 1)),
    aten._int_mm.default: _product((0, None), (None, 1)),
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.histc.default: _histogram,
    c10d.all_reduce.default: _each,
    c10d.wait_tensor.default: _each,
    c10d.all_gather_into_tensor.default: _gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
}
_GROUPED: dict[str, Follow] = {"_grouped_mm": _grouped, "grouped_mm_fallback": _grouped}


def operands(node: fx.Node) -> Iterator[tuple[Place, fx.Node]]:
    """The nodes that a call reads, and where: keyword arguments by their place in the schema."""
    for at, each in enumerate(node.args):
        yield from _nodes(at, each)
    if node.kwargs and isinstance(node.target, torch._ops.OpOverload):
        names = [each.name for each in node.target._schema.arguments]
        for name, each in node.kwargs.items():
            yield from _nodes(names.index(name), each)


def _nodes(at: int, value: object) -> Iterator[tuple[Place, fx.Node]]:
    if isinstance(value, fx.Node):
        yield (at,), value
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            if isinstance(each, fx.Node):
                yield (at, index), each


Replace = Callable[[Place, fx.Node], object]


def rebuilt(node: fx.Node, new: Replace) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and keyword arguments of a call with other operands."""
    args = tuple(_rebuilt(at, each, new) for at, each in enumerate(node.args))
    if not node.kwargs:
        return args, {}
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    return args, {name: _rebuilt(names.index(name), each, new) for name, each in node.kwargs.items()}


def _rebuilt(at: int, value: object, new: Replace) -> object:
    if isinstance(value, fx.Node):
        return new((at,), value)
    if isinstance(value, list | tuple):
        return [new((at, index), each) if isinstance(each, fx.Node) else each for index, each in enumerate(value)]
    return value
