"""Interfaces of matchers and rules, and the records that pipeline steps pass to them.

A matcher finds the sites of one kind. A site rule proposes candidates at sites of the kinds that it supports, asks for
memory and splices its replacement in. A graph rule proposes variants of a whole graph. Rules are independent of each
other, and none holds a threshold. Else there are three optional hooks: `SettlesSites`, `RelatesSites`, `HooksInductor`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.fx as fx

from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.cost_model.timed import NOTHING_TIMED
from weaveopt.fabrics.topology import Topology
from weaveopt.graph.facts import tokens_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Values
from weaveopt.records.inductor_hooks import InductorHook
from weaveopt.records.memory import Buffer, PlacedBuffer
from weaveopt.records.order import ANY_ORDER, Order
from weaveopt.records.site import Site, TokenCounts
from weaveopt.records.task import Stream, Task


@dataclass(frozen=True)
class Context:
    """Facts that every step and rule may read; the same on all ranks except for `topologies[...].group.rank`."""

    config: Config
    machine: Machine
    topologies: Mapping[str, Topology]
    """Topology of each process group in which the graph communicates, by the group's name."""
    not_measured: Rejection | None = None
    """Why no rule may be used unless it is forced, or the site is local and kernels were timed: a profile stands in."""
    phase: str = ""
    """Phase of the captured graph, as `CapturedGraph.phase`."""

    def against(self, rule: str, site: Site | None = None) -> Rejection | None:
        """Reason why `rule` may not be used at a site, or at none where `site` is None; None if it may."""
        if rule in self.config.disable:
            return Rejection("disabled", "the rule is switched off by an option", (("rule", rule),))
        timed = site is not None and not site.groups and self.machine.timed != NOTHING_TIMED
        return None if timed or rule in self.config.force else self.not_measured


@dataclass(frozen=True)
class CapturedGraph:
    """A normalized copy of one graph, and what it is."""

    name: str
    phase: str
    """`prefill`, `decode`, `inference`, `forward` or `backward`."""
    tokens: int
    groups: tuple[str, ...]
    """Names of the process groups that it communicates in."""
    graph: fx.Graph
    symbolic_tokens: torch.SymInt | None = None
    """The token count that most all-reduces have, if that is no number."""
    variant: str = "captured"
    rule: str = ""
    """The graph rule that made this variant; empty for the graph as it was captured."""
    rejections: tuple[Rejection, ...] = ()
    """Reasons why the variant may not be used. A rule that finds one need not build the graph."""
    parameters: Values = ()
    """Parameters that the rule chose, for the report: `(("cut", "2176 + 1920 of 4096"),)`."""
    order: Order = ANY_ORDER
    """Order of a variant's communication, which its overlap rests on: kept through Inductor, and read back."""


@dataclass(frozen=True)
class GraphWork:
    """Work that a decided graph does at a node, for rules that judge a variant before they build it."""

    node: fx.Node
    stream: Stream
    us_at: Callable[[float], float]
    """Microseconds at a share of the graph's tokens."""
    ctas: int = 0
    """CTAs that it takes, of a collective; 0: not known."""


@dataclass(frozen=True)
class Exposure:
    """Communication of a decided graph that no computation hides."""

    by_group: Mapping[str, float]
    """Microseconds by process group."""
    total_us: float | None = None
    """Predicted time of the whole graph; None where not all of it could be priced."""
    work: tuple[GraphWork, ...] = ()
    """All that the graph runs, in its order: collectives as the library's, other rewritten sites as decided."""

    @property
    def us(self) -> float:
        return sum(self.by_group.values())


