"""Rewrite: splice the replacements in, one at a time; the graph is valid, and its seams are the same, after each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import tensor_of
from weaveopt.ops.collective_wait.place import place
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.pipeline.plan import Planned
from weaveopt.records.order import ANY_ORDER, Order
from weaveopt.rule import Context, OwnsMemory, Placement, RuleSet

Seam = tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class Rewritten:
    """Effects of the rewrites of a graph."""

    rounding: tuple[str, ...] = ()
    """One line for each kind of changed rounding."""
    order: Order = ANY_ORDER
    """Order of communication that the graph's own dependencies now state, and that Inductor has to keep."""


NOTHING_REWRITTEN = Rewritten()


def rewrite(decided: DecidedGraph, planned: Planned, rules: RuleSet, context: Context) -> Rewritten:
    """Edit the graph that was decided for, and make its waits depend on the starts that its order puts before them."""
    graph = decided.priced.captured.graph
    before = seam(graph)
    rounding: dict[str, None] = {}
    captured = decided.priced.captured
    for rule in rules.graph_rules:
        if rule.name == captured.rule and isinstance(rule, OwnsMemory):
            rule.settle_graph(captured, decided.chosen, planned.of_variant(captured), context)
    for chosen in decided.chosen:
        site = chosen.found.site.id
        site_rule = rules.named(chosen.proposal.candidate.choice)
        placement = planned.placements.get(site, Placement({}))
        rounding.update(dict.fromkeys(site_rule.replace(graph, chosen, placement, context)))
        after = seam(graph)
        assert before == after, f"{site} changed the graph's outputs: {before} became {after}"
    order = place(graph, captured.order) if captured.order else ANY_ORDER
    graph.lint()
    return Rewritten(tuple(rounding), order)


def seam(graph: fx.Graph) -> Seam:
    """Shape, dtype and strides of everything that leaves the graph."""
    output = graph.output_node()
    return tuple(_layout(tensor_of(node)) for node in output.all_input_nodes)


def _layout(value: torch.Tensor | None) -> tuple[object, ...]:
    return () if value is None else (tuple(map(str, value.shape)), tuple(map(str, value.stride())), str(value.dtype))
