"""Decide: exactly the cheapest choices at the sites of a graph.

The best choices are found exactly (`solver.selection`). Of equally good ones those with the fewest rewrites are taken,
then by graph order and order of the proposals, so all ranks take the same. Where tasks overlap the timeline of the
graph decides again (`overlap`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weaveopt.pipeline.costs import Choices
from weaveopt.pipeline.overlap import with_overlap
from weaveopt.pipeline.price import PricedGraph
from weaveopt.pipeline.problem import Problem
from weaveopt.pipeline.timeline import Timeline
from weaveopt.records.candidate import LEAVE, Candidate, Estimate, Rejection, Scalar, error_between_us
from weaveopt.records.report import Decision, Variant
from weaveopt.rule import Chosen, Context, RuleSet, SettlesSites
from weaveopt.solver.selection import EXCLUDED


@dataclass(frozen=True)
class DecidedGraph:
    """Decisions at all sites of one graph."""

    priced: PricedGraph
    decisions: tuple[Decision, ...]
    """One for every site, in order."""
    chosen: tuple[Chosen, ...]
    """The sites that are rewritten, in graph order, as their rules settled them."""
    timeline: Timeline | None
    """Timeline of the whole graph; None if not all of its kernels could be priced."""
    positions: tuple[int | None, ...] = ()
    """Position of each site's proposal among all of its proposals; None where it is left."""

    @property
    def predicted_us(self) -> float | None:
        """Predicted time of the whole graph; a lower bound where contention was not measured."""
        return None if self.timeline is None else self.timeline.us

    @property
    def variant(self) -> Variant:
        captured, baseline = self.priced.captured, self.priced.baseline
        baseline_us = None if baseline is None else baseline.us
        exposed_us = None if self.timeline is None else self.timeline.exposed_us
        return Variant(
            captured.variant, captured.rule, baseline_us, self.predicted_us, captured.rejections, captured.parameters,
            exposed_us, _steady_us(baseline), _steady_us(self.timeline),
        )  # fmt: skip


def _steady_us(timeline: Timeline | None) -> float | None:
    return None if timeline is None or timeline.energy is None else timeline.steady_us


def decide(priced: PricedGraph, rules: RuleSet, context: Context) -> DecidedGraph:
    """One decision for every site. Uses only what is identical on all ranks of a group.

    Estimates are those that count among the other sites' choices. An allowed candidate that was not taken says why,
    judged with all other sites as they were decided: `overlaps` if one of them uses the same nodes,
    `waits_beside_exchange` if it would wait in line while the exchange of one of them is in flight, `no_saving` if
    rewriting this site too would save no more than the two prices may be off by, `slower_candidate` if another
    candidate was taken, `less_certain` if that one is predicted slower, with a saving that is surer.
    """
    problem = priced.problem
    choices = with_overlap(priced, problem.best())
    outcome = _Outcome(problem, choices)
    decisions = tuple(outcome.decision(index) for index in range(len(problem.sites)))
    chosen = []
    for index, site in enumerate(problem.sites):
        proposal = problem.settled(index, choices)
        if proposal is not None:
            chosen.append(Chosen(site.found, proposal))
    settled = settle(tuple(chosen), rules, context)
    final = {each.found.site.id: each.proposal.candidate for each in settled}
    decisions = tuple(_settled(each, final.get(each.site.id)) for each in decisions)
    tasks = {each.found.site.id: each.proposal.tasks for each in settled}
    positions = tuple(
        site.choices[choice] if choice < len(site.choices) else None
        for site, choice in zip(problem.sites, choices, strict=True)
    )
    return DecidedGraph(priced, decisions, settled, priced.decided(decisions, tasks), positions)


def settle(chosen: tuple[Chosen, ...], rules: RuleSet, context: Context) -> tuple[Chosen, ...]:
    """Every proposal in its final form: rules set the flags that depend on what was chosen around them."""
    final: dict[str, Chosen] = {each.found.site.id: each for each in chosen}
    for rule in rules.site_rules:
        own = any(each.proposal.candidate.choice == rule.name for each in chosen)
        if own and isinstance(rule, SettlesSites):
            for site, proposal in rule.settle(chosen, context).items():
                assert final[site].proposal.candidate.choice == rule.name, f"{rule.name} settles {site} of another rule"
                final[site] = replace(final[site], proposal=proposal)
    return tuple(final[each.found.site.id] for each in chosen)


