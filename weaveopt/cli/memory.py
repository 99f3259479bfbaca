"""What rewritten sites share, in words: run-time tables, regions of an arena, sums that are handed out whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weaveopt.cli.reasons import collapse, kernel_of
from weaveopt.decision import Algorithm, BufferPlan, Decision, GraphReport, Lowering


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


def arena_lines(graph: GraphReport) -> Iterator[str]:
    """The symmetric memory of all groups: slots that sites own, or the regions that they share."""
    slots = [plan for plan in graph.plans if plan.regions is None]
    num_bytes = sum(plan.bytes for plan in slots)
    if num_bytes:
        yield f"arena: {num_bytes:,} bytes in {sum(len(plan.slots) for plan in slots)} slots"
    for plan in graph.plans:
        if plan.regions is not None:
            group = f" of group {plan.group}" if len(graph.plans) > 1 else ""
            yield f"arena{group}: {plan.bytes:,} bytes: {_regions(plan)}"


def _regions(plan: BufferPlan) -> str:
    regions = plan.regions
    assert regions is not None
    named = (
        ("3 mailboxes of", regions.mailbox_bytes),
        ("staging", regions.staging_bytes),
        ("output", regions.output_bytes),
        ("partial", regions.partial_bytes),
    )
    return ", ".join(["header", *(f"{name} {num_bytes:,}" for name, num_bytes in named if num_bytes)])


def gather_line(graph: GraphReport) -> Iterator[str]:
    """Places where every rank needs the whole sum, so that two-shot hands its rows out too."""
    kept = {placement.site for plan in graph.plans for placement in plan.placements if placement.sum_sharded}
    placed = {placement.site for plan in graph.plans for placement in plan.placements}
    whole = [d for d in graph.decisions if d.site.id in placed - kept and _gathers(d)]
    if whole:
        names = ", ".join(dict.fromkeys(collapse(decision.site.module or decision.site.id) for decision in whole))
        places = sum(decision.site.count for decision in whole)
        yield f"gather: two-shot hands out the whole sum at {places} place(s) that others read it from: {names}"


def _gathers(decision: Decision) -> bool:
    workload = decision.site.workload
    return decision.chosen.algorithm is Algorithm.TWO_SHOT and workload is not None and workload.sum_is_used
