"""Token counts at which the decision for a graph changes, merged into at most four regimes at the least loss.

The structure of a decision is which sites are rewritten, on which fabric, and whose sums stay sharded. Which kernel
serves a count is no part of it: run-time tables choose that inside one compiled graph, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Protocol

from weaveopt.records.candidate import Candidate, Fabric
from weaveopt.solver.boundaries import runs

MAX_REGIMES = 4
"""Compiled graphs for one graph of symbolic size."""

Choices = tuple[int, ...]
Structure = tuple[tuple[str, Fabric, tuple[str, ...]] | None, ...]
"""Rule and fabric of each site, with the interactions that change its cost; None for a site that is left."""


class RegimeSite(Protocol):
    """A site with its proposals; see `weaveopt.rule.PricedSite`."""

    @property
    def choices(self) -> tuple[int, ...]: ...
    def proposal(self, choice: int, /) -> RegimeProposal | None: ...


class RegimeProposal(Protocol):
    @property
    def candidate(self) -> Candidate: ...


class RegimeProblem(Protocol):
    """Cost of the choices at a graph's sites; see `weaveopt.pipeline.problem.Problem`."""

    @property
    def sites(self) -> Sequence[RegimeSite]: ...
    @property
    def costs_us(self) -> Sequence[Sequence[float]]: ...
    @property
    def baseline_us(self) -> float: ...
    def us(self, choices: Choices, /) -> float: ...
    def best(self) -> Choices: ...
    def active(self, index: int, choices: Choices, /) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class DecidedRange:
    """Token counts from `first` to `last`, both included, that have the same decision."""

    first: int
    last: int


@dataclass(frozen=True)
class Served:
    """Token counts that one compiled graph serves, decided as those of one stretch among them are."""

    first: int
    last: int
    decided_as: DecidedRange


def regimes(
    problem_at: Callable[[int], RegimeProblem], grid: Sequence[int], max_regimes: int = MAX_REGIMES, narrowest: int = 1
) -> tuple[Served, ...]:
    """Regimes from the first to the last count of `grid` (ascending).

    `problem_at(tokens)` is what the graph costs if only so many tokens come. Nothing is searched between two counts of
    the grid with equal decisions. If there are more stretches than regimes, or one has fewer counts than `narrowest`,
    neighbours are merged such that the least is lost: of the best time at each count of the grid, counts being equally
    likely on a logarithmic scale. Ties go to fewer regimes, then to later boundaries.
    """
    problems = cache(problem_at)
    choices = cache(lambda tokens: problems(tokens).best())
    structures = cache(lambda tokens: structure_of(problems(tokens), choices(tokens)))

    @cache
    def lost(stretch: DecidedRange, tokens: int) -> float:
        """Share of the time at `tokens` that deciding as in `stretch` adds."""
        problem = problems(tokens)
        best_us = problem.us(choices(tokens))
        us = problem.us(_choices_like(structures(stretch.first), problem))
        return max(us - best_us, 0.0) / max(problem.baseline_us + best_us, 1e-9)

    found = stretches(structures, grid)
    if len(found) <= max_regimes and all(each.last - each.first + 1 >= narrowest for each in found):
        return tuple(Served(each.first, each.last, each) for each in found)
    samples = sorted({*grid, *(end for each in found for end in (each.first, each.last))})
    return _merged(found, samples, lost, max_regimes, narrowest)


def stretches(structure_at: Callable[[int], object], grid: Sequence[int]) -> tuple[DecidedRange, ...]:
    """Return the maximal runs of counts with equal structure, as far as the counts of `grid` show a change."""
    firsts = [first for first, _ in runs(structure_at, grid)]
    lasts = [*(first - 1 for first in firsts[1:]), grid[-1]]
    return tuple(DecidedRange(first, last) for first, last in zip(firsts, lasts, strict=True))


def structure_of(problem: RegimeProblem, choices: Choices) -> Structure:
    parts: list[tuple[str, Fabric, tuple[str, ...]] | None] = []
    for index, (site, choice) in enumerate(zip(problem.sites, choices, strict=True)):
        chosen = site.proposal(choice)
        if chosen is None:
            parts.append(None)
        else:
            parts.append((chosen.candidate.choice, chosen.candidate.fabric, problem.active(index, choices)))
    return tuple(parts)


def _choices_like(structure: Structure, problem: RegimeProblem) -> Choices:
    """Apply a structure at another token count; a site whose fabric has no kernel there uses the library."""
    choices = []
    for part, site, costs_us in zip(structure, problem.sites, problem.costs_us, strict=True):
        able = []
        for choice in range(len(site.choices)):
            proposal = site.proposal(choice)
            if part is not None and proposal is not None:
                candidate = proposal.candidate
                if (candidate.choice, candidate.fabric) == part[:2]:
                    able.append((costs_us[choice], choice))
        choices.append(min(able)[1] if able else len(site.choices))
    return tuple(choices)


def _merged(
    found: Sequence[DecidedRange],
    samples: Sequence[int],
    lost: Callable[[DecidedRange, int], float],
    max_regimes: int,
    narrowest: int,
) -> tuple[Served, ...]:
    """Find the cheapest partition of the stretches into runs, each decided as one of its stretches."""

    @cache
    def run(first: int, end: int) -> tuple[float, Served]:
        """Loss of serving stretches `first` to `end - 1` by one regime, and that regime."""
        inside = [tokens for tokens in samples if found[first].first <= tokens <= found[end - 1].last]
        losses = {each: sum(lost(each, tokens) for tokens in inside) for each in found[first:end]}
        best = min(losses, key=losses.__getitem__)
        served = Served(found[first].first, found[end - 1].last, best)
        return (losses[best] if served.last - served.first + 1 >= narrowest else inf), served

    @cache
    def cut(first: int, left: int) -> tuple[float, tuple[Served, ...]]:
        """The best runs from stretch `first` on, at most `left` of them."""
        options = []
        for end in range(len(found), first, -1) if left > 1 else (len(found),):
            loss, served = run(first, end)
            rest_loss, rest = cut(end, left - 1) if end < len(found) else (0.0, ())
            options.append((loss + rest_loss, (served, *rest)))
        return min(options, key=lambda option: (option[0], len(option[1])))

    return cut(0, max_regimes)[1]
