"""Step 5: splice the replacements in, one at a time; the graph is valid, and its seams are the same, after each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from weaveopt.graph.pattern import tensor_of
from weaveopt.records.memory import BufferPlan
from weaveopt.records.report import Decision
from weaveopt.rule import CapturedGraph, Context, Finding, Rule

Seam = tuple[tuple[object, ...], ...]


def rewrite(
    captured: CapturedGraph,
    findings: Sequence[Finding],
    decisions: Sequence[Decision],
    plans: Sequence[BufferPlan],
    rules: Sequence[Rule],
    context: Context,
) -> tuple[str, ...]:
    """Edit the captured graph; returns one line for each kind of changed rounding."""
    by_name = {rule.name: rule for rule in rules}
    placements = {placement.site: placement for plan in plans for placement in plan.placements}
    before = _seam(captured.graph)
    rounding: dict[str, None] = {}
    for finding, decision in zip(findings, decisions, strict=True):
        if not decision.rewritten:
            continue
        assert finding.match is not None, f"{decision.site.id} was chosen but not matched"
        rule = by_name[decision.site.rule]
        placement = placements[decision.site.id]
        rounding.update(dict.fromkeys(rule.replace(captured.graph, finding.match, decision, placement, context)))
        after = _seam(captured.graph)
        assert before == after, f"{decision.site.id} changed the graph's outputs: {before} became {after}"
    captured.graph.lint()
    return tuple(rounding)


def _seam(graph: fx.Graph) -> Seam:
    """Shape, dtype and strides of everything that leaves the graph."""
    output = graph.output_node()
    return tuple(_layout(tensor_of(node)) for node in output.all_input_nodes)


def _layout(value: torch.Tensor | None) -> tuple[object, ...]:
    return () if value is None else (tuple(map(str, value.shape)), tuple(map(str, value.stride())), str(value.dtype))
