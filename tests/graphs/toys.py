"""Toy sites and rules: a test says which nodes they have, what they cost, what they need and what they save together.

Every node of a toy site is a library's kernel that takes `node_us` on the machine, so the baseline of a site is that
for each of its nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import torch
import torch.fx as fx

from tests.graphs.uncertain import estimate_of
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.fabrics import topology
from weaveopt.inductor.kernels import KernelContext, within
from weaveopt.pipeline.decide import DecidedGraph, decide
from weaveopt.pipeline.price import PricedGraph, price
from weaveopt.pipeline.problem import Problem, ProblemTemplate
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term, Values
from weaveopt.records.report import WorkFailure
from weaveopt.records.site import Site, TokenCounts
from weaveopt.rule import (
    CapturedGraph,
    Chosen,
    Context,
    FoundSite,
    Memory,
    Placement,
    PricedSite,
    Proposal,
    RuleSet,
    SiteRule,
)

KIND = "toy"
MACHINE = cost_model.load("cpu")
SHAPE = (64, 1 << 14)


@dataclass(frozen=True)
class Offer:
    """A way to rewrite a site, and what it takes less than the site as it is."""

    saves_us: float
    fabric: Fabric = Fabric.SHM
    shared_us: float = 0.0
    """Further saving if the next site of its chain is rewritten on the same fabric."""
    variant: str = ""
    consumes: frozenset[fx.Node] | None = None
    """None: all nodes of the site. What stays is added to its estimate."""
    rejections: tuple[Rejection, ...] = ()


@dataclass(frozen=True)
class Facts:
    """A site's name: sites of different names are of different kinds."""

    name: str

    def values(self) -> Values:
        return (("name", self.name),)


@dataclass(frozen=True)
class Structure:
    """Properties of a site that the toy rules match."""

    offers: tuple[Offer, ...] = ()
    memory: Memory | None = None
    continues: bool = False
    """True if the previous site of its chain passes a value to it that both would share."""


class Graph:
    """An fx graph of library kernels, and the toy sites in it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.sites: list[FoundSite] = []
        self.last = self.graph.placeholder("x")
        self.last.meta["val"] = _value()

    def node(self) -> fx.Node:
        """One more kernel, which reads the one before it."""
        self.last = self.graph.call_function(torch.ops.aten.cumsum.default, (self.last, -1))
        self.last.meta["val"] = _value()
        return self.last

    def site(
        self,
        offers: Sequence[Offer] = (),
        nodes: Sequence[fx.Node] | None = None,
        *,
        name: str = "",
        kind: str = "",
        group: str = "0",
        tokens: TokenCounts = TokenCounts(64),  # noqa: B008  (frozen)
        memory: Memory | None = None,
        continues: bool = False,
    ) -> FoundSite:
        """A site of a node of its own, or of `nodes`; sites of one `kind` have equal facts."""
        name = name or f"s{len(self.sites)}"
        those = frozenset([self.node()] if nodes is None else nodes)
        facts = Facts(kind or name)
        site = Site(name, KIND, (group,), "", (), "toy", tokens, facts.values())
        self.sites.append(FoundSite(site, those, facts, Structure(tuple(offers), memory, continues)))
        return self.sites[-1]

    def captured(self) -> CapturedGraph:
        return CapturedGraph("graph", "prefill", SHAPE[0], ("0",), self.graph)


def _value() -> torch.Tensor:
    return torch.empty(*SHAPE, device="meta", dtype=torch.bfloat16)


def chain(offers: Sequence[Sequence[Offer]], broken_after: int | None = None, kind: str = "") -> Graph:
    """s0 -> s1 -> ..., each passing a value to the next except for the site `broken_after`."""
    graph = Graph()
    for index, row in enumerate(offers):
        graph.site(row, kind=kind, continues=index > 0 and broken_after != index - 1)
    return graph


def node_us(machine: Machine = MACHINE) -> float:
    """Microseconds of a node of a toy site."""
    graph = Graph()
    node = graph.node()
    kernels = within(frozenset([node]), {each: at for at, each in enumerate(graph.graph.nodes)}, machine.device, {}, 0)
    return KernelContext.of(machine, [topology.fake(2)]).estimate(kernels).us


@dataclass(frozen=True)
class Toy:
    """A site rule that offers what each site's structure says."""

    name: str = "toy"
    error: float = 0.0
    kinds: frozenset[str] = frozenset({KIND})
    asked: list[str] = field(default_factory=list, compare=False)
    """Ids of the sites that it was asked about."""

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        self.asked.append(found.site.id)
        return [self._proposal(found, offer, context) for offer in _structure(found).offers]

    def _proposal(self, found: FoundSite, offer: Offer, context: Context) -> Proposal:
        consumed = found.nodes if offer.consumes is None else offer.consumes
        us = len(consumed) * node_us(context.machine) - offer.saves_us
        estimate = estimate_of(self.error, ("all", us))
        candidate = Candidate(self.name, offer.fabric, offer.variant, (), estimate, offer.rejections)
        return Proposal(candidate, consumed, offer)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return _structure(chosen.found).memory

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        return (f"{self.name}: {chosen.found.site.id}",)


