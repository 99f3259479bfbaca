"""Plan: named buffers with lifetimes -> arena offsets; channels. All bytes are known before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.fabrics.traits import arena_fabric, header_bytes
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Channel, Lifetime, MemoryPlan
from weaveopt.rule import BufferRequest, CapturedGraph, Context, Memory, OwnsMemory, Placement, RuleSet
from weaveopt.solver.placement import PlacementRequest, arena_bytes, place


@dataclass(frozen=True)
class Planned:
    """The memory of one graph."""

    plans: tuple[MemoryPlan, ...]
    """One for every process group with a rewritten site that needs memory."""
    placements: Mapping[str, Placement]
    """Placement of each rewritten site, by site id, and of what a variant needs for itself."""
    exporting: tuple[str, ...] = ()
    """Groups whose ranks read weights in each other's memory, sorted."""

    def of_variant(self, captured: CapturedGraph) -> dict[str, Placement]:
        """Placement of the variant's own memory, by group."""
        own = {group: self.placements.get(owner_of(captured, group)) for group in captured.groups}
        return {group: placement for group, placement in own.items() if placement is not None}


def owner_of(captured: CapturedGraph, group: str) -> str:
    """Name under which a variant's own memory of a group is placed."""
    return f"{captured.variant} in {group}"


def plan(decided: DecidedGraph, rules: RuleSet, context: Context) -> Planned:
    """Collect the memory that the rules of all rewritten sites need, and the variant's own rule, and place it.

    The calls of one channel follow one another on every rank. A call may reuse the bytes of a buffer of an earlier call
    of the group; a buffer that is read later keeps its bytes through every call that may run before its reader, and
    through the one after those, which waits for the readers of other ranks. One that is written to ahead of its site
    has them from every call on that may run after its writer.
    """
    needs: dict[str, list[Need]] = {}
    exporting: set[str] = set()
    for chosen in decided.chosen:
        memory = rules.named(chosen.proposal.candidate.choice).memory(chosen, context)
        if memory is not None:
            groups = chosen.found.site.groups
            assert len(groups) == 1, f"{chosen.found.site.id}: memory of {len(groups)} groups"
            if memory.reads_exported:
                exporting.update(groups)
                if not memory.buffers:
                    continue
            fabric = chosen.proposal.candidate.fabric
            needs.setdefault(groups[0], []).append(Need(chosen.found.site.id, chosen.found.nodes, fabric, memory))
    captured = decided.priced.captured
    for rule in rules.graph_rules:
        if rule.name == captured.rule and isinstance(rule, OwnsMemory):
            for group, (fabric, memory) in rule.graph_memory(captured, context).items():
                needs.setdefault(group, []).append(Need(owner_of(captured, group), frozenset(), fabric, memory))
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    plans, placements = [], {}
    for group, rows in sorted(needs.items()):
        planned = _plan_group(group, rows, order)
        plans.append(planned)
        channels = {channel.name: channel.index for channel in planned.channels}
        for need in rows:
            placements[need.owner] = Placement(planned.of_site(need.owner), channels[need.memory.channel])
    return Planned(tuple(plans), placements, tuple(sorted(exporting)))


@dataclass(frozen=True)
class Need:
    """Memory that a rewritten site needs, or a variant for itself."""

    owner: str
    nodes: frozenset[fx.Node]
    """The site's; none: the memory is in use as long as the graph runs."""
    fabric: Fabric
    memory: Memory


def _plan_group(group: str, rows: Sequence[Need], order: Mapping[fx.Node, int]) -> MemoryPlan:
    requests: list[PlacementRequest] = []
    for index, need in enumerate(rows):
        for asked in need.memory.buffers:
            first, last = _in_use(index, asked, rows, order) if need.nodes else (0, len(rows) - 1)
            requests.append(PlacementRequest(need.owner, asked.buffer, first, last))
    fabric = arena_fabric({need.fabric for need in rows})
    buffers = place(requests)
    names = dict.fromkeys(need.memory.channel for need in rows)
    channels = tuple(Channel(name, index) for index, name in enumerate(names))
    wiring = tuple(sorted({name for need in rows for name in need.memory.wiring}))
    return MemoryPlan(group, fabric, header_bytes(fabric) + arena_bytes(buffers), buffers, channels, wiring)


def _in_use(index: int, asked: BufferRequest, rows: Sequence[Need], order: Mapping[fx.Node, int]) -> tuple[int, int]:
    """Positions of the first and last need of the group while which a buffer of the one at `index` is in use."""
    first = last = index
    if asked.buffer.lifetime is Lifetime.UNTIL_READ:
        assert asked.last_reader is not None, f"{rows[index].owner}: who reads {asked.buffer.name} last?"
        downstream = _reached(asked.last_reader, lambda node: node.users)
        # Inductor may run any site before the reader that does not depend on it.
        before = (other for other, each in enumerate(rows) if not each.nodes & downstream)
        last = max(max(before, default=index), index)
        # On other ranks its readers are done when the next call is, which waits for them.
        last = min(last + 1, len(rows) - 1)
    if asked.first_writer is not None:
        upstream = _reached(asked.first_writer, lambda node: node.all_input_nodes) | {asked.first_writer}
        # Every site that the writer does not depend on may run after it.
        after = (
            other
            for other, each in enumerate(rows)
            if not each.nodes or max(each.nodes, key=order.__getitem__) not in upstream
        )
        first = min(min(after, default=index), index)
    return first, last


def _reached(node: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Every node that can be reached from `node`, itself not included."""
    found: set[fx.Node] = set()
    pending = list(following(node))
    while pending:
        each = pending.pop()
        if each not in found:
            found.add(each)
            pending.extend(following(each))
    return found
