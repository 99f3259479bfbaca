"""Order of a graph in parts: stages between two collectives, one part after the other, and which start a wait needs.

    start A · stage of B · start B · wait A · stage of A · start A · wait B · ...

With more parts a wait comes after the starts of all others.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from weaveopt.records.order import Order

SHARED = -1
"""Part of a node that is whole."""


@dataclass
class StageOrder:
    """Stage and part of each node, and the collectives in parts."""

    places: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    starts: list[tuple[fx.Node, ...]] = field(default_factory=list)
    """Starts of each collective, one a part."""
    waits: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Start -> the node that waits for it."""

    def arrange(self, graph: fx.Graph, made: Sequence[fx.Node]) -> Order:
        """Put the nodes of `graph` in order, and return the pairs that keep it."""
        inputs = graph.find_nodes(op="placeholder")
        position = inputs[-1] if inputs else graph._root
        for node in _in_order([each for each in made if each.op != "placeholder"], self.places):
            position.append(node)
            position = node
        at = {node: index for index, node in enumerate(graph.nodes)}
        begun = sorted((start for starts in self.starts for start in starts), key=at.__getitem__)
        needs = _waits_before(graph, self.waits)
        pairs = []
        num_others = max((len(starts) for starts in self.starts), default=1) - 1
        for index, start in enumerate(begun):
            wait = self.waits.get(start)
            for other in begun[index + 1 : index + 1 + num_others]:
                if wait is not None and at[other] < at[wait] and wait not in needs[other]:
                    pairs.append((wait.name, other.name))
        return Order(tuple(pairs))

    def late(self, graph: fx.Graph) -> list[fx.Node]:
        """First starts of collectives that have to wait for a later part's result of the collective before."""
        needs = _waits_before(graph, self.waits)
        found = []
        for before, starts in zip(self.starts, self.starts[1:], strict=False):
            later = {self.waits[start] for start in before[1:] if start in self.waits}
            if later & needs[starts[0]]:
                found.append(starts[0])
        return found


def _in_order(nodes: Sequence[fx.Node], places: Mapping[fx.Node, tuple[int, int]]) -> list[fx.Node]:
    """Topological order in which of all nodes that could come next the one of the first stage and part does."""
    index = {node: at for at, node in enumerate(nodes)}
    missing = {node: sum(each in index for each in node.all_input_nodes) for node in nodes}
    ready = [(*places.get(node, (0, SHARED)), at) for node, at in index.items() if not missing[node]]
    heapq.heapify(ready)
    found = []
    while ready:
        node = nodes[heapq.heappop(ready)[-1]]
        found.append(node)
        for user in node.users:
            if user in missing:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (*places.get(user, (0, SHARED)), index[user]))
    assert len(found) == len(nodes), "the nodes of the new graph form a circle"
    return found


def _waits_before(graph: fx.Graph, waits: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each start the waits that it depends on."""
    bit = {wait: 1 << at for at, wait in enumerate(waits.values())}
    seen: dict[fx.Node, int] = {}
    for node in graph.nodes:
        mask = bit.get(node, 0)
        for each in node.all_input_nodes:
            mask |= seen[each]
        seen[node] = mask
    return {start: frozenset(wait for wait, own in bit.items() if seen[start] & own) for start in waits}
