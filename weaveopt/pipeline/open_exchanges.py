"""Exchanges of a graph while which other work can run, and what may not run meanwhile.

Kernels that wait for peers need all of their CTAs resident at once. If two of them wait at a time, one on each stream,
the first can keep the second from starting on one rank and the second the first on another, and none ever ends. So
while an exchange is in flight, nothing waits for peers in line with the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch.fx as fx

from weaveopt.graph.facts import collectives_in
from weaveopt.graph.pattern import tensor_of
from weaveopt.rule import FoundSite, PricedSite
from weaveopt.solver.selection import EXCLUDED, JointCost


@dataclass(frozen=True)
class OpenExchange:
    """A collective between whose start and end the graph has other work."""

    site: int | None
    """Position of the site that it belongs to; None: it is outside all sites, and stays the library's."""
    is_overlapped: bool
    """True if other work runs before the library's wait, too."""
    before_wait: frozenset[int]
    """Positions of the sites with nodes between the start and the library's wait."""
    before_reader: tuple[int, ...]
    """Those, and the sites with nodes ahead of the first reader of the site's results, where a begun exchange ends."""

    @property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """The sites of each exclusion, as `waits_excluded` gives them."""
        return tuple((other,) if self.site is None else (self.site, other) for other in self.before_reader)


def open_exchanges(graph: fx.Graph, sites: Sequence[FoundSite]) -> tuple[OpenExchange, ...]:
    """Every collective of `graph` while which other nodes with results can run, in graph order."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    nodes = list(order)
    owners: dict[fx.Node, list[int]] = {}
    for index, found in enumerate(sites):
        for node in found.nodes:
            owners.setdefault(node, []).append(index)
    exchanges: list[OpenExchange] = []
    for node in collectives_in(graph):
        own = next(iter(owners.get(node, ())), None)
        inside = frozenset({node}) if own is None else sites[own].nodes
        start, wait = order[node], min((order[user] for user in node.users), default=len(nodes))
        readers = (order[user] for each in inside for user in each.users if user not in inside)
        end = wait if own is None else max(wait, min((each for each in readers if each > start), default=wait))
        is_overlapped = any(tensor_of(each) is not None for each in nodes[start + 1 : wait])
        before_wait = {index for each in nodes[start + 1 : wait] for index in owners.get(each, ())} - {own}
        before_reader = {index for each in nodes[start + 1 : end] for index in owners.get(each, ())} - {own}
        if is_overlapped or before_reader:
            exchanges.append(OpenExchange(own, is_overlapped, frozenset(before_wait), tuple(sorted(before_reader))))
    return tuple(exchanges)


def waits_excluded(found: Sequence[OpenExchange], sites: Sequence[PricedSite]) -> tuple[JointCost, ...]:
    """Choices that would wait for peers in line while an exchange is in flight.

    An exchange is in flight where its site is left to the library, and where a lowering begins and ends it.
    """
    exclusions = []
    for exchange in found:
        for other in exchange.before_reader:
            in_line = [choice for choice in range(sites[other].num_choices) if _waits_in_line(sites[other], choice)]
            terms: dict[tuple[int, ...], float]
            if exchange.site is None:
                terms = {(choice,): EXCLUDED for choice in in_line}
            else:
                own = sites[exchange.site]
                proposals = [own.proposal(choice) for choice in range(own.num_choices)]
                in_flight = [
                    choice
                    for choice, proposal in enumerate(proposals)
                    if (other in exchange.before_wait if proposal is None else proposal.is_open)
                ]
                terms = dict.fromkeys(product(in_flight, in_line), EXCLUDED)
            key = (other,) if exchange.site is None else (exchange.site, other)
            exclusions.append(JointCost(key, terms))
    return tuple(exclusions)


def _waits_in_line(site: PricedSite, choice: int) -> bool:
    proposal = site.proposal(choice)
    return proposal is not None and proposal.waits_in_line(site.found.site)
