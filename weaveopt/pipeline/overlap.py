"""Decide again where tasks overlap: by the difference in the timeline, which isolated prices cannot know.

A fused kernel in line is cheaper by itself than the library's all-reduce, and dearer than one that is hidden under
other work. So choices that are best by isolated prices are compared with the best ones in which nothing waits in line
meanwhile, and kinds of sites whose exchange other work can hide are tried in every form, each time in the timeline of
the whole graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weaveopt.cost_model import measured_contention
from weaveopt.cost_model.gemm import power_at_clock
from weaveopt.pipeline.costs import Choices, margin_of
from weaveopt.pipeline.price import PricedGraph
from weaveopt.pipeline.problem import Problem
from weaveopt.pipeline.timeline import Timeline
from weaveopt.records.task import Stream, Task
from weaveopt.rule import Proposal
from weaveopt.solver.selection import EXCLUDED, JointCost

_ROUNDS = 2
"""Passes over all kinds; the second finds what the first one's changes made worth it."""
_ROUNDING = 1e-9
"""Relative difference that sums of the same times in another order may have."""


def with_overlap(priced: PricedGraph, isolated: Choices) -> Choices:
    """The choices that are cheapest in the timeline of the graph, of those that are tried; `isolated` are the best by
    isolated prices.

    Contention that was not measured hides nothing here. The same on all ranks, as everything that it reads is.
    """
    problem = priced.problem
    search, frugal = _Search(priced), _by_energy(priced)
    if frugal is not None:
        isolated = min(isolated, frugal.best(), key=search.us)
    if not problem.concurrent and not any(_has_open(problem, index) for index in range(len(problem.sites))):
        return isolated
    best = search.refined(isolated)
    if problem.concurrent:
        best = min(best, search.refined(_without_waits(problem).best()), key=search.us)
    # Without any contention measured nothing is hidden, whatever is chosen.
    if priced.surroundings.machine.contention is not None and search.is_unsure(best):
        best = min(best, search.refined(_of_measured(priced, _without_waits(problem)).best()), key=search.us)
    return best


def _by_energy(priced: PricedGraph) -> Problem | None:
    """The problem in which a choice costs its energy over the power limit; None for a graph that stays within it."""
    power = power_at_clock(priced.surroundings.machine)
    baseline = None if power is None else priced.baseline
    if baseline is None or baseline.steady_us <= baseline.us:
        return None
    return replace(priced.problem, power=power)


def _has_open(problem: Problem, index: int) -> bool:
    site = problem.sites[index]
    return any(site.proposals[position].is_open for position in site.choices)


def _without_waits(problem: Problem) -> Problem:
    """The problem without choices that wait in line where an exchange could be in flight."""
    barred = []
    for each in problem.waits:
        other = each.sites[-1]
        choices: dict[tuple[int, ...], float] = {(key[-1],): EXCLUDED for key in each.terms}
        barred.append(JointCost((other,), choices))
    return replace(problem, waits=(*problem.waits, *barred), steps=())


def _of_measured(priced: PricedGraph, problem: Problem) -> Problem:
    """`problem` without exchanges whose contention with what is computed meanwhile was not measured. The descent
    changes one kind of sites at a time, and none of them may gain by leaving such an exchange alone."""
    contention = measured_contention(priced.surroundings.machine)

    def is_unmeasured(proposal: Proposal) -> bool:
        asides = [task for task in proposal.tasks if task.stream is not Stream.COMPUTE]
        return proposal.is_open and any(contention(Task(1.0), task) is None for task in asides)

    barred = []
    for index, site in enumerate(problem.sites):
        unmeasured = [at for at, each in enumerate(site.choices) if is_unmeasured(site.proposals[each])]
        if unmeasured:
            barred.append(JointCost((index,), {(at,): EXCLUDED for at in unmeasured}))
    return replace(problem, waits=(*problem.waits, *barred), steps=())


@dataclass(frozen=True)
class _Search:
    """Descent over kinds of sites: all sites of one kind get the same choice at a time."""

    priced: PricedGraph

    def us(self, choices: Choices) -> float:
        """Time of the graph with these choices, plus what rewrites have to save beyond it."""
        found, margin_us = self._timeline(choices)
        return self.priced.problem.us(choices) if found is None else found.upper_steady_us + margin_us

    def is_unsure(self, choices: Choices) -> bool:
        """True if work would run at once whose contention was not measured."""
        found, _ = self._timeline(choices)
        return found is not None and bool(found.schedule.not_measured)

    def _timeline(self, choices: Choices) -> tuple[Timeline | None, float]:
        """Timeline of the graph with these choices, and what their rewrites have to save beyond it."""
        problem = self.priced.problem
        rewritten, margin_us = {}, 0.0
        for index in range(len(choices)):
            proposal = problem.settled(index, choices)
            if proposal is not None and proposal.candidate.estimate is not None:
                estimate = proposal.candidate.estimate
                rewritten[index] = (estimate, proposal.tasks)
                margin_us += margin_of(problem.sites[index], proposal)
        return self.priced.timeline(rewritten), margin_us

    def refined(self, choices: Choices) -> Choices:
        best, best_us = choices, self.us(choices)
        for _ in range(_ROUNDS):
            before = best
            for changed in self._moves(best):
                us = self.us(changed)
                if us < best_us * (1 - _ROUNDING):
                    best, best_us = changed, us
            if best == before:
                break
        return best

    def _moves(self, choices: Choices) -> Iterator[Choices]:
        """`choices` with those of all sites of one kind changed, as far as that is allowed."""
        problem = self.priced.problem
        members: dict[int, list[int]] = {}
        for index, kind in enumerate(problem.kinds):
            members.setdefault(kind, []).append(index)
        for kind, those in members.items():
            site = problem.sites[kind]
            if not any(index in problem.concurrent or _has_open(problem, index) for index in those):
                continue
            if any(site.proposals[position].candidate.choice in site.forced for position in site.choices):
                continue
            for choice in range(site.num_choices):
                changed = tuple(
                    min(choice, problem.sites[index].num_choices - 1) if index in those else known
                    for index, known in enumerate(choices)
                )
                if changed != choices and self._is_allowed(changed):
                    yield changed

    def _is_allowed(self, choices: Choices) -> bool:
        problem = self.priced.problem
        return all(each.us(choices) != EXCLUDED for each in (*problem.exclusions, *problem.waits))
