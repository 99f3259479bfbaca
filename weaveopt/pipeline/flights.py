"""Flights: exchanges of a graph while which other work can run, and what may not run meanwhile.

Kernels that wait for peers need all of their CTAs resident at once. If two of them wait at a time, one on each stream,
the first can keep the second from starting on one rank and the second the first on another, and none ever ends. So
while an exchange is in flight, nothing waits for peers in line with the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch.fx as fx

from weaveopt.graph.pattern import tensor_of
from weaveopt.inductor.calls import COLLECTIVE, kind_of
from weaveopt.rule import FoundSite, PricedSite, Proposal
from weaveopt.solver.selection import EXCLUDED, Interaction


@dataclass(frozen=True)
class Flight:
    """A collective between whose start and first reader the graph has other work."""

    collective: fx.Node
    site: int | None
    """Position of the site that it belongs to; None: it is outside all sites, and stays the library's."""
    meanwhile: tuple[int, ...]
    """Positions of the sites with nodes between start and first reader."""

    @property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """The sites of each exclusion, as `waits_excluded` gives them."""
        return tuple((other,) if self.site is None else (self.site, other) for other in self.meanwhile)


def flights(graph: fx.Graph, sites: Sequence[FoundSite]) -> tuple[Flight, ...]:
    """Every collective of `graph` that is in flight while other nodes with results run, in graph order."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    nodes = list(order)
    owners: dict[fx.Node, list[int]] = {}
    for index, found in enumerate(sites):
        for node in found.nodes:
            owners.setdefault(node, []).append(index)
    found_flights: list[Flight] = []
    for node in nodes:
        if node.op != "call_function" or kind_of(node.target) != COLLECTIVE:
            continue
        end = min((order[user] for user in node.users), default=len(nodes))
        between = [each for each in nodes[order[node] + 1 : end] if each.op != "placeholder"]
        if not any(tensor_of(each) is not None for each in between):
            continue
        own = owners.get(node, [None])[0]
        others = {index for each in between for index in owners.get(each, ())} - {own}
        found_flights.append(Flight(node, own, tuple(sorted(index for index in others if index is not None))))
    return tuple(found_flights)


def waits_excluded(found: Sequence[Flight], sites: Sequence[PricedSite]) -> tuple[Interaction, ...]:
    """Choices that would wait for peers in line while an exchange is in flight.

    An exchange is in flight where its site is left to the library, and where a lowering begins and ends it.
    """
    exclusions = []
    for flight in found:
        for other in flight.meanwhile:
            in_line = [choice for choice in range(sites[other].num_choices) if _waits_in_line(sites[other], choice)]
            terms: dict[tuple[int, ...], float]
            if flight.site is None:
                terms = {(choice,): EXCLUDED for choice in in_line}
            else:
                own = sites[flight.site]
                flying = [choice for choice in range(own.num_choices) if _is_in_flight(own.proposal(choice))]
                terms = dict.fromkeys(product(flying, in_line), EXCLUDED)
            key = (other,) if flight.site is None else (flight.site, other)
            exclusions.append(Interaction(key, terms))
    return tuple(exclusions)


def _is_in_flight(proposal: Proposal | None) -> bool:
    return proposal is None or proposal.is_open


def _waits_in_line(site: PricedSite, choice: int) -> bool:
    proposal = site.proposal(choice)
    return proposal is not None and proposal.waits_in_line(site.found.site)
