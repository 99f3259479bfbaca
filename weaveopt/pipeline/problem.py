"""The sites of a graph as one problem: what every set of choices costs, at any token count.

A set of choices says for each site which of its allowed proposals it gets, or that it is left. It costs::

    sum over rewritten sites of  estimate - baseline + the error of that difference
    + what rules say that some choices change together

The baseline is the price of the nodes that a site consumes, as Inductor and libraries run them. What the two prices may
be off by, without what they are off by alike, is added to what a rewrite costs. So the best set holds only rewrites
that save more than that, what their neighbours gain by them included, and of several the one whose saving is surest to
be large: that is least likely to lose. A rule that is forced is not charged the error. Proposals that share nodes
exclude each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

import torch.fx as fx

from weaveopt.cost_model.energy import PowerCosts
from weaveopt.inductor.kernels import GraphKernel, KernelContext, within
from weaveopt.pipeline.costs import Choices, PricedInteraction, cost_us
from weaveopt.pipeline.open_exchanges import open_exchanges, waits_excluded
from weaveopt.records.candidate import Estimate, Rejection, Term
from weaveopt.records.site import TokenCounts
from weaveopt.rule import (
    CapturedGraph,
    Context,
    FoundSite,
    PricedSite,
    Proposal,
    RelatesSites,
    RuleSet,
)
from weaveopt.solver import selection
from weaveopt.solver.selection import EXCLUDED, SelectionStep, select, steps_of


@dataclass(frozen=True)
class Problem:
    """The sites of a graph, and the costs of their choices."""

    sites: tuple[PricedSite, ...]
    interactions: tuple[PricedInteraction, ...] = ()
    exclusions: tuple[selection.JointCost, ...] = ()
    """Choices that would replace the same nodes."""
    waits: tuple[selection.JointCost, ...] = ()
    """Choices of which one waits for peers in line while the other's exchange is in flight."""
    concurrent: frozenset[int] = frozenset()
    """Sites while whose exchange, left to the library or begun and ended, other work of the graph can run."""
    kinds: tuple[int, ...] = ()
    """Position of the first site that is priced like each."""
    steps: tuple[SelectionStep, ...] = ()
    """Order in which `select` takes the sites, if it is known already."""
    power: PowerCosts | None = None
    """Set where choices cost their energy over the power limit, in place of their time."""

    @cached_property
    def costs_us(self) -> tuple[tuple[float, ...], ...]:
        """Costs of every choice at every site relative to leaving it, in isolation. Equal rows are one object."""
        known: dict[object, tuple[float, ...]] = {}
        rows = []
        for site in self.sites:
            key = (id(site.baseline), tuple(id(site.proposals[at].candidate) for at in site.choices))
            if key not in known:
                known[key] = (*(cost_us(site, site.proposals[position], self.power) for position in site.choices), 0.0)
            rows.append(known[key])
        return tuple(rows)

    @cached_property
    def _solver_interactions(self) -> tuple[selection.JointCost, ...]:
        known: dict[object, selection.JointCost] = {}
        found = []
        for each in self.interactions:
            key = (id(each.terms), self.sites[each.sites[0]].forced)
            if key not in known:
                known[key] = each.with_margin(self.sites)
            found.append(replace(known[key], sites=each.sites))
        return (*found, *self.exclusions, *self.waits)

    @cached_property
    def baseline_us(self) -> float:
        """Time of all sites with each left as it is."""
        return sum(site.baseline.us for site in self.sites)

    def us(self, choices: Choices) -> float:
        """Total cost of these choices relative to leaving every site, interactions included."""
        own = sum(row[choice] for row, choice in zip(self.costs_us, choices, strict=True))
        return own + sum(interaction.us(choices) for interaction in self._solver_interactions)

    def best(self) -> Choices:
        """The choices that cost least; as many forced sites as go together are rewritten, whatever that costs."""
        costs_us = list(self.costs_us)
        forced = [index for index, site in enumerate(self.sites) if _is_forced(site)]
        if forced:
            terms = (us for each in self._solver_interactions for us in each.terms.values() if us != EXCLUDED)
            more_us = 1.0 + 2.0 * (_sum_of_sizes(us for row in costs_us for us in row) + _sum_of_sizes(terms))
            for index in forced:
                names = [self.sites[index].proposals[at].candidate.choice for at in self.sites[index].choices]
                unforced = [name not in self.sites[index].forced for name in names]
                row = costs_us[index]
                costs_us[index] = (
                    *(us + more_us * other for us, other in zip(row[:-1], unforced, strict=True)),
                    row[-1] + more_us,
                )
        return select(costs_us, self._solver_interactions, self.steps)

    def settled(self, index: int, choices: Choices) -> Proposal | None:
        """The proposal that a site has under these choices, with the estimate that counts among the others'."""
        proposal = self.sites[index].proposal(choices[index])
        if proposal is None or proposal.candidate.estimate is None:
            return proposal
        active = [each for each in self.making(index) if each.is_active(choices)]
        if not active:
            return proposal
        estimate = proposal.candidate.estimate
        for each in active:
            estimate = estimate.plus(each.estimate(choices))
        return replace(proposal, candidate=replace(proposal.candidate, estimate=estimate))

    def making(self, index: int) -> Sequence[PricedInteraction]:
        """The interactions that change what a site costs."""
        return self._by_role[0].get(index, ())

    def reading(self, index: int) -> Sequence[PricedInteraction]:
        """The interactions in which a site's choice changes what another one costs."""
        return self._by_role[1].get(index, ())

    @cached_property
    def _by_role(self) -> tuple[dict[int, list[PricedInteraction]], dict[int, list[PricedInteraction]]]:
        making: dict[int, list[PricedInteraction]] = {}
        reading: dict[int, list[PricedInteraction]] = {}
        for each in self.interactions:
            making.setdefault(each.sites[0], []).append(each)
            for site in each.sites[1:]:
                reading.setdefault(site, []).append(each)
        return making, reading

    def active(self, index: int, choices: Choices) -> tuple[str, ...]:
        """Names of the interactions that change what a site costs under these choices."""
        return tuple(each.term for each in self.making(index) if each.is_active(choices))


