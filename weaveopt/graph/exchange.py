"""Calls of `weave::expert_exchange` in a graph, by their text: mixtures whose tokens travel to their experts."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import tensor_of

_NAME = "weave::expert_exchange"


@dataclass(frozen=True)
class Exchange:
    """What the text of a call says that others than the operator ask for."""

    group: str
    fabric: str
    world: int
    hidden: int
    dtype: str
    num_experts: int
    """Of a rank."""
    activation: str
    gated: bool
    same_tokens: bool
    """Whether all ranks have equally many tokens, and so the same graph."""


def exchange_of(node: fx.Node) -> Exchange | None:
    """None for every other node."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target._schema.name != _NAME:
        return None
    text = node.args[-1]
    assert isinstance(text, str), f"{node.name}: {text}"
    record = json.loads(text)
    return Exchange(**{name: record[name] for name in Exchange.__dataclass_fields__})


def sizes_of(node: fx.Node) -> tuple[int, int, int, int]:
    """Tokens of a rank (the count in this call, where it is a symbol), choices, N of the gates, and intermediate."""
    shapes = []
    for at in (1, 3, 5):
        argument = node.args[at]
        value = tensor_of(argument) if isinstance(argument, fx.Node) else None
        assert value is not None, f"{node.name}: {argument} is no tensor"
        shapes.append([size if isinstance(size, int) else int(size.node.hint or 1) for size in value.shape])
    (tokens, choices), (_, gates, _), (_, _, inner) = shapes
    return tokens, choices, gates, inner
