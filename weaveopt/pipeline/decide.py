"""Step 3: choose a candidate for every site, or leave it, such that the whole graph is predicted fastest.

What is minimized, exactly (`weaveopt.selection`), over all sites together::

    sum over rewritten sites of  us + error_us - unfused_us

with each estimate as it counts among the other choices: a sum that does not stay sharded (`weaveopt.sharing`) is
handed out whole, which its maker pays as `gather`; rewrites that share nodes exclude each other. The model's own
error is added to what a rewrite costs, so each rewrite in the set saves more than its error, what its neighbours
gain by it included; one that saves just as much is left. A rule that is forced is charged nothing: its sites are
rewritten, as many as go together, and then at the least cost.

Of equally good sets that with the fewest rewrites is taken, then by graph order and order of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from weaveopt import cost_model
from weaveopt.decision import LEAVE, Algorithm, Candidate, Decision, Estimate, Fabric, Rejection, Scalar, Site
from weaveopt.rule import Context, Finding, Rule
from weaveopt.selection import EXCLUDED, Interaction, select
from weaveopt.sharing import SharedSum, shared_sums, stays_sharded


def decide(findings: Sequence[Finding], rules: Sequence[Rule], context: Context) -> tuple[Decision, ...]:
    """One decision for every finding, in order. Uses only what is identical on all ranks of a group.

    An allowed candidate that was not taken says why, judged with all other sites as they were decided: `overlaps`
    if one of them uses the same nodes, `no_saving` if rewriting this site too would save no more than the model's
    error, `slower_candidate` if the site is rewritten in another way.
    """
    sites = _priced(findings, rules, context)
    sums = {shared.maker: _sharing(shared, findings, sites) for shared in shared_sums(findings)}
    exclusions = _exclusions(findings, sites)
    costs = _with_force([site.costs_us for site in sites], [*sums.values(), *exclusions], sites)
    choices = select(costs, [*sums.values(), *exclusions])
    outcome = _Outcome(sites, choices, sums, exclusions)
    return tuple(outcome.decision(index) for index in range(len(sites)))


@dataclass(frozen=True)
class _Priced:
    """A site with all its candidates, and those of them that may be chosen."""

    site: Site
    leave: Candidate
    candidates: tuple[Candidate, ...]
    choices: tuple[int, ...]
    """Positions of the allowed ones: choice `i` of the site; after them the choice to leave it."""
    forced: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.choices) + 1

    def candidate(self, choice: int) -> Candidate | None:
        """None: the site is left."""
        return self.candidates[self.choices[choice]] if choice < len(self.choices) else None

    @property
    def costs_us(self) -> list[float]:
        """Of every choice, against leaving the site; sums whole."""
        leave_us = _us(self.leave.estimate)
        costs = (_careful_us(_whole(self.candidates[position]), self.forced) for position in self.choices)
        return [*(cost - leave_us for cost in costs), 0.0]


def _us(estimate: Estimate | None) -> float:
    return 0.0 if estimate is None else estimate.us


def _careful_us(estimate: Estimate | None, forced: bool) -> float:
    """Time with the model's own error on top; a forced rewrite does not have to exceed it."""
    return 0.0 if estimate is None else estimate.us + (0.0 if forced else estimate.error_us)


def _whole(candidate: Candidate) -> Estimate | None:
    return candidate.whole or candidate.estimate


def _priced(findings: Sequence[Finding], rules: Sequence[Rule], context: Context) -> list[_Priced]:
    """Sites whose group and workload are alike have the same candidates (the same objects)."""
    by_name = {rule.name: rule for rule in rules}
    known: dict[object, tuple[Candidate, tuple[Candidate, ...], tuple[int, ...]]] = {}
    sites = []
    for finding in findings:
        site = finding.site
        key = (site.rule, site.group, site.workload)
        if finding.match is None:
            refused = Candidate(site.rule, Fabric.LIBRARY, Algorithm.LIBRARY, rejections=site.rejections)
            sites.append(_Priced(site, _leave(site, context), (refused,), ()))
            continue
        if key not in known:
            candidates = _candidates(site, by_name[site.rule], context)
            allowed = tuple(index for index, candidate in enumerate(candidates) if candidate.allowed)
            known[key] = (_leave(site, context), candidates, allowed)
        sites.append(_Priced(site, *known[key], forced=site.rule in context.config.force))
    return sites


def _leave(site: Site, context: Context) -> Candidate:
    unfused = None if site.workload is None else cost_model.estimate_unfused(context.machine, site.workload)
    return Candidate(LEAVE, Fabric.LIBRARY, Algorithm.LIBRARY, estimate=unfused)