def _is_forced(site: PricedSite) -> bool:
    return any(site.proposals[position].candidate.choice in site.forced for position in site.choices)


def _sum_of_sizes(values: Iterable[float]) -> float:
    return sum(map(abs, values))


class ProblemTemplate:
    """Part of a graph's problem that is the same at every token count: kinds of sites, and their dependencies.

    Two sites are of one kind where their facts, groups, token counts and kernels are equal; a kind is priced once.
    """

    def __init__(self, captured: CapturedGraph, sites: Sequence[FoundSite], rules: RuleSet, context: Context) -> None:
        self.sites = tuple(sites)
        self._rules, self._context = rules, context
        self._order = {node: index for index, node in enumerate(captured.graph.nodes)}
        self._kernels: dict[tuple[int, frozenset[fx.Node]], tuple[GraphKernel, ...]] = {}
        self._overlapping = _overlapping(self.sites)
        self.kinds = self._kinds()
        # Rules whose candidates pass values to each other may report the same interaction.
        self.interactions = tuple(
            dict.fromkeys(
                interaction
                for rule in rules.every
                if isinstance(rule, RelatesSites) and (rule in rules.site_rules or rule.name == captured.rule)
                for interaction in rule.interactions(self.sites)
            )
        )
        self._open = open_exchanges(captured.graph, self.sites)
        pairs = [pair for each in self._open for pair in each.pairs]
        self._steps = steps_of(
            len(self.sites), [*(each.sites for each in self.interactions), *self._overlapping, *pairs]
        )

    def problem(
        self,
        tokens: Mapping[int, TokenCounts] | None = None,
        context: Context | None = None,
        usable_only: bool = False,
    ) -> Problem:
        """Price the problem with other token counts at some sites (sites of one kind have the same), or on another
        machine.

        With `usable_only` one site stands for all of its kind, and proposals that may not be chosen may be missing.
        """
        asked, known = context or self._context, {} if tokens is None else tokens
        firsts: dict[int, PricedSite] = {}
        sites = []
        for index, kind in enumerate(self.kinds):
            if kind not in firsts:
                counts = known.get(kind, self.sites[kind].site.tokens)
                firsts[kind] = self._priced(kind, counts, asked, usable_only)
            first = firsts[kind]
            if index != kind and not usable_only:
                first = self._like(first, index, asked)
            sites.append(first)
        return self.problem_of(sites, asked)

    def problem_of(self, sites: Sequence[PricedSite], context: Context | None = None) -> Problem:
        """Build the problem of these priced sites, whatever their prices."""
        return Problem(
            tuple(sites),
            self._interactions(sites, context or self._context),
            _exclusions(self._overlapping, sites),
            waits_excluded(self._open, sites),
            frozenset(each.site for each in self._open if each.site is not None and each.is_overlapped),
            self.kinds,
            self._steps,
        )

    def proposals(self, found: FoundSite) -> Sequence[Proposal]:
        """Propose candidates at a copied graph's site, in the same order as those of the priced site."""
        return self._proposals(found, found.site.tokens, self._context, usable_only=False)

    def _priced(self, index: int, tokens: TokenCounts, context: Context, usable_only: bool) -> PricedSite:
        found = self.sites[index]
        surroundings = KernelContext.of(context.machine, context.topologies.values())
        ratio = tokens.hint / found.site.tokens.hint if found.site.tokens.hint else 1.0
        baseline = surroundings.estimate(self._within(index, found.nodes), ratio)
        rests: dict[frozenset[fx.Node], Estimate] = {}
        proposals = []
        for proposal in self._proposals(found, tokens, context, usable_only):
            beyond = proposal.consumes - found.nodes
            assert beyond <= found.consumers, f"{found.site.id}: {proposal.candidate.choice} takes other nodes"
            candidate = proposal.candidate
            if candidate.estimate is not None:
                if proposal.consumes not in rests:
                    kernels = self._within(index, found.nodes - proposal.consumes)
                    rests[proposal.consumes] = surroundings.estimate(kernels, ratio)
                estimate = rests[proposal.consumes].plus(candidate.estimate)
                if beyond:  # what they cost as they are is counted outside the site
                    estimate = estimate.plus(_negative(surroundings.estimate(self._within(index, beyond), ratio)))
                candidate = replace(candidate, estimate=estimate)
            proposals.append(replace(proposal, candidate=candidate))
        choices = tuple(position for position, each in enumerate(proposals) if each.candidate.allowed)
        decided_for = replace(found, site=replace(found.site, tokens=tokens))
        return PricedSite(decided_for, baseline, tuple(proposals), choices, frozenset(context.config.force))

    def _proposals(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool
    ) -> Sequence[Proposal]:
        if found.site.rejections:
            return ()
        every: list[Proposal] = []
        for rule in self._rules.of_kind(found.site.kind):
            against = context.against(rule.name, found.site)
            if against is None or not usable_only:
                proposed = rule.propose(found, tokens, context, usable_only)
                every.extend(proposed if against is None else (_rejected(each, against) for each in proposed))
        return every

    def _like(self, first: PricedSite, index: int, context: Context) -> PricedSite:
        """Return the same candidates at another site of the kind, on that site's nodes."""
        found = self.sites[index]
        found = replace(found, site=replace(found.site, tokens=first.found.site.tokens))
        own = self._proposals(found, found.site.tokens, context, usable_only=False)
        if [each.candidate.rejections for each in own] != [each.candidate.rejections for each in first.proposals]:
            return self._priced(index, found.site.tokens, context, usable_only=False)  # its nodes allow other rewrites
        pairs = zip(own, first.proposals, strict=True)
        proposals = tuple(replace(each, candidate=known.candidate) for each, known in pairs)
        return replace(first, found=found, proposals=proposals)

    def _kinds(self) -> tuple[int, ...]:
        """Position of the first site of each one's kind.

        Sites that share nodes are of one kind with those at the same place of an equal set of such sites: then one pair
        of sites excludes each other as the other pair does.
        """
        own = [self._kind(index) for index in range(len(self.sites))]
        firsts: dict[Hashable, tuple[int, ...]] = {}
        kinds = [*range(len(self.sites))]
        for members in _connected(len(self.sites), self._overlapping):
            shared = tuple(self._shared(pair, members) for pair in self._overlapping if pair[0] in members)
            first = firsts.setdefault((tuple(own[each] for each in members), shared), members)
            for member, stands_for in zip(members, first, strict=True):
                kinds[member] = stands_for
        return tuple(kinds)

    def _shared(self, pair: tuple[int, int], members: Sequence[int]) -> Hashable:
        """Which nodes two overlapping sites share, by their places in each."""
        both = [self.sites[index].nodes | self.sites[index].consumers for index in pair]
        ordered = [sorted(nodes, key=self._order.__getitem__) for nodes in both]
        places = tuple(tuple(at for at, node in enumerate(nodes) if node in both[0] & both[1]) for nodes in ordered)
        return (*(members.index(index) for index in pair), places)

    def _kind(self, index: int) -> Hashable:
        """Equal for two sites that have the same baseline and the same candidates; those not recognized stand alone."""
        found = self.sites[index]
        site = found.site
        if site.rejections or found.facts is None:
            return index
        works, consumers = (
            tuple((kernel.name, kernel.work) for kernel in self._within(index, nodes))
            for nodes in (found.nodes, found.consumers)
        )
        return (
            site.kind,
            site.groups,
            found.facts,
            site.tokens,
            site.description,
            found.token_symbol,
            works,
            consumers,
        )

    def _within(self, index: int, nodes: frozenset[fx.Node]) -> tuple[GraphKernel, ...]:
        key = (index, nodes)
        if key not in self._kernels:
            machine, tokens = self._context.machine, self.sites[index].site.tokens.hint
            self._kernels[key] = within(nodes, self._order, machine.device, self._context.topologies, tokens)
        return self._kernels[key]

    def kernels(self, index: int, nodes: frozenset[fx.Node]) -> tuple[GraphKernel, ...]:
        """Kernels that these nodes of a site run unmodified."""
        return self._within(index, nodes)

    def _interactions(self, sites: Sequence[PricedSite], context: Context) -> tuple[PricedInteraction, ...]:
        known: dict[object, Mapping[tuple[int, ...], float]] = {}
        found = []
        for each in self.interactions:
            key = (each.key, tuple(self.kinds[site] for site in each.sites))
            if key not in known:
                known[key] = each.terms([sites[site] for site in each.sites])
            found.append(PricedInteraction(each.sites, each.term, known[key]))
        return tuple(found)


