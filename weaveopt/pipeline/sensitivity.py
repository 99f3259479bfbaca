"""Sensitivity of a decision to token counts and machine constants, found by repeating the step that decided.

The choice at a token count is that of a graph compiled for it (of a dynamic one: with it as the hint), all sites with
as many tokens changed together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from weaveopt.cost_model import Machine
from weaveopt.cost_model.token_grid import LARGEST_TOKENS
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.pipeline.machine_changes import changes
from weaveopt.records.candidate import LEAVE, Candidate
from weaveopt.records.report import ChoiceRange, Sensitivity
from weaveopt.records.site import TokenCounts
from weaveopt.rule import Context
from weaveopt.solver.boundaries import runs

Winner = Callable[[int], str]
"""Token count -> the choice that wins there."""
Choices = tuple[str, ...]
"""The choice at every site, in words."""


def sensitivities(decided: DecidedGraph, context: Context) -> tuple[Sensitivity, ...]:
    """One for each kind of site (equal facts, groups and token counts), in the order of the first of them.

    Left out: sites that no matcher recognized, and sites of a kind whose choices differ.
    """
    frame = decided.priced.frame
    kinds: dict[tuple[int, str], list[int]] = {}
    for index, decision in enumerate(decided.decisions):
        if not decision.site.rejections and decision.site.tokens.hint:
            kinds.setdefault((frame.kinds[index], words(decision.chosen)), []).append(index)
    asked = {index: decided.decisions[index].site.tokens for members in kinds.values() for index in members}

    @cache
    def choices(tokens: int, of: TokenCounts) -> Choices:
        counts = {index: _at(tokens, known) for index, known in asked.items() if known == of}
        return _choices(decided, counts, context)

    @cache
    def changed() -> tuple[tuple[str, Choices], ...]:
        return tuple(
            (change, _choices(decided, {}, replace(context, machine=machine)))
            for change, machine in _changes(decided, context)
        )

    found = []
    for (_, choice), members in kinds.items():
        first = members[0]
        here = asked[first]
        if choices(here.hint, here)[first] != choice:
            continue
        found.append(
            Sensitivity(
                tuple(decided.decisions[index].site.id for index in members),
                here.hint,
                choice,
                stretches(lambda tokens, at=first, of=here: choices(tokens, of)[at], here.hint),  # type: ignore[misc]
                tuple((change, those[first]) for change, those in changed()),
            )
        )
    return tuple(found)


def words(candidate: Candidate) -> str:
    """`leave`, or rule, fabric and kernel variant."""
    if candidate.choice == LEAVE:
        return LEAVE
    return " ".join(word for word in (candidate.choice, candidate.fabric.value, candidate.variant) if word)


def _choices(decided: DecidedGraph, counts: dict[int, TokenCounts], context: Context) -> Choices:
    problem = decided.priced.frame.problem(counts, context, usable_only=True)
    best = problem.best()
    found = []
    for site, choice in zip(problem.sites, best, strict=True):
        proposal = site.proposal(choice)
        found.append(LEAVE if proposal is None else words(proposal.candidate))
    return tuple(found)


def _at(tokens: int, known: TokenCounts) -> TokenCounts:
    most = tokens if known.is_static else max(tokens, known.most)
    return TokenCounts(tokens, tokens if known.is_static and known.least else min(known.least, tokens), most)


def _changes(decided: DecidedGraph, context: Context) -> Iterator[tuple[str, Machine]]:
    facts = [dict(decision.site.facts) for decision in decided.decisions]
    dtypes: Sequence[str] = [str(each["dtype"]) for each in facts if "dtype" in each]
    hosts = max((known.num_hosts for known in context.topologies.values()), default=1)
    return iter(changes(context.machine, dtypes[0] if dtypes else "bfloat16", hosts))


def stretches(winner: Winner, tokens: int, end: int = LARGEST_TOKENS) -> tuple[ChoiceRange, ...]:
    """Return the winner at every count from 1 to `end`: evaluated in steps of an eighth and at `tokens`, bisected
    between.

    Every boundary is exact; a stretch entirely within one step is not seen.
    """
    return tuple(ChoiceRange(first, choice) for first, choice in runs(winner, _grid(tokens, end)))


def _grid(tokens: int, end: int) -> Iterator[int]:
    here, asked = 1, tokens <= 1
    yield here
    while here < end:
        following = min(max(here + 1, here * 9 // 8), end)
        if not asked and tokens <= following:
            asked = True
            if tokens < following:
                yield tokens
        yield following
        here = following
