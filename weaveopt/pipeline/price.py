"""Price: the time of a graph as it is, and of each candidate at its sites.

The time of a graph is that of a schedule on two streams: kernels in graph order, collectives concurrently with those
that need not wait for them. The baseline of a site is the price of its own nodes, so nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.fx as fx

from weaveopt.cost_model.schedule import Stream, Task, schedule_streams, stream_contention
from weaveopt.inductor.calls import COLLECTIVE
from weaveopt.inductor.kernels import Kernel, Surroundings, outside
from weaveopt.pipeline.problem import Frame, Problem
from weaveopt.records.report import Decision, Work, WorkFailure
from weaveopt.rule import CapturedGraph, Context


@dataclass(frozen=True)
class PricedGraph:
    """A graph, its sites with their candidates, and the kernels outside of them."""

    captured: CapturedGraph
    frame: Frame
    problem: Problem
    kernels: tuple[Kernel, ...] | WorkFailure
    """Outside the sites. The decision rests on the sites alone: no graph stays unrewritten for want of the others."""
    surroundings: Surroundings

    @cached_property
    def work(self) -> tuple[Work, ...] | WorkFailure:
        """The kernels outside the sites, for the report."""
        if isinstance(self.kernels, WorkFailure):
            return self.kernels
        order = self._order
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
                rows.append(Work(kernel.module, kernel.kind, us, after))
        return tuple(rows)

    @property
    def baseline_us(self) -> float | None:
        """Time of the whole graph with every site left as it is."""
        return self._scheduled_us(())

    def predicted_us(self, decisions: Sequence[Decision]) -> float | None:
        """Time of the whole graph with these decisions carried out; None if not all of its kernels could be priced."""
        return self._scheduled_us(decisions)

    @cached_property
    def _order(self) -> dict[fx.Node, int]:
        return {node: index for index, node in enumerate(self.captured.graph.nodes)}

    def _scheduled_us(self, decisions: Sequence[Decision]) -> float | None:
        if isinstance(self.kernels, WorkFailure):
            return None
        order = self._order
        items: list[tuple[int, Kernel | float]] = [(order[kernel.node], kernel) for kernel in self.kernels]
        rewritten = {
            index for index, decision in enumerate(decisions) if decision.rewritten and decision.chosen.estimate
        }
        counted: set[fx.Node] = set()
        # Sites may share nodes: those of rewritten ones first, since their estimates are of all their nodes.
        for index in sorted(range(len(self.problem.sites)), key=lambda index: index not in rewritten):
            nodes = self.problem.sites[index].found.nodes
            estimate = decisions[index].chosen.estimate if index in rewritten else None
            if estimate is None:
                items.extend((order[kernel.node], kernel) for kernel in self.frame.kernels(index, nodes - counted))
            else:
                shared = self.surroundings.estimate(self.frame.kernels(index, nodes & counted))
                items.append((max(order[node] for node in nodes), max(estimate.us - shared.us, 0.0)))
            counted |= nodes
        tasks = self._tasks(sorted(items, key=lambda item: item[0]))
        return schedule_streams(tasks, *stream_contention(self.surroundings.machine)).us

    def _tasks(self, items: Sequence[tuple[int, Kernel | float]]) -> list[Task]:
        """Schedule tasks in graph order. A collective starts when everything enqueued before it is done; consumers
        of its wait wait for it."""
        tasks: list[Task] = []
        pending: list[tuple[int, int]] = []
        last_computed: int | None = None
        for position, item in items:
            if isinstance(item, Kernel) and item.kind == COLLECTIVE:
                before = () if last_computed is None else (last_computed,)
                tasks.append(Task(self.surroundings.us(item), Stream.COMMUNICATION, before))
                pending.append((_waited_at(item.node, self._order), len(tasks) - 1))
                continue
            due = tuple(task for wait, task in pending if wait <= position)
            pending = [each for each in pending if each[0] > position]
            us = self.surroundings.us(item) if isinstance(item, Kernel) else item
            tasks.append(Task(us, Stream.COMPUTE, due))
            last_computed = len(tasks) - 1
        return tasks


def _waited_at(collective: fx.Node, order: dict[fx.Node, int]) -> int:
    return min((order[user] for user in collective.users if user in order), default=len(order))


def price(captured: CapturedGraph, frame: Frame, problem: Problem, context: Context) -> PricedGraph:
    """Price the kernels of `captured` outside its sites; `problem` holds the prices of the sites."""
    surroundings = Surroundings.of(context.machine, context.topologies.values())
    kernels: tuple[Kernel, ...] | WorkFailure
    try:
        sites = [found.nodes for found in frame.sites]
        kernels = outside(captured.graph, sites, context.machine.device, context.topologies)
    except Exception as error:  # a graph of a form never seen: what it runs outside its sites is not known
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        kernels = WorkFailure(type(error).__name__, first)
    return PricedGraph(captured, frame, problem, kernels, surroundings)
