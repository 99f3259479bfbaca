"""The token axes of a graph: the inputs that have one token in each place, and where."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Size
from weaveopt.graph.pattern import CAST, is_call, tensor_of
from weaveopt.rewrites.token_split.local import STARTS
from weaveopt.rewrites.token_split.values import Mark, sizes_of

aten = torch.ops.aten
_REPLACED = CAST | {
    aten.sub.Tensor, aten.index_put.default, aten.where.self, aten.masked_fill.Scalar, aten.clamp.default,
}  # fmt: skip
"""Operators that replace ids element by element."""
BATCH, SEQUENCE = "batch", "sequence"


@dataclass(frozen=True)
class TokenAxis:
    """An axis of the tokens `[batch, sequence]`."""

    name: str
    length: Size
    hint: int
    """The length in this call."""
    seeds: tuple[tuple[fx.Node, Mark], ...]
    """Inputs of the graph with the axis, and its place in each."""


def token_axes(graph: fx.Graph) -> tuple[TokenAxis, ...]:
    """The axes of the tokens that the graph exchanges, sequence first; none where no input has them.

    Tokens are what an all-reduce has in its first two of three dimensions. They come in as ids, which an embedding
    looks up, or as embeddings.
    """
    sums = [tensor_of(node) for node in graph.nodes if is_call(node, STARTS)]
    first = next((value for value in sums if value is not None and value.ndim == 3), None)
    if first is None:
        return ()
    wanted = sizes_of(first)
    looked_up = {_source(node.args[1]) for node in graph.nodes if is_call(node, frozenset({aten.embedding.default}))}
    inputs = [
        node
        for node in graph.find_nodes(op="placeholder")
        if (value := tensor_of(node)) is not None
        and sizes_of(value)[:2] == wanted[:2]
        and (node in looked_up or (value.ndim == 3 and sizes_of(value) == wanted))
    ]
    axes = []
    for dim, name in ((1, SEQUENCE), (0, BATCH)):
        if inputs:
            size = first.shape[dim]
            hint = size if isinstance(size, int) else int(size.node.hint or 1)
            axes.append(TokenAxis(name, wanted[dim], hint, tuple((node, Mark(dim)) for node in inputs)))
    return tuple(axes)


def _source(node: object) -> object:
    """The input under what a masked embedding does to ids: differences and replacements, element by element."""
    while isinstance(node, fx.Node) and is_call(node, _REPLACED):
        node = node.args[1] if node.target is aten.where.self and not _is_ids(node.args[1]) else node.args[0]
        if isinstance(node, fx.Node) and not _is_ids(node):
            break
    return node


def _is_ids(node: object) -> bool:
    value = tensor_of(node) if isinstance(node, fx.Node) else None
    return value is not None and value.ndim >= 2 and not value.dtype.is_floating_point and value.dtype is not torch.bool
