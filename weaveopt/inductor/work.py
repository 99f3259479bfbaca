"""The walk over a captured graph that prices every kernel outside its sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt import cost_model
from weaveopt.graph.facts import module_of
from weaveopt.inductor.calls import COLLECTIVE, MEMORY, call_us, kind_of
from weaveopt.inductor.fused import fuse, traffic_bytes
from weaveopt.inductor.lowered import Lowering
from weaveopt.records.report import Work
from weaveopt.rule import Context, Finding
from weaveopt.sites.norms import Norm, find_norms
from weaveopt.sites.reduction import Reduced, follow, product_of


@dataclass(frozen=True)
class _Place:
    """Where a site lies: what its estimate covers."""

    nodes: frozenset[fx.Node]
    product: fx.Node | None
    """Covered as well, but runs when its turn comes, before the site's collective."""


def work_of(graph: fx.Graph, findings: Sequence[Finding], context: Context) -> tuple[Work, ...]:
    """Every kernel that `graph`, not rewritten yet, runs outside `findings`, in the order of the graph.

    A site's estimate covers its product, collectives, additions and norms; a finding without a workload has no
    estimate, and its collective is work like any other. Times are of one rank, with the crowding of CPU ranks.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    places = _places(graph, findings)
    site_of = {node: index for index, place in enumerate(places) if place is not None for node in place.nodes}
    covered = {place.product for place in places if place is not None and place.product is not None} | site_of.keys()
    lowering = Lowering(context.machine.device)
    entered: set[int] = set()
    for node in graph.nodes:
        index = site_of.get(node)
        if index is None:
            lowering.lower(node)
        elif index not in entered:
            entered.add(index)
            _enter(lowering, places[index], order)
    return _priced(lowering, covered, _positions(findings, order), order, context)


def _places(graph: fx.Graph, findings: Sequence[Finding]) -> list[_Place | None]:
    names = {name for finding in findings for name in finding.site.collectives}
    collectives = {node.name: node for node in graph.nodes if node.name in names}
    norms: dict[fx.Node, list[Norm]] | None = None
    places: list[_Place | None] = []
    for finding in findings:
        workload, covered = finding.site.workload, frozenset[fx.Node]()
        mine = [collectives[name] for name in finding.site.collectives if name in collectives]
        if finding.match is not None:
            covered = finding.match.interior
        elif workload is not None and mine:
            norms = find_norms(graph) if norms is None else norms
            reduced = follow(mine[0], norms)
            if isinstance(reduced, Reduced):
                covered = reduced.passed | frozenset(reduced.norm.nodes if reduced.norm is not None else ())
        product = None
        if workload is not None and workload.product is not None:
            made = [product_of(node.args[0]) for node in reversed(mine) if isinstance(node.args[0], fx.Node)]
            product = next((node for node in made if node is not None and _depth(node) == workload.product.k), None)
        places.append(_Place(covered, product) if covered else None)
    return places


def _depth(product: fx.Node) -> int:
    value = product.args[-2].meta["val"]  # type: ignore[union-attr]
    return int(value.shape[-1])


def _inputs(place: _Place) -> list[fx.Node]:
    """What a site reads, each once, in no order."""
    return list({each: None for node in place.nodes for each in node.all_input_nodes if each not in place.nodes})


def _enter(lowering: Lowering, place: _Place | None, order: Mapping[fx.Node, int]) -> None:
    assert place is not None
    nodes = sorted(place.nodes, key=order.__getitem__)
    inputs = sorted(_inputs(place), key=order.__getitem__)
    outputs = [node for node in nodes if any(user not in place.nodes for user in node.users)]
    lowering.site(nodes[0], inputs, outputs)


def _positions(findings: Sequence[Finding], order: Mapping[fx.Node, int]) -> list[int]:
    """The node after which each site runs: the last one that its collectives wait for."""
    by_name = {node.name: index for node, index in order.items()}
    return [max((by_name[n] for n in f.site.collectives if n in by_name), default=0) for f in findings]


def _priced(
    lowering: Lowering,
    covered: set[fx.Node],
    positions: Sequence[int],
    order: Mapping[fx.Node, int],
    context: Context,
) -> tuple[Work, ...]:
    steps = lowering.steps
    readers: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        for value, _ in step.reads:
            readers.setdefault(value, []).append(index)
    machine = context.machine
    known = context.topologies.values()
    crowding = max((machine.crowding(each.world, each.num_hosts) for each in known), default=1.0)
    rows: list[tuple[int, Work]] = []
    for kernel in fuse(steps):
        node = max((steps[index].node for index in kernel.steps), key=order.__getitem__)
        kind, us = MEMORY, 0.0
        if not kernel.call:
            num_bytes = traffic_bytes(kernel, steps, readers, lowering.escaping, lowering.sizes)
            us = cost_model.memory_us(machine, num_bytes) * crowding
        elif node not in covered:
            kind = kind_of(node.target) or ""
            us = call_us(node, machine, context.topologies) if kind else 0.0
            us *= 1.0 if kind == COLLECTIVE else crowding
        if us > 0.0:
            us += cost_model.host_us(machine) * crowding
            after = sum(position < order[node] for position in positions)
            rows.append((order[node], Work(module_of(node), kind, us, after)))
    return tuple(work for _, work in sorted(rows, key=lambda row: row[0]))
