"""Variants: what graph rules make of the captured graph, once it was decided."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from weaveopt.graph.facts import group_of
from weaveopt.inductor.calls import COLLECTIVE
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.records.candidate import Rejection
from weaveopt.records.report import RULE_FAILED
from weaveopt.records.task import Stream
from weaveopt.rule import CapturedGraph, Context, Exposure, GraphRule, GraphWork, RuleSet
from weaveopt.wording import named


def variants(decided: DecidedGraph, rules: RuleSet, context: Context) -> tuple[CapturedGraph, ...]:
    """Each graph rule's variants, in order; all compute the same as the captured graph, which is not among them.

    A rule that may not be used is not asked; its variant has the reason. So has that of a rule that fails, unless the
    option `strict` is on: the captured graph keeps what was decided for it.
    """
    if not rules.graph_rules:
        return ()
    captured = decided.priced.captured
    exposed = exposure(decided)
    found: list[CapturedGraph] = []
    for rule in rules.graph_rules:
        against = context.against(rule.name)
        try:
            made = () if against is not None else _made_by(rule, captured, exposed, context)
        except Exception as error:
            if context.config.strict:
                raise
            against = Rejection(RULE_FAILED, named(error))
        if against is not None:
            made = (replace(captured, variant=rule.name, rule=rule.name, rejections=(against,)),)
        found.extend(made)
    return tuple(found)


def _made_by(
    rule: GraphRule, captured: CapturedGraph, exposed: Exposure, context: Context
) -> tuple[CapturedGraph, ...]:
    """The variants of one rule. Asserts that those that may be used have the captured graph's inputs, and leave it."""
    inputs = [node.name for node in captured.graph.find_nodes(op="placeholder")]
    found = []
    for each in rule.variants(captured, exposed, context):
        assert each.rejections or each.graph is not captured.graph, f"{rule.name} changed the captured graph"
        own = [node.name for node in each.graph.find_nodes(op="placeholder")]
        assert own == inputs, f"{rule.name}: {each.variant} takes {own}, the captured graph {inputs}"
        found.append(replace(each, rule=rule.name))
    return tuple(found)


def exposure(decided: DecidedGraph) -> Exposure:
    """Communication of a decided graph that no computation hides, by group: of the library's collectives what the
    timeline exposes, of rewritten sites what their estimates do."""
    found: dict[str, float] = {}
    for decision in decided.decisions:
        estimate = decision.chosen.estimate if decision.rewritten else None
        if estimate is not None:
            for group in decision.site.groups:
                found[group] = found.get(group, 0.0) + estimate.exposed_us / len(decision.site.groups)
    priced, timeline = decided.priced, decided.timeline
    library: dict[str, float] = {}
    for kernel in priced.library_kernels(tuple(each.rewritten for each in decided.decisions)):
        if kernel.kind == COLLECTIVE:
            group = group_of(kernel.node)
            library[group] = library.get(group, 0.0) + priced.surroundings.us(kernel)
    total_us = sum(library.values())
    share = timeline.exposed_us / total_us if timeline is not None and total_us else 1.0
    for group, us in library.items():
        found[group] = found.get(group, 0.0) + us * min(share, 1.0)
    return Exposure(found, None if timeline is None else timeline.us, tuple(_work(decided)))


def _work(decided: DecidedGraph) -> Iterator[GraphWork]:
    """All that the graph runs where its collectives are the library's and its other sites as decided."""
    priced = decided.priced
    surroundings = priced.surroundings
    local = [each.rewritten and not each.site.groups for each in decided.decisions]
    found = []
    for kernel in priced.library_kernels(tuple(local)):
        is_collective = kernel.kind == COLLECTIVE
        stream = Stream.COMMUNICATION if is_collective else Stream.COMPUTE
        ctas = surroundings.library_ctas(kernel) if is_collective else 0
        found.append(GraphWork(kernel.node, stream, partial(surroundings.us, kernel), ctas))
    for index, each in enumerate(decided.decisions):
        if local[index] and each.chosen.estimate is not None:
            last = max(priced.problem.sites[index].found.nodes, key=priced.order.__getitem__)
            found.append(GraphWork(last, Stream.COMPUTE, partial(operator.mul, each.chosen.estimate.us)))
    yield from sorted(found, key=lambda work: priced.order[work.node])
