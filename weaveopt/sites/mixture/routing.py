"""Routing of a mixture: how experts are chosen (scores, top-k), and which ranks store them.

    chosen = topk(softmax(logits)), or topk(logits) with a softmax of what it chose, or topk(sigmoid(logits) + bias)
    chosen = topk(where(scores of the best groups, scores, -inf))
    local = where(chosen // n != rank, n, chosen % n)        # expert parallel: n experts a rank, n stands for no expert

The router stays in the graph: these facts are for prices and reports.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import ADD, CAST, MUL, SHAPE_ONLY, is_call, tensor_of
from weaveopt.graph.values import shape_of

aten = torch.ops.aten
_TOPK = frozenset({aten.topk.default})
_SOFTMAX = frozenset({aten._softmax.default, aten.exp.default})
_SIGMOID = frozenset({aten.sigmoid.default})
_THROUGH = CAST | SHAPE_ONLY | ADD | MUL | {aten.where.self, aten.div.Tensor, aten.sub.Tensor, aten.masked_fill.Scalar}
_FAR = 24
"""Nodes between a router's scores and its choice, at most."""


@dataclass(frozen=True)
class Routing:
    """Routing facts, as far as the graph shows them."""

    num_experts: int = 0
    """Number of experts on all ranks; 0 if unknown."""
    scores: str = ""
    """`softmax`, `sigmoid`, `softmax of the chosen`; empty: not known."""
    groups: int = 0
    """Groups of experts of which the best are taken first; 0: none."""


def routing_of(experts: fx.Node, weights: fx.Node) -> Routing:
    topk = _topk_of(experts)
    if topk is None:
        return Routing()
    scored = topk.args[0]
    value = tensor_of(scored) if isinstance(scored, fx.Node) else None
    if not isinstance(scored, fx.Node) or value is None:
        return Routing()
    groups = 0
    if is_call(scored, frozenset({aten.where.self})):
        inner = _before(scored, _TOPK, _FAR, through=None)
        grouped = inner.args[0] if inner is not None else None
        group_value = tensor_of(grouped) if isinstance(grouped, fx.Node) else None
        groups = shape_of(group_value)[1] if group_value is not None and group_value.ndim in (2, 3) else 0
    found = _before(scored, _SOFTMAX | _SIGMOID, _FAR, through=_THROUGH)
    if found is not None:
        scores = "sigmoid" if is_call(found, _SIGMOID) else "softmax"
    else:
        source = _before(weights, _SOFTMAX | _SIGMOID, _FAR, through=_THROUGH)
        scores = "" if source is None else ("sigmoid" if is_call(source, _SIGMOID) else "softmax of the chosen")
    return Routing(shape_of(value)[-1], scores, groups)


def _topk_of(experts: fx.Node) -> fx.Node | None:
    """The `topk` whose indices, or what expert parallelism makes of them, `experts` are."""
    node: object = experts
    for _ in range(_FAR):
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return None
        if is_call(node, frozenset({operator.getitem})):
            source = node.args[0]
            return source if isinstance(source, fx.Node) and is_call(source, _TOPK) else None
        node = node.args[2] if is_call(node, frozenset({aten.where.self})) else node.args[0]
    return None


def _before(node: fx.Node, targets: frozenset[object], most: int, through: frozenset[object] | None) -> fx.Node | None:
    """The first node of `targets`, in the order of a walk back from `node` over operations `through` (None: any)."""
    pending, seen = [node], {node}
    while pending and len(seen) < 4 * most:
        here = pending.pop(0)
        if is_call(here, targets):
            return here
        passes = here is node or is_call(here, frozenset({operator.getitem}) | (through or frozenset()))
        if here.op == "call_function" and (through is None or passes):
            fresh = [each for each in here.all_input_nodes if each not in seen]
            seen.update(fresh)
            pending.extend(fresh)
    return None
