"""Step 3: choose a candidate for every site, or leave it, such that the whole graph is predicted fastest.

What a set of choices costs is said in `pipeline.price`: sites that hand a sharded sum to each other are priced
together, and a rewrite has to save more than the model's own error. The best set is found exactly
(`solver.selection`). Of equally good ones that with the fewest rewrites is taken, then by graph order and order
of the candidates, so all ranks take the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weaveopt.pipeline.price import Choices, Problem, price, whole
from weaveopt.records.candidate import Candidate, Rejection, Scalar
from weaveopt.records.report import Decision
from weaveopt.rule import Context, Finding, Rule
from weaveopt.solver.selection import EXCLUDED


def decide(findings: Sequence[Finding], rules: Sequence[Rule], context: Context) -> tuple[Decision, ...]:
    """One decision for every finding, in order. Uses only what is identical on all ranks of a group.

    Estimates are those that count: with the sum sharded exactly where `plan` will shard it. An allowed candidate that
    was not taken says why, judged with all other sites as they were decided: `overlaps` if one of them uses the same
    nodes, `no_saving` if rewriting this site too would save no more than the model's error, `slower_candidate` if the
    site is rewritten in another way. Of a candidate that was never allowed the best case is told.
    """
    problem = price(findings, rules, context)
    outcome = _Outcome(problem, problem.best())
    return tuple(outcome.decision(index) for index in range(len(findings)))


@dataclass(frozen=True)
class _Outcome:
    """What was chosen, and from what."""

    problem: Problem
    choices: Choices

    def decision(self, index: int) -> Decision:
        site, taken = self.problem.sites[index], self.choices[index]
        choice_of = {position: choice for choice, position in enumerate(site.choices)}
        chosen, others = site.leave, []
        for position, candidate in enumerate(site.candidates):
            choice = choice_of.get(position)
            settled = self._settled(index, choice, candidate)
            if choice is None:
                others.append(settled)
            elif choice == taken:
                chosen = settled
            else:
                others.append(replace(settled, rejections=(self._against(index, choice, settled),)))
        if chosen is not site.leave:
            others.insert(0, site.leave)
        return Decision(site.site, chosen, tuple(others), site.leave.estimate)

    def _instead(self, index: int, choice: int) -> tuple[int, ...]:
        """All choices as they were selected, but for one."""
        return (*self.choices[:index], choice, *self.choices[index + 1 :])

    def _settled(self, index: int, choice: int | None, candidate: Candidate) -> Candidate:
        """With the estimate that counts among the other sites' choices; the best one where it is not allowed at all."""
        if choice is None:
            sharded = index in self.problem.sums
        else:
            sharded = self.problem.stays_sharded(index, self._instead(index, choice))
        return replace(candidate, estimate=candidate.estimate if sharded else whole(candidate), whole=None)

    def _against(self, index: int, choice: int, candidate: Candidate) -> Rejection:
        """Why an allowed candidate is not the choice of its site."""
        instead = self._instead(index, choice)
        if any(index in each.sites and each.us(instead) == EXCLUDED for each in self.problem.exclusions):
            return Rejection("overlaps", "another rewrite that saves more uses the same nodes")
        values: list[tuple[str, Scalar]] = []
        chosen = self.problem.sites[index].candidate(self.choices[index])
        if candidate.estimate is not None:
            values.append(("predicted_us", round(candidate.estimate.us, 2)))
        gained_us = sum(
            each.us(self.choices) - each.us(instead)
            for maker, each in self.problem.sums.items()
            if maker != index and index in each.sites
        )
        if gained_us:
            values.append(("neighbours_gain_us", round(gained_us, 2)))
        if chosen is not None:
            return Rejection("slower_candidate", "the candidate that was chosen is predicted faster", tuple(values))
        unfused = self.problem.sites[index].leave.estimate
        if unfused is not None:
            values.insert(0, ("unfused_us", round(unfused.us, 2)))
        if candidate.estimate is not None:
            values.append(("error_us", round(candidate.estimate.error_us, 2)))
        message = "the predicted saving does not exceed the model's own error"
        return Rejection("no_saving", message, tuple(values))
