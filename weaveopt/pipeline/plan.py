"""Plan: named buffers with lifetimes -> arena offsets; channels. All bytes are known before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.fabrics.traits import arena_fabric, header_bytes
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.records.memory import Channel, Lifetime, MemoryPlan
from weaveopt.rule import Chosen, Context, Memory, Placement, RuleSet
from weaveopt.solver.placement import Request, arena_bytes, place


@dataclass(frozen=True)
class Planned:
    """The memory of one graph."""

    plans: tuple[MemoryPlan, ...]
    """One for every process group with a rewritten site that needs memory."""
    placements: Mapping[str, Placement]
    """Placement of each rewritten site, by site id."""


def plan(decided: DecidedGraph, rules: RuleSet, context: Context) -> Planned:
    """Collect the memory that the rules of all rewritten sites need, and place it.

    The calls of one channel follow one another on every rank. A call may reuse the bytes of a buffer of an earlier call
    of the group; a buffer that is read later keeps its bytes through every call that may run before its reader, and
    through the one after those, which waits for the readers of other ranks.
    """
    needs: dict[str, list[tuple[Chosen, Memory]]] = {}
    for chosen in decided.chosen:
        memory = rules.named(chosen.proposal.candidate.choice).memory(chosen, context)
        if memory is not None:
            groups = chosen.found.site.groups
            assert len(groups) == 1, f"{chosen.found.site.id}: memory of {len(groups)} groups"
            needs.setdefault(groups[0], []).append((chosen, memory))
    plans, placements = [], {}
    for group, rows in sorted(needs.items()):
        planned = _plan_group(group, rows)
        plans.append(planned)
        channels = {channel.name: channel.index for channel in planned.channels}
        for chosen, memory in rows:
            site = chosen.found.site.id
            placements[site] = Placement(planned.of_site(site), channels[memory.channel])
    return Planned(tuple(plans), placements)


def _plan_group(group: str, rows: Sequence[tuple[Chosen, Memory]]) -> MemoryPlan:
    fabrics = {chosen.proposal.candidate.fabric for chosen, _ in rows}
    requests: list[Request] = []
    for index, (chosen, memory) in enumerate(rows):
        for asked in memory.buffers:
            last = index
            if asked.buffer.lifetime is Lifetime.UNTIL_READ:
                assert asked.last_reader is not None, f"{chosen.found.site.id}: who reads {asked.buffer.name} last?"
                behind = _behind(asked.last_reader)
                # Inductor may run any site before the reader that does not depend on it.
                before = (other for other, (each, _) in enumerate(rows) if not each.found.nodes & behind)
                last = max(max(before, default=index), index)
                # On other ranks its readers are done when the next call is, which waits for them.
                last = min(last + 1, len(rows) - 1)
            requests.append(Request(chosen.found.site.id, asked.buffer, index, last))
    fabric = arena_fabric(fabrics)
    buffers = place(requests)
    names = dict.fromkeys(memory.channel for _, memory in rows)
    channels = tuple(Channel(name, index) for index, name in enumerate(names))
    wiring = tuple(sorted({name for _, memory in rows for name in memory.wiring}))
    return MemoryPlan(group, fabric, header_bytes(fabric) + arena_bytes(buffers), buffers, channels, wiring)


def _behind(node: fx.Node) -> set[fx.Node]:
    """Every node that cannot run before `node` is through."""
    found: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        each = pending.pop()
        if each not in found:
            found.add(each)
            pending.extend(each.users)
    return found
