"""Sizes of values as arguments of views: numbers, or nodes of the graph that hold the symbols."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.fx.node import Argument

from weaveopt.graph.arrangement import Size, size_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.splice import call_after, current

_SYM_SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True)
class SizeAt:
    """Location of a size in the graph: a node that is the size, or a dimension of a node's value."""

    node: fx.Node
    dim: int | None = None


def find_size(size: Size | torch.SymInt, sources: Iterable[fx.Node]) -> int | SizeAt | None:
    """Find `size` in `sources` or the inputs of their graph; None if a symbol is in none of them."""
    wanted = size_of(size) if isinstance(size, int | torch.SymInt) else size
    if isinstance(wanted, int):
        return wanted
    for node in sources:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == wanted:
            return SizeAt(node)
        shape: list[int | torch.SymInt] = list(value.shape) if isinstance(value, torch.Tensor) else []
        for dim, each in enumerate(shape):
            if isinstance(each, torch.SymInt) and each.node.expr == wanted:
                return SizeAt(node, dim)
    return None


def argument_of(graph: fx.Graph, found: int | SizeAt) -> Argument:
    """Return the argument for a call: the number, or a node that computes the size."""
    if isinstance(found, int):
        return found
    node = current(found.node)
    assert isinstance(node, fx.Node)
    return node if found.dim is None else call_after(graph, node, _SYM_SIZE, (node, found.dim), like=node)


def find_shape(node: fx.Node, sources: Sequence[fx.Node]) -> tuple[int | SizeAt, ...] | None:
    """The sizes of what `node` makes; None where one is not to be found."""
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    found = tuple(find_size(size, sources) for size in value.shape)
    return None if None in found else tuple(each for each in found if each is not None)


def viewed_as(graph: fx.Graph, x: fx.Node, shape: Sequence[int | SizeAt], like: fx.Node) -> fx.Node:
    """`x` in the shape of `like`, which `find_shape` found; `x` itself where it has that."""
    value, wanted = tensor_of(x), tensor_of(like)
    assert value is not None and wanted is not None, f"{x.name} or {like.name} makes no tensor"
    if [*map(str, value.shape)] == [*map(str, wanted.shape)]:
        return x
    sizes = [argument_of(graph, each) for each in shape]
    position = max([x, *(each for each in sizes if isinstance(each, fx.Node))])
    return call_after(graph, position, torch.ops.aten.view.default, (x, sizes), like=like)


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))
