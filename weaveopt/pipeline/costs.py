"""Costs of choices: what a proposal takes more than its site as it is, and what it has to save beyond its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weaveopt.cost_model.energy import PowerCosts, graph_energy
from weaveopt.records.candidate import Estimate, Term, error_between_us
from weaveopt.rule import PricedSite, Proposal
from weaveopt.solver import selection

Choices = tuple[int, ...]
"""Position of each site's proposal among the allowed ones; their number if the site is left."""


@dataclass(frozen=True)
class PricedInteraction:
    """Joint effect of choices at a few sites, at one token count."""

    sites: tuple[int, ...]
    term: str
    terms: Mapping[tuple[int, ...], float]
    """Choices of the sites -> microseconds of the first one's term."""

    def us(self, choices: Choices) -> float:
        return self.terms.get(tuple(choices[site] for site in self.sites), 0.0)

    def is_active(self, choices: Choices) -> bool:
        return tuple(choices[site] for site in self.sites) in self.terms

    def estimate(self, choices: Choices) -> Estimate:
        return Estimate((Term(self.term, self.us(choices)),))

    def with_margin(self, sites: Sequence[PricedSite]) -> selection.JointCost:
        """Convert to costs with what they change of the error that the first site's proposal is charged."""
        own = sites[self.sites[0]]

        def margin_us(choice: int, us: float) -> float:
            proposal = own.proposal(choice)
            if proposal is None or proposal.candidate.estimate is None:
                return 0.0
            joint = proposal.candidate.estimate.plus(Estimate((Term(self.term, us),)))
            changed = replace(proposal, candidate=replace(proposal.candidate, estimate=joint))
            return margin_of(own, changed) - margin_of(own, proposal)

        costs = {choices: float(us) + margin_us(choices[0], us) for choices, us in self.terms.items()}
        return selection.JointCost(self.sites, costs)


def cost_us(site: PricedSite, proposal: Proposal, power: PowerCosts | None) -> float:
    """Cost of a proposal relative to leaving its site, in microseconds: its estimate, less the baseline, plus the error
    of that difference. With `power`, its energy over the power limit in place of its time."""
    estimate = proposal.candidate.estimate
    if estimate is None:
        return 0.0
    if power is not None:
        return _drawn_us(estimate, power) + margin_of(site, proposal) - _drawn_us(site.baseline, power)
    return estimate.decided_us + margin_of(site, proposal) - site.baseline.decided_us


def _drawn_us(estimate: Estimate, power: PowerCosts) -> float:
    """Energy of what an estimate runs, over the power limit."""
    energy = graph_energy(power, ((term.name, float(term.us)) for term in estimate.terms if term.us > 0))
    return 0.0 if energy is None else energy.within(power, estimate.decided_us) / power.limit_watts * 1e6


def margin_of(site: PricedSite, proposal: Proposal) -> float:
    """Least saving at which a proposal is chosen, in microseconds: the error of its saving; 0 of a forced rule."""
    estimate = proposal.candidate.estimate
    if estimate is None or proposal.candidate.choice in site.forced:
        return 0.0
    return error_between_us(estimate, site.baseline)
