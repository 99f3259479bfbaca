"""Calls of `weave::expert_exchange` in a graph, by their text: mixtures whose tokens travel to their experts."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.cost_model.exchange import ShardedMixture
from weaveopt.cost_model.mixture import Mixture
from weaveopt.graph.pattern import tensor_of

_NAME = "weave::expert_exchange"


@dataclass(frozen=True)
class Exchange:
    """Facts in a call's text that code other than the operator reads."""

    group: str
    fabric: str
    world: int
    hidden: int
    dtype: str
    num_experts: int
    """Experts of one rank."""
    activation: str
    gated: bool
    same_tokens: bool
    """True if all ranks have the same number of tokens, and so the same graph."""
    independent: bool
    """True if ranks promise no common calls."""


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


def sharded_of(node: fx.Node, exchange: Exchange) -> ShardedMixture:
    """Read the mixture that the call computes; a symbolic token count is replaced by its hint."""
    shapes = []
    for at in (1, 3, 5):
        argument = node.args[at]
        value = tensor_of(argument) if isinstance(argument, fx.Node) else None
        assert value is not None, f"{node.name}: {argument} is no tensor"
        shapes.append([size if isinstance(size, int) else int(size.node.hint or 1) for size in value.shape])
    (tokens, choices), _, (_, _, width) = shapes
    of_rank = Mixture(
        tokens=tokens,
        choices=choices,
        experts=exchange.num_experts,
        hidden=exchange.hidden,
        width=width,
        gated=exchange.gated,
        dtype=exchange.dtype,
    )
    return ShardedMixture(of_rank, exchange.world)
