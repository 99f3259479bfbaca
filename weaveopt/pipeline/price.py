"""What every set of choices costs: the sites of a graph with their candidates, and what these cost together.

A set of choices says for each site which of its allowed candidates it gets, or that it is left. It costs::

    sum over rewritten sites of  us + error_us - unfused_us

with each estimate as it counts among the other choices: a sum that does not stay sharded (the rule's `sharding`) is
handed out whole, which its maker pays as `gather`; rewrites that share nodes exclude each other. The model's own
error is added to what a rewrite costs, so that the best set holds only rewrites that save more than their error,
what their neighbours gain by them included. A rule that is forced is not charged the error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

from weaveopt import cost_model
from weaveopt.records.candidate import LEAVE, Algorithm, Candidate, Estimate, Fabric, Rejection
from weaveopt.records.site import Site, Workload
from weaveopt.rewrites.all_reduce_rms_norm.sharding import SharedSum, shared_sums, stays_sharded
from weaveopt.rule import Context, Finding, Rule
from weaveopt.solver.selection import EXCLUDED, Interaction, Step, select, steps_of

Choices = tuple[int, ...]
"""For each site the position of its candidate among the allowed ones; their number, where the site is left."""


@dataclass(frozen=True)
class PricedSite:
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
    def unfused_us(self) -> float:
        return 0.0 if self.leave.estimate is None else self.leave.estimate.us

    @cached_property
    def costs_us(self) -> tuple[float, ...]:
        """Of every choice, against leaving the site; sums whole."""
        costs = (self.careful_us(whole(self.candidates[position])) for position in self.choices)
        return (*(cost - self.unfused_us for cost in costs), 0.0)

    def careful_us(self, estimate: Estimate | None) -> float:
        """Time with the model's own error on top; a forced rewrite does not have to exceed it."""
        if estimate is None:
            return self.unfused_us
        return estimate.us + (0.0 if self.forced else estimate.error_us)


def whole(candidate: Candidate) -> Estimate | None:
    """The estimate with the sum handed out whole."""
    return candidate.whole or candidate.estimate


@dataclass(frozen=True)
class Problem:
    """All sites of a graph, and what their choices cost."""

    sites: tuple[PricedSite, ...]
    sums: Mapping[int, Interaction]
    """What it saves that a sum stays sharded, by the site that makes it."""
    exclusions: tuple[Interaction, ...]
    steps: tuple[Step, ...] = ()
    """In which `select` takes the sites, if they are known already."""

    @cached_property
    def interactions(self) -> tuple[Interaction, ...]:
        return (*self.sums.values(), *self.exclusions)

    @cached_property
    def unfused_us(self) -> float:
        """With every site left."""
        return sum(site.unfused_us for site in self.sites)

    def us(self, choices: Choices) -> float:
        """What these choices cost, against leaving every site."""
        own = sum(site.costs_us[choice] for site, choice in zip(self.sites, choices, strict=True))
        return own + sum(interaction.us(choices) for interaction in self.interactions)

    def best(self) -> Choices:
        """The choices that cost least; as many forced sites as go together are rewritten, whatever that costs."""
        costs_us = [site.costs_us for site in self.sites]
        forced = [index for index, site in enumerate(self.sites) if site.forced and site.choices]
        if forced:
            terms = (us for each in self.interactions for us in each.terms.values() if us != EXCLUDED)
            more_us = 1.0 + 2.0 * (_sum_of_sizes(us for row in costs_us for us in row) + _sum_of_sizes(terms))
            for index in forced:
                costs_us[index] = (*costs_us[index][:-1], more_us)
        return select(costs_us, self.interactions, self.steps)

    def stays_sharded(self, maker: int, choices: Choices) -> bool:
        """Whether under these choices the sum that the site `maker` makes stays sharded."""
        shared = self.sums.get(maker)
        return shared is not None and shared.of(choices) in shared.terms


def price(findings: Sequence[Finding], rules: Sequence[Rule], context: Context) -> Problem:
    """Asks every rule for its candidates, and the cost model for what is left as it is."""
    sites = _priced(findings, rules, context)
    sums = shared_sums(findings)
    return _problem(sites, sums, [_sharing(shared, findings, sites) for shared in sums], _overlapping(findings))


@dataclass(frozen=True)
class Frame:
    """What of a problem is the same at every token count: kinds of sites, and which of them depend on each other."""

    findings: tuple[Finding, ...]
    kinds: tuple[int, ...]
    """For each site the first one that has the same candidates at every count."""
    sums: tuple[SharedSum, ...]
    overlapping: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]

    @cached_property
    def _alike(self) -> tuple[tuple[tuple[int, ...], object], ...]:
        """For each sum its maker and readers, and what it saves by: their kinds, and which of them cover it."""
        every = [(shared.covered, (shared.maker, *shared.readers)) for shared in self.sums]
        return tuple((members, (covered, *(self.kinds[each] for each in members))) for covered, members in every)

    def price(
        self, workload_at: Callable[[Finding], Workload | None], rules: Sequence[Rule], context: Context
    ) -> Problem:
        """As `price` of the findings with these workloads: sites of one kind are asked for, and priced, once.

        In the problem one site stands for all of its kind, and candidates that may not be chosen may be missing.
        """
        firsts = sorted(set(self.kinds))
        at = {kind: _with_workload(self.findings[kind], workload_at(self.findings[kind])) for kind in firsts}
        priced = dict(zip(firsts, _priced(list(at.values()), rules, context, usable_only=True), strict=True))
        sites = tuple(priced[kind] for kind in self.kinds)
        terms: dict[object, Mapping[tuple[int, ...], float]] = {}
        sums = []
        for shared, (members, key) in zip(self.sums, self._alike, strict=True):
            if key not in terms:
                workloads = {member: at[self.kinds[member]].site.workload for member in members}
                those = {member: _with_workload(self.findings[member], each) for member, each in workloads.items()}
                terms[key] = _sharing(shared, those, sites).terms
            sums.append(Interaction(members, terms[key]))
        return _problem(sites, self.sums, sums, self.overlapping, self.steps)