def _negative(estimate: Estimate) -> Estimate:
    """Negate an estimate."""
    return Estimate(tuple(Term(term.name, -term.us) for term in estimate.terms))


def _rejected(proposal: Proposal, why: Rejection) -> Proposal:
    candidate = proposal.candidate
    return replace(proposal, candidate=replace(candidate, rejections=(*candidate.rejections, why)))


def _overlapping(sites: Sequence[FoundSite]) -> tuple[tuple[int, int], ...]:
    """Pairs of sites that share nodes, or have consumers that belong to others."""
    owners: dict[fx.Node, list[int]] = {}
    for index, found in enumerate(sites):
        for node in found.nodes | found.consumers:
            owners.setdefault(node, []).append(index)
    return tuple(sorted({pair for sharing in owners.values() for pair in combinations(sharing, 2)}))


def _connected(num_sites: int, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Sets of sites that overlap, directly or through others; a site that overlaps none is alone."""
    member_of: dict[int, tuple[int, ...]] = {index: (index,) for index in range(num_sites)}
    for a, b in pairs:
        if member_of[a] is not member_of[b]:
            joined = tuple(sorted((*member_of[a], *member_of[b])))
            member_of.update(dict.fromkeys(joined, joined))
    return list(dict.fromkeys(member_of.values()))


def _exclusions(overlapping: Sequence[tuple[int, int]], sites: Sequence[PricedSite]) -> tuple[selection.JointCost, ...]:
    """Choices of two sites that would replace the same nodes."""
    found = []
    for pair in overlapping:
        a, b = (sites[index] for index in pair)
        terms: dict[tuple[int, ...], float] = {
            (i, j): EXCLUDED
            for i, j in product(range(len(a.choices)), range(len(b.choices)))
            if a.proposals[a.choices[i]].consumes & b.proposals[b.choices[j]].consumes
        }
        found.append(selection.JointCost(pair, terms))
    return tuple(found)
