"""Price: the time of a graph as it is, and of each candidate at its sites.

The time of a graph is that of its timeline: kernels in graph order, collectives and the lowerings of rewritten sites
where nothing waits for them concurrently with those. The baseline of a site is the price of its own nodes, so nothing
is counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch.fx as fx

from weaveopt.cost_model import measured_contention, schedule
from weaveopt.cost_model.energy import graph_energy
from weaveopt.cost_model.gemm import power_at_clock
from weaveopt.inductor.calls import COLLECTIVE
from weaveopt.inductor.kernels import GraphKernel, KernelContext, outside
from weaveopt.pipeline.problem import Problem, ProblemTemplate
from weaveopt.pipeline.timeline import Placed, Timeline, timeline
from weaveopt.records.candidate import Estimate, stream_of
from weaveopt.records.report import Decision, OutsideWork, WorkFailure
from weaveopt.records.task import Stream, Task
from weaveopt.rule import CapturedGraph, Context


@dataclass(frozen=True)
class PricedGraph:
    """A graph, its sites with their candidates, and the kernels outside of them."""

    captured: CapturedGraph
    frame: ProblemTemplate
    problem: Problem
    kernels: tuple[GraphKernel, ...] | WorkFailure
    """Outside the sites. The decision rests on the sites alone: no graph stays unrewritten for want of the others."""
    surroundings: KernelContext
    ratio: float = 1.0
    """Tokens of the calls that are priced, relative to those of the captured graph."""

    @cached_property
    def work(self) -> tuple[OutsideWork, ...] | WorkFailure:
        """The kernels outside the sites, for the report."""
        if isinstance(self.kernels, WorkFailure):
            return self.kernels
        order = self.order
        by_name = {node.name: index for node, index in order.items()}
        # A site runs after the last node that its collectives wait for, a local one after its last node.
        positions = [
            max(
                (by_name[name] for name in site.found.site.collectives if name in by_name),
                default=max((order[node] for node in site.found.nodes), default=0),
            )
            for site in self.problem.sites
        ]
        rows = []
        for kernel in self.kernels:
            us = self.surroundings.us(kernel)
            if us > 0.0:
                after = sum(position < order[kernel.node] for position in positions)
                rows.append(OutsideWork(kernel.module, kernel.kind, us, after))
        return tuple(rows)

    @cached_property
    def baseline(self) -> Timeline | None:
        """Timeline of the whole graph with every site left as it is."""
        return self.timeline({})

    def decided(self, decisions: Sequence[Decision], tasks: Mapping[str, tuple[Task, ...]]) -> Timeline | None:
        """Timeline of the whole graph with these decisions carried out; None if not all of its kernels could be priced.

        `tasks` are the lowerings of rewritten sites that have more than one task, by site id.
        """
        rewritten = {
            index: (each.chosen.estimate, tasks.get(each.site.id, ()))
            for index, each in enumerate(decisions)
            if each.rewritten and each.chosen.estimate is not None
        }
        return self.timeline(rewritten)

    def library_kernels(self, rewritten: Sequence[bool]) -> tuple[GraphKernel, ...]:
        """Kernels that run unmodified where these sites are rewritten and the others left."""
        outside = () if isinstance(self.kernels, WorkFailure) else self.kernels
        left = [index for index, each in enumerate(rewritten) if not each]
        inside = (self.frame.kernels(index, self.problem.sites[index].found.nodes) for index in left)
        return (*outside, *(kernel for kernels in inside for kernel in kernels))

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        return {node: index for index, node in enumerate(self.captured.graph.nodes)}

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {node.name: index for node, index in self.order.items()}

    def timeline(self, rewritten: Mapping[int, tuple[Estimate, tuple[Task, ...]]]) -> Timeline | None:
        """Timeline with the sites at these positions rewritten: estimates of all their nodes, and lowerings."""
        if isinstance(self.kernels, WorkFailure):
            return None
        prices = [self.surroundings.us(kernel, self.ratio) for kernel in self.kernels]
        places = [self._placed(kernel, float(us)) for kernel, us in zip(self.kernels, prices, strict=True)]
        drawing = [(kernel.name, float(us)) for kernel, us in zip(self.kernels, prices, strict=True)]
        counted: set[fx.Node] = set()
        # Sites may share nodes: those of rewritten ones first, since their estimates are of all their nodes.
        for index in sorted(range(len(self.problem.sites)), key=lambda index: index not in rewritten):
            nodes = self.problem.sites[index].found.nodes
            if index not in rewritten:
                kernels = self.frame.kernels(index, nodes - counted)
                times = [self.surroundings.us(kernel, self.ratio) for kernel in kernels]
                places.extend(self._placed(kernel, float(us)) for kernel, us in zip(kernels, times, strict=True))
                prices.extend(times)
                drawing.extend((kernel.name, float(us)) for kernel, us in zip(kernels, times, strict=True))
            else:
                estimate, tasks = rewritten[index]
                shared = self.surroundings.estimate(self.frame.kernels(index, nodes & counted), self.ratio)
                prices.append(estimate.price - shared.price)
                # What hides other work takes time off, and no energy.
                drawing.extend((term.name, float(term.us)) for term in estimate.terms if term.us > 0)
                drawing.extend((term.name, -float(term.us)) for term in shared.terms)
                us = max(estimate.us - shared.us, 0.0)
                site = self.problem.sites[index].found.site
                lowered = (
                    replace(task, name=task.name or site.kind, module=site.module) for task in self._lowered(us, tasks)
                )
                places.append(Placed(self._place(index, nodes, tasks), tuple(lowered)))
            counted |= nodes
        energy = graph_energy(power_at_clock(self.surroundings.machine), drawing)
        computed_us = sum(us for name, us in drawing if stream_of(name) is Stream.COMPUTE)
        return timeline(places, self._by_name, self.surroundings.machine, prices, energy, computed_us)

    def _place(self, index: int, nodes: frozenset[fx.Node], tasks: tuple[Task, ...]) -> int:
        """Position of a rewritten site: its last node's; of one whose exchange is begun that of its collective."""
        collectives = self.problem.sites[index].found.site.collectives
        if collectives and any(task.ends_before for task in tasks):
            return self._by_name[collectives[0]]
        return max(self.order[node] for node in nodes)

    def _placed(self, kernel: GraphKernel, us: float) -> Placed:
        """A kernel at its place; a collective of the library runs until its wait."""
        if kernel.kind != COLLECTIVE:
            return Placed(self.order[kernel.node], (Task(us, name=kernel.name, module=kernel.module),))
        ctas = self.surroundings.library_ctas(kernel)
        users = [user for user in kernel.node.users if user in self.order]
        reader = min(users, key=self.order.__getitem__).name if users else self.captured.graph.output_node().name
        task = Task(us, Stream.COMMUNICATION, name=kernel.name, ctas=ctas, ends_before=reader, module=kernel.module)
        return Placed(self.order[kernel.node], (task,))

    def _lowered(self, us: float, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        """A lowering that takes `us` by itself: its tasks, and before them what else its site runs."""
        if not tasks:
            return (Task(us),)
        alone_us = schedule(tasks, measured_contention(self.surroundings.machine)).us
        if us < alone_us:  # what others count already is taken off evenly
            return tuple(replace(task, us=task.us * us / alone_us) for task in tasks)
        # What begins ahead of the site does not wait for the site's own kernels.
        first = Task(us - alone_us)
        return (
            first,
            *(
                replace(task, waits_for=(*(() if task.begins_after else (0,)), *(each + 1 for each in task.waits_for)))
                for task in tasks
            ),
        )


def price(captured: CapturedGraph, frame: ProblemTemplate, problem: Problem, context: Context) -> PricedGraph:
    """Price the kernels of `captured` outside its sites; `problem` holds the prices of the sites."""
    surroundings = KernelContext.of(context.machine, context.topologies.values())
    kernels: tuple[GraphKernel, ...] | WorkFailure
    try:
        sites = [found.nodes for found in frame.sites]
        kernels = outside(captured.graph, sites, context.machine.device, context.topologies, captured.tokens)
    except Exception as error:  # a graph of a form never seen: what it runs outside its sites is not known
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        kernels = WorkFailure(type(error).__name__, first)
    return PricedGraph(captured, frame, problem, kernels, surroundings)
