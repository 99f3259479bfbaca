"""The kernels that Inductor and libraries run for a graph, or for a set of its nodes, and what each takes.

`outside` prices a graph around its sites, `within` the nodes of one site by themselves. A node is in one of them, so
nothing is counted twice: what a graph takes is the sum of both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt import cost_model
from weaveopt.cost_model import Machine
from weaveopt.fabrics.topology import Topology
from weaveopt.graph.facts import module_of
from weaveopt.inductor.calls import COLLECTIVE, MEMORY, Call, CollectiveCall, call_of, kind_of
from weaveopt.inductor.fused import fuse, traffic_of
from weaveopt.inductor.lowered import GraphLowering
from weaveopt.records.candidate import Estimate, Term


@dataclass(frozen=True)
class MemoryTraffic:
    """A kernel of point-wise operations and reductions: what it reads and writes."""

    scaling_bytes: int
    """Bytes of values that grow with the token count."""
    fixed_bytes: int
    row: int = 1
    """Elements that each result of a reduction is reduced from; 1: the kernel reduces nothing."""

    def us(self, machine: Machine, ratio: float) -> float:
        return cost_model.kernel_us(machine, self.scaling_bytes * ratio + self.fixed_bytes, self.row)


@dataclass(frozen=True)
class GraphKernel:
    """One kernel, wherever in the graph it runs."""

    node: fx.Node
    """The last of its nodes in the order of the graph."""
    kind: str
    """`gemm`, `attention`, `memory` or `collective`."""
    name: str
    """Name of its term in an estimate: the kernel's kind, or the collective's name."""
    work: Call | MemoryTraffic

    @property
    def module(self) -> str:
        return module_of(self.node)


@dataclass(frozen=True)
class KernelContext:
    """Context that a kernel's price depends on in addition to the kernel."""

    machine: Machine
    oversubscription: float = 1.0
    """How many times slower a rank runs because ranks share processors (CPU ranks beyond the cores)."""

    @staticmethod
    def of(machine: Machine, topologies: Iterable[Topology]) -> KernelContext:
        return KernelContext(
            machine, max((machine.oversubscription(each.world, each.num_hosts) for each in topologies), default=1.0)
        )

    def us(self, kernel: GraphKernel, ratio: float = 1.0) -> float:
        """Microseconds of a kernel with `ratio` times the tokens of the captured graph."""
        return self.us_of(kernel.kind, kernel.work, ratio)

    def us_of(self, kind: str, work: Call | MemoryTraffic, ratio: float = 1.0) -> float:
        """The same of what a kernel does, in whatever graph; the host's part included."""
        us = work.us(self.machine, ratio)
        if us <= 0.0:
            return 0.0
        shared = 1.0 if kind == COLLECTIVE else self.oversubscription
        return us * shared + cost_model.host_us(self.machine) * self.oversubscription

    def library_ctas(self, kernel: GraphKernel) -> int:
        """CTAs that a collective of the library takes; 0: not known."""
        hosts = kernel.work.hosts if isinstance(kernel.work, CollectiveCall) else 1
        return cost_model.library_ctas(self.machine, hosts)

    def estimate(self, kernels: Sequence[GraphKernel], ratio: float = 1.0) -> Estimate:
        """The kernels one after the other: a term for each name, in the order of the graph."""
        terms = (Term(self.name_of(kernel, ratio), self.us(kernel, ratio)) for kernel in kernels)
        return Estimate(()).plus(Estimate(tuple(terms)))

    def name_of(self, kernel: GraphKernel, ratio: float = 1.0) -> str:
        """The kernel's name; of a collective between hosts with the algorithm that is priced: `all_reduce tree`."""
        algorithm = kernel.work.algorithm(self.machine, ratio) if isinstance(kernel.work, CollectiveCall) else ""
        return f"{kernel.name} {algorithm}".rstrip()


def outside(
    graph: fx.Graph,
    sites: Sequence[frozenset[fx.Node]],
    device: str,
    topologies: Mapping[str, Topology],
    tokens: int,
) -> tuple[GraphKernel, ...]:
    """Every kernel that `graph`, not rewritten yet, runs outside these sets of nodes, in the order of the graph.

    `tokens` as in `within`.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    site_of: dict[fx.Node, int] = {}
    for number, nodes in enumerate(sites):
        for node in nodes:
            site_of.setdefault(node, number)
    lowering = GraphLowering(device)
    entered: set[int] = set()
    for node in graph.nodes:
        index = site_of.get(node)
        if index is None:
            lowering.lower(node)
        elif kind_of(node.target) not in (None, COLLECTIVE):
            lowering.lower(node)  # a library's kernel at its own place, before the site's collective; or its result
        elif index not in entered:
            entered.add(index)
            _enter(lowering, sites[index], order)
    return _kernels(lowering, order, topologies, site_of.keys(), tokens)


def within(
    nodes: frozenset[fx.Node],
    order: Mapping[fx.Node, int],
    device: str,
    topologies: Mapping[str, Topology],
    tokens: int,
) -> tuple[GraphKernel, ...]:
    """The kernels of these nodes by themselves: what they read is in memory, and what others read of them goes there.

    `tokens` is the count in the captured graph: values of so many rows grow with it.
    """
    lowering = GraphLowering(device)
    for node in sorted(_inputs(nodes), key=order.__getitem__):
        lowering.hold(node)
    ordered = sorted(nodes, key=order.__getitem__)
    for node in ordered:
        lowering.lower(node)
    for node in ordered:
        if any(user not in nodes for user in node.users):
            lowering.keep(node)
    return _kernels(lowering, order, topologies, (), tokens)


def _inputs(nodes: frozenset[fx.Node]) -> list[fx.Node]:
    """Collect the nodes that `nodes` read from outside, each once, in no order."""
    return list({each: None for node in nodes for each in node.all_input_nodes if each not in nodes})


def _enter(lowering: GraphLowering, nodes: frozenset[fx.Node], order: Mapping[fx.Node, int]) -> None:
    """A site as one opaque call; library kernels in it were lowered where they stand."""
    opaque = frozenset(node for node in nodes if kind_of(node.target) in (None, COLLECTIVE))
    ordered = sorted(opaque, key=order.__getitem__)
    inputs = sorted(_inputs(opaque), key=order.__getitem__)
    lowering.site(ordered[0], inputs, [node for node in ordered if any(user not in opaque for user in node.users)])


def _kernels(
    lowering: GraphLowering,
    order: Mapping[fx.Node, int],
    topologies: Mapping[str, Topology],
    covered: Collection[fx.Node],
    tokens: int,
) -> tuple[GraphKernel, ...]:
    steps = lowering.steps
    readers: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        for value, _ in step.reads:
            readers.setdefault(value, []).append(index)
    found: list[GraphKernel] = []
    scaling = lowering.scaling(tokens) if tokens else frozenset()
    for loops in fuse(steps, lowering.device):
        node = max((steps[index].node for index in loops.steps), key=order.__getitem__)
        if not loops.call:
            moved, fixed = traffic_of(loops, steps, readers, lowering.escaping, lowering.sizes, scaling)
            found.append(GraphKernel(node, MEMORY, MEMORY, MemoryTraffic(moved, fixed, loops.reduced)))
        elif node not in covered and (kind := kind_of(node.target)) is not None:
            call = call_of(node, topologies, tokens)
            found.append(GraphKernel(node, kind, call.name if kind == COLLECTIVE else kind, call))
    return tuple(sorted(found, key=lambda kernel: order[kernel.node]))
