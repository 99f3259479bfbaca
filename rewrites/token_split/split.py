"""The graph of a token split: interpreted, without what nothing reads, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.records.order import Order
from weaveopt.rewrites.token_split.interpreter import Interpreter, Join, changes_input
from weaveopt.rewrites.token_split.values import Cut, Mark
from weaveopt.rule import FoundSite


@dataclass(frozen=True)
class SplitGraph:
    """A graph in parts."""

    graph: fx.Graph
    order: Order
    joins: tuple[Join, ...]
    late: tuple[str, ...]
    """Collectives of the first part that wait for a later part's, and those of all tokens, of `num_collectives`."""
    num_collectives: int


def split(
    captured: fx.Graph, cut: Cut, seeds: Sequence[tuple[fx.Node, Mark]], sites: Sequence[FoundSite]
) -> SplitGraph:
    """A copy of the graph that computes the same in parts. `seeds` are the inputs that are in parts, and where."""
    run = Interpreter(captured, cut, dict(seeds), sites)
    for node in captured.nodes:
        run.visit(node)
    layout, graph = run.layout, run.builder.graph
    made = _without_dead(graph, run.builder.made)
    order = layout.arrange(graph, made)
    late = tuple(node.name for node in (*layout.late(graph), *run.whole_collectives))
    graph.lint()
    kept = set(made)
    joins = tuple(dict.fromkeys(join for join, node in run.joins if node is None or node in kept))
    return SplitGraph(graph, order, joins, late, len(layout.starts) + len(run.whole_collectives))


def _without_dead(graph: fx.Graph, made: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that are left once those are erased that nothing reads; collectives and changes of inputs stay."""
    dead = set()
    for node in reversed(made):
        pure = node.op == "get_attr" or (node.op == "call_function" and not _has_effect(node))
        if pure and not node.users:
            dead.add(node)
            graph.erase_node(node)
    return [node for node in made if node not in dead]


def _has_effect(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional" or changes_input(node)