@dataclass(frozen=True)
class Shared:
    """Saving that two consecutive sites of a chain have together."""

    sites: tuple[int, ...]
    term: str = "shared"

    @property
    def key(self) -> Hashable:
        return self.term

    def terms(self, members: Sequence[PricedSite]) -> Mapping[tuple[int, ...], float]:
        found = {}
        for choices in product(*(range(member.num_choices) for member in members)):
            maker, reader = (member.proposal(choice) for member, choice in zip(members, choices, strict=True))
            if maker is not None and reader is not None and maker.candidate.fabric is reader.candidate.fabric:
                found[choices] = -_offer(maker).shared_us
        return found


@dataclass(frozen=True)
class Chained(Toy):
    """Consecutive sites of a chain save `shared_us` of the earlier one together."""

    name: str = "chained"

    def interactions(self, sites: Sequence[FoundSite]) -> Sequence[Shared]:
        return [Shared(pair) for pair in pairwise(range(len(sites))) if _structure(sites[pair[1]]).continues]


def _structure(found: FoundSite) -> Structure:
    assert isinstance(found.structure, Structure)
    return found.structure


def _offer(proposal: Proposal) -> Offer:
    assert isinstance(proposal.plan, Offer)
    return proposal.plan


def context(machine: Machine = MACHINE, groups: Sequence[str] = ("0",), **settings: object) -> Context:
    return Context(Config(**settings), machine, dict.fromkeys(groups, topology.fake(2)))  # type: ignore[arg-type]


def exact(machine: Machine = MACHINE) -> Machine:
    """The machine without an error of the model."""
    return replace(machine, relative_error=0.0)


def rules(*site_rules: SiteRule) -> RuleSet:
    return RuleSet((), site_rules)


def priced(graph: Graph, rule_set: RuleSet, known: Context) -> PricedGraph:
    captured = graph.captured()
    frame = ProblemTemplate(captured, graph.sites, rule_set, known)
    return price(captured, frame, frame.problem(), known)


def decided(graph: Graph, rule_set: RuleSet, known: Context) -> DecidedGraph:
    return decide(priced(graph, rule_set, known), rule_set, known)


def lone_problem(baseline_us: float, saved_us: float) -> Problem:
    """One site with one candidate."""
    found = FoundSite(Site("s", KIND, ("0",), "", (), "toy"), frozenset(), Facts("s"))
    estimate = Estimate((Term("all", baseline_us - saved_us),))
    proposal = Proposal(Candidate("toy", Fabric.SHM, "toy", (), estimate))
    return Problem((PricedSite(found, Estimate((Term("all", baseline_us),)), (proposal,), (0,)),))


def chose(graph: Graph, rule: SiteRule, known: Context) -> DecidedGraph:
    """Every site rewritten by its first offer, however long that takes: for what comes after the decision."""
    captured = graph.captured()
    frame = ProblemTemplate(captured, graph.sites, rules(rule), known)
    nowhere = PricedGraph(captured, frame, frame.problem(), WorkFailure("Toy", ""), KernelContext(known.machine))
    chosen = tuple(Chosen(each, rule.propose(each, each.site.tokens, known)[0]) for each in graph.sites)
    return DecidedGraph(nowhere, (), chosen, None)