class Facts(Protocol):
    """Facts of a site that do not depend on its token count: frozen, hashable, without graph nodes."""

    def values(self) -> Values:
        """Name-value pairs for the report and for the comparison between ranks."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class FoundSite:
    """A site in its graph."""

    site: Site
    nodes: frozenset[fx.Node]
    """The nodes that a rewrite may replace. What they cost as they are is the site's baseline."""
    facts: Facts | None = None
    """None where the matcher did not recognize the place; `site.rejections` says why."""
    structure: object = None
    """Nodes by their role, as a record of this kind's matcher."""
    numbers: tuple[torch.SymFloat, ...] = ()
    """Python floats that a rewrite takes as the numbers they are in this call; with others it is compiled again."""
    token_value: fx.Node | None = None
    """A node whose value `[..., hidden]` has the site's token count; None where the count is no part of its shape."""
    consumers: frozenset[fx.Node] = frozenset()
    """Consumers of the site that a rewrite may replace too: GEMMs that alone read its result. They are not part of
    its baseline; a rewrite's estimate at the site includes its effect on them."""

    @property
    def is_symbolic(self) -> bool:
        """True if the token count is symbolic; `site.tokens` may still be priced at a single count."""
        return bool(self.token_symbol)

    @property
    def token_symbol(self) -> str:
        """The symbolic token count, as an expression of the graph's symbols; empty if it is a number. Counts that are
        equal in the captured call differ in others where this does."""
        value = None if self.token_value is None else tensor_of(self.token_value)
        tokens = None if value is None else tokens_of(value)
        return str(tokens) if tokens is not None and not isinstance(tokens, int) else ""


@dataclass(frozen=True)
class Proposal:
    """A candidate, the nodes that it replaces, and what its rule has to remember of it."""

    candidate: Candidate
    consumes: frozenset[fx.Node] = frozenset()
    """Nodes that are removed, of the site or its consumers. Proposals of two sites that share one exclude each
    other."""
    plan: object = None
    """The rule's own frozen record. Other code sees of it what a `Protocol` names: `rewrites.reduction.plan`."""
    tasks: tuple[Task, ...] = ()
    """The lowering: its work on each stream, as long together as the candidate's own estimate. None: one blocking call
    on the compute stream, which waits for peers if the site communicates."""

    @property
    def is_open(self) -> bool:
        """True if other work of the graph may run between begin and end of the lowering."""
        return any(task.is_open for task in self.tasks)

    def waits_in_line(self, site: Site) -> bool:
        """True if its kernels wait for peers in turn with the graph's computation, not on the communication stream."""
        if not self.tasks:
            return bool(site.groups)
        return any(task.stream is Stream.COMMUNICATION and not task.is_open for task in self.tasks)


@dataclass(frozen=True)
class Chosen:
    """A site that is rewritten, and how."""

    found: FoundSite
    proposal: Proposal


@dataclass(frozen=True)
class BufferRequest:
    """A buffer that a rewritten site needs."""

    buffer: Buffer
    last_reader: fx.Node | None = None
    """Last reader of a buffer that lives until it is read."""
    first_writer: fx.Node | None = None
    """Node of the graph after which the buffer is written to; None: the site's call writes to it first."""


@dataclass(frozen=True)
class Memory:
    """Arena memory that a rewritten site needs."""

    buffers: tuple[BufferRequest, ...] = ()
    channel: str = "main"
    """Sites whose calls follow one another on one stream share a channel."""
    wiring: tuple[str, ...] = ()
    """Exchanges between hosts that the site's calls make, by name."""
    reads_exported: bool = False
    """True if its calls read weights in the memory of peers (`weaveopt/fabrics/exported.py`)."""


@dataclass(frozen=True)
class Placement:
    """Offsets and channel of a rewritten site in the arena of its group."""

    buffers: Mapping[str, PlacedBuffer]
    channel: int = 0


@dataclass(frozen=True)
class PricedSite:
    """A site with its baseline and all proposals, and those of them that may be chosen."""

    found: FoundSite
    baseline: Estimate
    proposals: tuple[Proposal, ...]
    """Proposals of the rules. Their estimates are of the whole site: inserted nodes, and those that stay."""
    choices: tuple[int, ...]
    """Positions of the allowed proposals: choice `i` of the site; after them the choice to leave it."""
    forced: frozenset[str] = frozenset()
    """Rules that are not charged the error of their saving."""

    @property
    def replaces_consumers(self) -> bool:
        """True if an allowed proposal also replaces consumers of the site."""
        return any(self.proposals[position].consumes - self.found.nodes for position in self.choices)

    @property
    def num_choices(self) -> int:
        return len(self.choices) + 1

    def proposal(self, choice: int) -> Proposal | None:
        """Return the proposal of a choice; None: the site is left as it is."""
        return self.proposals[self.choices[choice]] if choice < len(self.choices) else None