@dataclass(frozen=True)
class _Outcome:
    """Solution of a problem: the choices, and the problem that they were chosen from."""

    problem: Problem
    choices: Choices

    def decision(self, index: int) -> Decision:
        site, taken = self.problem.sites[index], self.choices[index]
        choice_of = {position: choice for choice, position in enumerate(site.choices)}
        leave = Candidate(LEAVE, estimate=site.baseline)
        chosen, others = leave, []
        for position, proposal in enumerate(site.proposals):
            choice = choice_of.get(position)
            if choice is None:
                others.append(proposal.candidate)
                continue
            settled = self.problem.settled(index, self._instead(index, choice))
            assert settled is not None, f"choice {choice} of {site.found.site.id} is to leave it"
            settled = replace(settled, candidate=_with_saving_error(settled.candidate, site.baseline))
            if choice == taken:
                chosen = settled.candidate
            else:
                why = self._against(index, choice, settled.candidate)
                others.append(replace(settled.candidate, rejections=(why,)))
        if chosen is not leave:
            others.insert(0, leave)
        return Decision(site.found.site, chosen, tuple(others), site.baseline)

    def _instead(self, index: int, choice: int) -> tuple[int, ...]:
        """Return the selected choices with that of one site replaced."""
        return (*self.choices[:index], choice, *self.choices[index + 1 :])

    def _against(self, index: int, choice: int, candidate: Candidate) -> Rejection:
        """Return the reason why an allowed candidate is not the choice of its site."""
        instead = self._instead(index, choice)
        if any(index in each.sites and each.us(instead) == EXCLUDED for each in self.problem.exclusions):
            return Rejection("overlaps", "another rewrite that saves more uses the same nodes")
        if any(index in each.sites and each.us(instead) == EXCLUDED for each in self.problem.waits):
            message = "it waits for peers in line while another exchange is in flight: ranks could block each other"
            return Rejection("waits_beside_exchange", message)
        values: list[tuple[str, Scalar]] = []
        chosen = self.problem.sites[index].proposal(self.choices[index])
        timed = candidate.estimate is not None and candidate.estimate.measured is not None
        if candidate.estimate is not None:
            name = "measured_us" if timed else "predicted_us"
            values.append((name, round(candidate.estimate.decided_us, 2)))
        gained_us = sum(each.us(self.choices) - each.us(instead) for each in self.problem.reading(index))
        if gained_us:
            values.append(("neighbours_gain_us", round(gained_us, 2)))
        if candidate.estimate is not None and candidate.estimate.saving_error_us is not None:
            values.append(("error_us", round(candidate.estimate.saving_error_us, 2)))
        taken = self.problem.settled(index, self.choices)
        known = None if taken is None else taken.candidate.estimate
        if known and candidate.estimate and candidate.estimate.decided_us < known.decided_us + gained_us:
            message = "it may save more than the candidate that was chosen, whose saving is surer"
            return Rejection("less_certain", message, tuple(values))
        if chosen is not None:
            message = f"the candidate that was chosen {'was measured' if timed else 'is predicted'} faster"
            return Rejection("slower_candidate", message, tuple(values))
        values.insert(0, ("unfused_us", round(self.problem.sites[index].baseline.decided_us, 2)))
        message = "the predicted saving does not exceed what the two prices may be off by"
        if timed:
            message = "the measured saving does not exceed what such times vary by"
        return Rejection("no_saving", message, tuple(values))


def _settled(decision: Decision, final: Candidate | None) -> Decision:
    """The decision with its candidate in its final form."""
    if final is None or decision.baseline is None:
        return decision
    return replace(decision, chosen=_with_saving_error(final, decision.baseline))


def _with_saving_error(candidate: Candidate, baseline: Estimate) -> Candidate:
    """The candidate with the error of its saving."""
    if candidate.estimate is None:
        return candidate
    error_us = error_between_us(candidate.estimate, baseline)
    return replace(candidate, estimate=replace(candidate.estimate, saving_error_us=error_us))