def frame(findings: Sequence[Finding], kind_of: Callable[[Finding], Hashable]) -> Frame:
    """`kind_of` says which matched sites have equal workloads whatever the count."""
    firsts: dict[Hashable, int] = {}
    kinds = []
    for index, finding in enumerate(findings):
        key = index if finding.match is None else (finding.site.rule, finding.site.group, kind_of(finding))
        kinds.append(firsts.setdefault(key, index))
    sums, overlapping = shared_sums(findings), _overlapping(findings)
    together = [(shared.maker, *shared.readers) for shared in sums]
    return Frame(tuple(findings), tuple(kinds), sums, overlapping, steps_of(len(kinds), [*together, *overlapping]))


def _with_workload(finding: Finding, workload: Workload | None) -> Finding:
    return replace(finding, site=replace(finding.site, workload=workload))


def _problem(
    sites: tuple[PricedSite, ...],
    sums: Sequence[SharedSum],
    interactions: Sequence[Interaction],
    overlapping: Sequence[tuple[int, int]],
    steps: tuple[Step, ...] = (),
) -> Problem:
    by_maker = {shared.maker: each for shared, each in zip(sums, interactions, strict=True)}
    exclusions = tuple(
        Interaction(pair, dict.fromkeys(product(*(range(len(sites[site].choices)) for site in pair)), EXCLUDED))
        for pair in overlapping
    )
    return Problem(sites, by_maker, exclusions, steps)


def _sum_of_sizes(values: Iterable[float]) -> float:
    return sum(map(abs, values))


def _priced(
    findings: Sequence[Finding], rules: Sequence[Rule], context: Context, usable_only: bool = False
) -> tuple[PricedSite, ...]:
    """Sites whose group and workload are alike have the same candidates (the same objects)."""
    by_name = {rule.name: rule for rule in rules}
    known: dict[object, tuple[Candidate, tuple[Candidate, ...], tuple[int, ...]]] = {}
    sites = []
    for finding in findings:
        site = finding.site
        if finding.match is None:
            refused = Candidate(site.rule, Fabric.LIBRARY, Algorithm.LIBRARY, rejections=site.rejections)
            sites.append(PricedSite(site, _leave(site, context), (refused,), ()))
            continue
        key = (site.rule, site.group, site.workload)
        if key not in known:
            candidates = _candidates(site, by_name[site.rule], context, usable_only)
            allowed = tuple(index for index, candidate in enumerate(candidates) if candidate.allowed)
            known[key] = (_leave(site, context), candidates, allowed)
        sites.append(PricedSite(site, *known[key], forced=site.rule in context.config.force))
    return tuple(sites)


def _leave(site: Site, context: Context) -> Candidate:
    unfused = None if site.workload is None else cost_model.estimate_unfused(context.machine, site.workload)
    return Candidate(LEAVE, Fabric.LIBRARY, Algorithm.LIBRARY, estimate=unfused)


def _candidates(site: Site, rule: Rule, context: Context, usable_only: bool) -> tuple[Candidate, ...]:
    found = rule.candidates(site, context, usable_only)
    if rule.name not in context.config.disable:
        return found
    disabled = Rejection("disabled", "the rule is switched off by an option", (("rule", rule.name),))
    return tuple(replace(candidate, rejections=(*candidate.rejections, disabled)) for candidate in found)


def _sharing(
    shared: SharedSum, findings: Sequence[Finding] | Mapping[int, Finding], sites: Sequence[PricedSite]
) -> Interaction:
    """What it saves that the sum stays sharded, for all choices under which it does."""
    members = (shared.maker, *shared.readers)
    maker = sites[shared.maker]
    terms: dict[tuple[int, ...], float] = {}
    for choices in product(*(range(sites[member].num_choices) for member in members)):
        made, *read = (sites[member].candidate(choice) for member, choice in zip(members, choices, strict=True))
        readers = [(findings[at], how) for at, how in zip(shared.readers, read, strict=True) if how is not None]
        if made is not None and stays_sharded((findings[shared.maker], made), readers):
            terms[choices] = maker.careful_us(made.estimate) - maker.careful_us(whole(made))
    return Interaction(members, terms)


def _overlapping(findings: Sequence[Finding]) -> tuple[tuple[int, int], ...]:
    """Sites whose rewrites share nodes: they exclude each other."""
    owners: dict[object, list[int]] = {}
    for index, finding in enumerate(findings):
        for node in () if finding.match is None else finding.match.interior:
            owners.setdefault(node, []).append(index)
    return tuple(sorted({pair for sharing in owners.values() for pair in combinations(sharing, 2)}))
