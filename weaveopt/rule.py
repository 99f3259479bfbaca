"""What a rule is: a pattern, its conditions, its cost and its replacement.

A rule is one file in `rewrites/`. It finds sites in a captured graph, names the candidates of a site with
their estimates, says how much symmetric memory a chosen candidate needs, and splices its replacement in.
It never looks at another rule, and holds no threshold: those come from the cost model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.fx as fx

from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.fabrics.topology import Topology
from weaveopt.records.candidate import Candidate
from weaveopt.records.memory import Placement, RegionNeed
from weaveopt.records.report import Decision
from weaveopt.records.site import Site


@dataclass(frozen=True)
class Context:
    """What every step and rule may ask, alike on all ranks but for `topologies[...].group.rank`."""

    config: Config
    machine: Machine
    topologies: Mapping[str, Topology]
    """By process-group name: every group that the graph communicates in."""


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
    numbers: tuple[torch.SymFloat, ...] = ()
    """Those that the rewrites in it take as the numbers they are in this call, once it is rewritten."""


@dataclass(frozen=True)
class Match:
    """Where a site lies in the graph. Rules extend it with the nodes that their replacement reads."""

    interior: frozenset[fx.Node]
    """Nodes that disappear with the rewrite; two sites that share one cannot both be rewritten."""
    sharded_input: fx.Node | None = None
    """A value of which this site reads only its own token rows."""
    sharded_output: fx.Node | None = None
    """A value that this site can produce for its own token rows only."""
    landing_output: fx.Node | None = None
    """A value whose rows peers can write straight to the memory in which its readers find them."""
    numbers: tuple[torch.SymFloat, ...] = ()
    """Python floats that the rewrite takes as the numbers they are in this call; with others it is compiled again."""


@dataclass(frozen=True)
class Finding:
    """A site and, if the rule may rewrite it, where it lies."""

    site: Site
    match: Match | None


@dataclass(frozen=True)
class ArenaNeed:
    """Symmetric memory of one site: twice the partial result (used in turn) and the rows handed out."""

    partial_bytes: int
    output_bytes: int


class Rule(Protocol):
    """One way to rewrite. All methods are pure but `replace`, which edits the graph."""

    @property
    def name(self) -> str:
        """File stem, and the word that users write in `disable`."""
        ...

    def find(self, graph: fx.Graph, context: Context) -> list[Finding]:
        """Every site, in graph order; those that may not be rewritten carry their rejections and no match."""
        ...

    def candidates(self, site: Site, context: Context, usable_only: bool = False) -> tuple[Candidate, ...]:
        """All lowerings of a matched site, allowed or rejected, each with its estimate where one can be made.

        With `usable_only` rejected ones may be missing; the others are the same, and in the same order.
        A function of the site's group and workload: sites that have those alike are asked for once.
        """
        ...

    def need(self, decision: Decision) -> ArenaNeed | RegionNeed:
        """What the chosen candidate needs of the arena of its group; regions, where its fabric joins GPUs."""
        ...

    def replace(
        self, graph: fx.Graph, match: Match, decision: Decision, placement: Placement, context: Context
    ) -> tuple[str, ...]:
        """Splice the replacement in; the graph is valid after it. Returns a line for each change of rounding."""
        ...