def _candidates(site: Site, rule: Rule, context: Context) -> tuple[Candidate, ...]:
    found = rule.candidates(site, context)
    if rule.name not in context.config.disable:
        return found
    disabled = Rejection("disabled", "the rule is switched off by an option", (("rule", rule.name),))
    return tuple(replace(candidate, rejections=(*candidate.rejections, disabled)) for candidate in found)


def _sharing(shared: SharedSum, findings: Sequence[Finding], sites: Sequence[_Priced]) -> Interaction:
    """What it saves that the sum stays sharded, for all choices under which it does."""
    members = (shared.maker, *shared.readers)
    maker = sites[shared.maker]
    terms: dict[tuple[int, ...], float] = {}
    for choices in product(*(range(sites[member].num_choices) for member in members)):
        made, *read = (sites[member].candidate(choice) for member, choice in zip(members, choices, strict=True))
        readers = [(findings[at], how) for at, how in zip(shared.readers, read, strict=True) if how is not None]
        if made is not None and stays_sharded((findings[shared.maker], made), readers):
            sharded_us, whole_us = (_careful_us(each, maker.forced) for each in (made.estimate, _whole(made)))
            terms[choices] = sharded_us - whole_us
    return Interaction(members, terms)


def _exclusions(findings: Sequence[Finding], sites: Sequence[_Priced]) -> list[Interaction]:
    """Rewrites that share nodes exclude each other."""
    owners: dict[object, list[int]] = {}
    for index, finding in enumerate(findings):
        if finding.match is not None and sites[index].choices:
            for node in finding.match.interior:
                owners.setdefault(node, []).append(index)
    pairs = sorted({pair for sharing in owners.values() for pair in combinations(sharing, 2)})
    return [
        Interaction(pair, dict.fromkeys(product(*(range(len(sites[site].choices)) for site in pair)), EXCLUDED))
        for pair in pairs
    ]


def _with_force(
    costs_us: list[list[float]], interactions: Sequence[Interaction], sites: Sequence[_Priced]
) -> list[list[float]]:
    """Leaving a site of a forced rule costs more than all else together."""
    finite = [abs(us) for row in costs_us for us in row]
    finite += [abs(us) for each in interactions for us in each.terms.values() if us != EXCLUDED]
    more_us = 1.0 + 2.0 * sum(finite)
    forced = [site.forced and bool(site.choices) for site in sites]
    return [[*row[:-1], more_us] if force else row for row, force in zip(costs_us, forced, strict=True)]


@dataclass(frozen=True)
class _Outcome:
    """What was selected, and from what."""

    sites: Sequence[_Priced]
    choices: tuple[int, ...]
    sums: dict[int, Interaction]
    """By the site that makes the sum."""
    exclusions: Sequence[Interaction]

    def decision(self, index: int) -> Decision:
        site, taken = self.sites[index], self.choices[index]
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
        shared = self.sums.get(index)
        sharded = shared is not None and (choice is None or shared.of(self._instead(index, choice)) in shared.terms)
        return replace(candidate, estimate=candidate.estimate if sharded else _whole(candidate), whole=None)

    def _against(self, index: int, choice: int, candidate: Candidate) -> Rejection:
        """Why an allowed candidate is not the choice of its site."""
        instead = self._instead(index, choice)
        if any(index in each.sites and each.us(instead) == EXCLUDED for each in self.exclusions):
            return Rejection("overlaps", "another rewrite that saves more uses the same nodes")
        values: list[tuple[str, Scalar]] = []
        chosen = self.sites[index].candidate(self.choices[index])
        if candidate.estimate is not None:
            values.append(("predicted_us", round(candidate.estimate.us, 2)))
        gained_us = sum(
            each.us(self.choices) - each.us(instead)
            for maker, each in self.sums.items()
            if maker != index and index in each.sites
        )
        if gained_us:
            values.append(("neighbours_gain_us", round(gained_us, 2)))
        if chosen is not None:
            return Rejection("slower_candidate", "the candidate that was chosen is predicted faster", tuple(values))
        unfused = self.sites[index].leave.estimate
        if unfused is not None:
            values.insert(0, ("unfused_us", round(unfused.us, 2)))
        if candidate.estimate is not None:
            values.append(("error_us", round(candidate.estimate.error_us, 2)))
        message = "the predicted saving does not exceed the model's own error"
        return Rejection("no_saving", message, tuple(values))
