"""Step 2: look for every rule's sites. Mutates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from weaveopt.rule import CapturedGraph, Context, Finding, Rule


def recognize(captured: CapturedGraph, rules: Sequence[Rule], context: Context) -> tuple[Finding, ...]:
    """All sites of all rules, those that may not be rewritten among them, with their reasons."""
    return tuple(finding for rule in rules for finding in rule.find(captured.graph, context))
