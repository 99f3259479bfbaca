"""What rewritten sites share, in words: run-time tables, slots of an arena, sums that are handed out whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weaveopt.records.candidate import Algorithm, Lowering
from weaveopt.records.memory import BufferPlan
from weaveopt.records.report import Decision, GraphReport
from weaveopt.reporting.reasons import collapse, kernel_of


def table_lines(graph: GraphReport) -> Iterator[str]:
    """Each run-time table once: `peer table, hidden 8192: up to 24 tokens one_shot mail, up to 512 two_shot mail`."""
    chosen = [d for d in graph.decisions if d.chosen.lowerings and d.site.workload is not None]
    groups = {decision.site.group for decision in chosen}
    lines: dict[str, None] = {}
    for decision in chosen:
        workload = decision.site.workload
        assert workload is not None
        group = f" of group {decision.site.group}" if len(groups) > 1 else ""
        rows = table_text(decision.chosen.lowerings, workload.max_tokens)
        lines[f"{decision.chosen.fabric.value} table{group}, hidden {workload.hidden}: {rows}"] = None
    yield from lines


def table_text(lowerings: Sequence[Lowering], max_tokens: int) -> str:
    """What runs by token count; where it ends before `max_tokens`, what runs above."""
    rows: list[str] = []
    for row in lowerings:
        ctas = f" on {row.num_ctas} CTAs" if row.num_ctas else ""
        rows.append(f"up to {row.max_tokens}{'' if rows else ' tokens'} {row.algorithm.value} {row.form.value}{ctas}")
    if lowerings and lowerings[-1].max_tokens < max_tokens:
        rows.append("more through the library")
    return ", ".join(rows)


def unmeasured_line(graph: GraphReport) -> Iterator[str]:
    """Kernels that may run here and whose time nobody measured on such a machine."""
    found: dict[str, None] = {}
    for decision in graph.decisions:
        for candidate in (decision.chosen, *decision.alternatives):
            if candidate.allowed and dict(candidate.parameters).get("measured") is False:
                found[f"{candidate.fabric.value} {kernel_of(candidate)}"] = None
    if found:
        yield f"unmeasured: {', '.join(found)} (predicted from a paper or a model)"


def slot_names(plan: BufferPlan) -> tuple[str, ...]:
    """What each slot of the plan is for, in their order."""
    if plan.regions is None:
        # The first holds partial results, of which two calls in turn use a half; the others rows handed out.
        return ("partial results (two buffers)", *("output rows",) * (len(plan.slots) - 1))[: len(plan.slots)]
    regions = (
        ("2 mailboxes", plan.regions.mailbox_bytes),
        ("staging", plan.regions.staging_bytes),
        ("output", plan.regions.output_bytes),
        ("partial", plan.regions.partial_bytes),
    )
    names = tuple(name for name, num_bytes in regions if num_bytes)
    return names if len(names) == len(plan.slots) else ("region",) * len(plan.slots)


def arena_line(plan: BufferPlan) -> str:
    return f"arena of group {plan.group} on {plan.fabric.value}: {plan.bytes:,} bytes in {len(plan.slots)} slot(s)"


def arena_rows(plan: BufferPlan, decisions: Sequence[Decision]) -> Iterator[tuple[str, str, str, str]]:
    """(what, offset, bytes, owners) of every slot; owners in the order in which they use it."""
    modules = {d.site.id: (collapse(d.site.module or d.site.id), d.site.count) for d in decisions}
    if plan.regions is not None and plan.slots and plan.slots[0].offset:
        yield "header", "0", f"{plan.slots[0].offset:,}", "signals and counters of all sites"
    for name, slot in zip(slot_names(plan), plan.slots, strict=True):
        places: dict[str, int] = {}
        for owner in slot.owners:
            module, count = modules.get(owner, (owner, 1))
            places[module] = places.get(module, 0) + count
        owners = ", ".join(f"{module} ×{count}" for module, count in places.items())
        yield name, f"{slot.offset:,}", f"{slot.bytes:,}", owners or "no site"


def gather_line(graph: GraphReport) -> Iterator[str]:
    """Places where every rank needs the whole sum, so that two-shot hands its rows out too."""
    kept = {placement.site for plan in graph.plans for placement in plan.placements if placement.sum_sharded}
    placed = {placement.site for plan in graph.plans for placement in plan.placements}
    whole = [d for d in graph.decisions if d.site.id in placed - kept and _gathers(d)]
    if whole:
        names = ", ".join(dict.fromkeys(collapse(decision.site.module or decision.site.id) for decision in whole))
        places = sum(decision.site.count for decision in whole)
        yield f"gather: two-shot hands out the whole sum at {places} place(s) that others read it from: {names}"


def landing_line(graph: GraphReport) -> Iterator[str]:
    """Places whose normed rows are read where peers write them."""
    landed = {placement.site for plan in graph.plans for placement in plan.placements if placement.normed_lands}
    places = sum(decision.site.count for decision in graph.decisions if decision.site.id in landed)
    if places:
        yield f"no copy: normed rows that come in bulk are read in the arena, where peers write them: {places} place(s)"


def _gathers(decision: Decision) -> bool:
    workload = decision.site.workload
    return decision.chosen.algorithm is Algorithm.TWO_SHOT and workload is not None and workload.sum_is_used
