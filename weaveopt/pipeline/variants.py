"""Variants: the captured graph, and what graph rules make of it."""

from __future__ import annotations

from dataclasses import replace

from weaveopt.rule import CapturedGraph, Context, RuleSet


def variants(captured: CapturedGraph, rules: RuleSet, context: Context) -> tuple[CapturedGraph, ...]:
    """The captured graph first, then each graph rule's variants in order. All compute the same.

    Asserts that a variant has the inputs of the captured graph.
    """
    found = [captured]
    inputs = [node.name for node in captured.graph.find_nodes(op="placeholder")]
    for rule in rules.graph_rules:
        for each in rule.variants(captured, context):
            own = [node.name for node in each.graph.find_nodes(op="placeholder")]
            assert own == inputs, f"{rule.name}: {each.variant} takes {own}, the captured graph {inputs}"
            found.append(replace(each, rule=rule.name))
    return tuple(found)
