"""Rewrite: splice the replacements in, one at a time; the graph is valid, and its seams are the same, after each."""

from __future__ import annotations

import torch
import torch.fx as fx

from weaveopt.graph.pattern import tensor_of
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.pipeline.plan import Planned
from weaveopt.rule import Context, OwnsMemory, Placement, RuleSet

Seam = tuple[tuple[object, ...], ...]


def rewrite(decided: DecidedGraph, planned: Planned, rules: RuleSet, context: Context) -> tuple[str, ...]:
    """Edit the graph that was decided for; returns one line for each kind of changed rounding."""
    graph = decided.priced.captured.graph
    before = seam(graph)
    rounding: dict[str, None] = {}
    captured = decided.priced.captured
    for rule in rules.graph_rules:
        if rule.name == captured.rule and isinstance(rule, OwnsMemory):
            rule.settle_graph(captured, decided.chosen, planned.of_variant(captured), context)
    for chosen in decided.chosen:
        site = chosen.found.site.id
        rule = rules.named(chosen.proposal.candidate.choice)
        placement = planned.placements.get(site, Placement({}))
        rounding.update(dict.fromkeys(rule.replace(graph, chosen, placement, context)))
        after = seam(graph)
        assert before == after, f"{site} changed the graph's outputs: {before} became {after}"
    graph.lint()
    return tuple(rounding)


def seam(graph: fx.Graph) -> Seam:
    """Shape, dtype and strides of everything that leaves the graph."""
    output = graph.output_node()
    return tuple(_layout(tensor_of(node)) for node in output.all_input_nodes)


def _layout(value: torch.Tensor | None) -> tuple[object, ...]:
    return () if value is None else (tuple(map(str, value.shape)), tuple(map(str, value.stride())), str(value.dtype))
