"""Recognize: every matcher's sites. Mutates nothing."""

from __future__ import annotations

from weaveopt.rule import CapturedGraph, Context, FoundSite, RuleSet


def recognize(captured: CapturedGraph, rules: RuleSet, context: Context) -> tuple[FoundSite, ...]:
    """Find all sites of all kinds in graph order, including those that no rule may rewrite, with their reasons."""
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    found = [each for matcher in rules.matchers for each in matcher.find(captured.graph, context)]
    return tuple(sorted(found, key=lambda each: min((order[node] for node in each.nodes), default=0)))
