"""What would change a decision: other token counts, other constants of the machine. Asked of the step that decided.

The choice at a token count is that of a graph compiled for it (of a dynamic one: with it as the hint).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch.fx as fx

from weaveopt.cost_model.table import LARGEST_TOKENS
from weaveopt.pipeline.decide import decide
from weaveopt.records.candidate import LEAVE, Candidate
from weaveopt.records.report import GraphReport, Sensitivity, Stretch
from weaveopt.records.site import Site, Workload
from weaveopt.reporting.constants import changes
from weaveopt.reporting.reasons import kernel_of
from weaveopt.rule import Context, Finding, Match, Rule

Winner = Callable[[int], str]
"""Token count -> the choice that wins there."""


def sensitivities(graph: GraphReport, rules: Sequence[Rule], context: Context) -> tuple[Sensitivity, ...]:
    """One for each kind of site (rule, group and workload), in the order of the first of them.

    Left out: sites that their rule did not recognize, which no token count changes, and sites whose choice follows
    from another site's.
    """
    alike: dict[tuple[str, str, Workload], list[str]] = {}
    first: dict[tuple[str, str, Workload], tuple[Site, str]] = {}
    for decision in graph.decisions:
        site = decision.site
        if site.workload is None or site.rejections:
            continue
        key = (site.rule, site.group, site.workload)
        alike.setdefault(key, []).append(site.id)
        first.setdefault(key, (site, words(decision.chosen)))
    found = (_sensitivity(site, choice, alike[key], rules, context) for key, (site, choice) in first.items())
    return tuple(each for each in found if each is not None)


def words(candidate: Candidate) -> str:
    """`leave`, or `all_reduce_rms_norm peer two_shot bulk`. CTAs are left out: they change often and decide little."""
    if candidate.choice == LEAVE:
        return LEAVE
    return f"{candidate.choice} {candidate.fabric.value} {kernel_of(candidate)}"


def _sensitivity(
    site: Site, choice: str, alike: list[str], rules: Sequence[Rule], context: Context
) -> Sensitivity | None:
    workload = site.workload
    assert workload is not None
    if _winner(site, workload.tokens, rules, context) != choice:
        return None
    constants = tuple(
        (change, _winner(site, workload.tokens, rules, replace(context, machine=machine)))
        for change, machine in changes(context.machine, workload.dtype, workload.hosts)
    )
    found = stretches(cache(lambda tokens: _winner(site, tokens, rules, context)), workload.tokens)
    return Sensitivity(tuple(alike), workload.tokens, choice, found, constants)


def _winner(site: Site, tokens: int, rules: Sequence[Rule], context: Context) -> str:
    workload = site.workload
    assert workload is not None
    static = workload.tokens == workload.max_tokens
    product = None if workload.product is None else replace(workload.product, m=tokens)
    other = replace(
        workload, tokens=tokens, max_tokens=tokens if static else max(tokens, workload.max_tokens), product=product
    )
    return words(decide(in_a_chain(replace(site, workload=other)), rules, context)[0].chosen)


def in_a_chain(site: Site) -> tuple[Finding, ...]:
    """The site among its like: where its sum may stay sharded, two that hand their sums to each other, without end."""
    workload = site.workload
    if workload is None or not workload.sum_may_shard:
        return (Finding(site, Match(frozenset())),)
    graph = fx.Graph()
    own, others = graph.placeholder("own"), graph.placeholder("others")
    neighbour = replace(site, id=f"{site.id}.neighbour")
    return (
        Finding(site, Match(frozenset(), sharded_input=others, sharded_output=own)),
        Finding(neighbour, Match(frozenset(), sharded_input=own, sharded_output=others)),
    )


def stretches(winner: Winner, tokens: int, end: int = LARGEST_TOKENS) -> tuple[Stretch, ...]:
    """The winner at every count from 1 to `end`: asked in steps of an eighth and at `tokens`, bisected between.

    Every boundary is exact; a stretch that lies wholly within one step is not seen.
    """
    found = [Stretch(1, winner(1))]
    low = 1
    for high in _grid(tokens, end):
        while found[-1].choice != (wins := winner(high)):
            at = _first_other(winner, found[-1].choice, low, high)
            found.append(Stretch(at, wins if at == high else winner(at)))
            low = at
        low = high
    return tuple(found)


def _first_other(winner: Winner, choice: str, low: int, high: int) -> int:
    """The first count after `low`, where `choice` wins, at which it does not; at most `high`."""
    return low + 1 + bisect_left(range(low + 1, high), True, key=lambda tokens: winner(tokens) != choice)


def _grid(tokens: int, end: int) -> Iterator[int]:
    here, asked = 1, tokens <= 1
    while here < end:
        following = min(max(here + 1, here * 9 // 8), end)
        if not asked and tokens <= following:
            asked = True
            if tokens < following:
                yield tokens
        yield following
        here = following