class Interaction(Protocol):
    """Joint effect of choices at a few sites; a property of the graph, priced at any token count."""

    @property
    def sites(self) -> tuple[int, ...]:
        """Positions of the sites. The first one's estimate is what changes."""
        ...

    @property
    def term(self) -> str:
        """Name of the term of that estimate which changes."""
        ...

    @property
    def key(self) -> Hashable:
        """Interactions with equal keys, whose sites have pairwise equal facts, have equal terms."""
        ...

    def terms(self, members: Sequence[PricedSite]) -> Mapping[tuple[int, ...], float]:
        """Choices of the members, in their order -> microseconds, negative where they help; not listed: 0."""
        ...


class Matcher(Protocol):
    """Finds the sites of one kind. Pure."""

    @property
    def kind(self) -> str: ...

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        """Every site in graph order; those that no rule may rewrite carry their rejections and no facts."""
        ...


class SiteRule(Protocol):
    """One way to rewrite sites. All methods are pure but `replace`, which edits the graph."""

    @property
    def name(self) -> str:
        """File stem, and the word that users write in `disable`."""
        ...

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of sites that the rule supports."""
        ...

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        """Propose all candidates for a site and these token counts, allowed or rejected, each with the estimate of what
        replaces the nodes that it consumes, if one can be made.

        With `usable_only` rejected ones may be missing; the others are the same, and in the same order.
        """
        ...

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        """Return the arena memory that a chosen proposal needs; None if it needs none."""
        ...

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        """Splice the replacement in; the graph is valid after it. Returns a line for each change of rounding."""
        ...


@runtime_checkable
class RelatesSites(Protocol):
    """A rule whose choices at several sites cost or save something together."""

    def interactions(self, sites: Sequence[FoundSite]) -> Sequence[Interaction]: ...


@runtime_checkable
class SettlesSites(Protocol):
    """A rule whose calls have flags that depend on what was chosen around them."""

    def settle(self, chosen: Sequence[Chosen], context: Context) -> Mapping[str, Proposal]:
        """Choose the final form of proposals after the decision; `chosen` are all rewritten sites of the graph.
        Returns site id -> one of that site's proposals."""
        ...


@runtime_checkable
class HooksInductor(Protocol):
    """A rule whose operators Inductor has to treat specially."""

    def inductor_hooks(self) -> Sequence[InductorHook]: ...


class GraphRule(Protocol):
    """A rule that rewrites a whole graph. Pure: the captured graph is not modified.

    The sites of its variants are found, priced and decided like any graph's. The hooks of site rules
    (`HooksInductor`, `RelatesSites`, `SettlesSites`) are asked of it too.
    """

    @property
    def name(self) -> str: ...

    def variants(self, captured: CapturedGraph, exposure: Exposure, context: Context) -> Sequence[CapturedGraph]:
        """Return copies of the graph that compute the same; those that may not be used carry rejections.

        Asked after the captured graph was decided, with what is exposed in it.
        """
        ...


@runtime_checkable
class OwnsMemory(Protocol):
    """A graph rule whose own operators need arena memory."""

    def graph_memory(self, variant: CapturedGraph, context: Context) -> Mapping[str, tuple[Fabric, Memory]]:
        """Fabric and memory by process group. Its buffers are in use as long as the graph runs."""
        ...

    def settle_graph(
        self, variant: CapturedGraph, chosen: Sequence[Chosen], placements: Mapping[str, Placement], context: Context
    ) -> None:
        """Edit the variant's own operators once its sites are decided: offsets and channels from `placements`, by
        group, and flags that depend on `chosen`, all rewritten sites."""
        ...


@dataclass(frozen=True)
class RuleSet:
    """The matchers and rules of one compile."""

    matchers: tuple[Matcher, ...]
    site_rules: tuple[SiteRule, ...]
    graph_rules: tuple[GraphRule, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(rule.name for rule in self.every)

    @property
    def every(self) -> tuple[SiteRule | GraphRule, ...]:
        return (*self.site_rules, *self.graph_rules)

    def inductor_hooks(self) -> list[InductorHook]:
        return [hook for rule in self.every if isinstance(rule, HooksInductor) for hook in rule.inductor_hooks()]

    def of_kind(self, kind: str) -> tuple[SiteRule, ...]:
        return tuple(rule for rule in self.site_rules if kind in rule.kinds)

    def named(self, name: str) -> SiteRule:
        return next(rule for rule in self.site_rules if rule.name == name)
