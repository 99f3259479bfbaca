"""Lines about resources that rewritten sites share: run-time tables, buffers of an arena, remarks of rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weaveopt.records.candidate import TableRow
from weaveopt.records.memory import Lifetime, MemoryPlan
from weaveopt.records.report import Decision, GraphReport
from weaveopt.reporting.reasons import collapse, kernel_of
from weaveopt.wording import counted


def table_lines(graph: GraphReport) -> Iterator[str]:
    """Each run-time table once: `peer table, hidden 8192: up to 24 tokens one_shot ll_packet, ...`."""
    chosen = [decision for decision in graph.decisions if decision.chosen.table]
    groups = {decision.site.groups for decision in chosen}
    lines: dict[str, None] = {}
    for decision in chosen:
        group = f" of group {', '.join(decision.site.groups)}" if len(groups) > 1 else ""
        hidden = dict(decision.site.facts).get("hidden")
        row = "" if hidden is None else f", hidden {hidden}"
        rows = table_text(decision.chosen.table, decision.site.tokens.most)
        lines[f"{decision.chosen.fabric.value} table{group}{row}: {rows}"] = None
    yield from lines


def routing_lines(graph: GraphReport) -> Iterator[str]:
    """Lines on the number of rows for each expert that estimates of mixtures assume."""
    lines: dict[str, None] = {}
    for decision in graph.decisions:
        for candidate in (decision.chosen, *decision.alternatives):
            found = dict(candidate.parameters)
            if "routing" in found:
                mean, busiest = found["expert_rows"], found["busiest_expert_rows"]
                lines[
                    f"rows by expert: {mean:g} on average, {busiest:g} of the busiest (routing {found['routing']})"
                ] = None
    yield from lines


def table_text(table: Sequence[TableRow], max_tokens: int) -> str:
    """Describe the kernel for each range of token counts, and the fallback above the table's end if it is below
    `max_tokens`."""
    rows: list[str] = []
    for row in table:
        ctas = dict(row.values).get("num_ctas")
        on = f" on {counted(int(ctas), 'CTA')}" if ctas else ""
        rows.append(f"up to {row.max_tokens if rows else counted(row.max_tokens, 'token')} {row.variant}{on}")
    if table and table[-1].max_tokens < max_tokens:
        rows.append("more through the library")
    return ", ".join(rows)


def unmeasured_line(graph: GraphReport) -> Iterator[str]:
    """Kernels that may run here and whose time was not measured on such a machine."""
    found: dict[str, None] = {}
    for decision in graph.decisions:
        for candidate in (decision.chosen, *decision.alternatives):
            if candidate.allowed and dict(candidate.parameters).get("measured") is False:
                found[f"{candidate.fabric.value} {kernel_of(candidate)}"] = None
    if found:
        yield f"unmeasured: {', '.join(found)} (predicted from a paper or a model)"


def arena_line(plan: MemoryPlan) -> str:
    buffers = counted(len(plan.buffers), "buffer")
    return f"arena of group {plan.group} on {plan.fabric.value}: {plan.num_bytes:,} bytes in {buffers}"


def arena_rows(plan: MemoryPlan, decisions: Sequence[Decision]) -> Iterator[tuple[str, str, str, str]]:
    """Return (what, offset, bytes, owners) of every buffer after the header; owners in the order in which they use it.

    Buffers of one name at one place, which sites have one after the other, are one row.
    """
    modules = {d.site.id: (collapse(d.site.module or d.site.id), d.site.count) for d in decisions}
    rows: dict[tuple[str, int, int], dict[str, int]] = {}
    for buffer in plan.buffers:
        lifetime = "" if buffer.lifetime is Lifetime.ARENA else f" ({buffer.lifetime.value.replace('_', ' ')})"
        places = rows.setdefault((f"{buffer.name}{lifetime}", buffer.offset, buffer.num_bytes), {})
        for owner in buffer.owners:
            module, count = modules.get(owner, (owner, 1))
            places[module] = places.get(module, 0) + count
    for (what, offset, num_bytes), places in rows.items():
        owners = ", ".join(f"{module} ×{count}" for module, count in places.items())
        yield what, f"{offset:,}", f"{num_bytes:,}", owners or "no site"


def note_lines(graph: GraphReport) -> Iterator[str]:
    """Lines of the rules' remarks on the chosen candidates, each once, with the modules that it concerns."""
    found: dict[str, list[Decision]] = {}
    for decision in graph.decisions:
        for note in decision.chosen.notes:
            found.setdefault(note, []).append(decision)
    for note, decisions in found.items():
        names = ", ".join(dict.fromkeys(collapse(each.site.module or each.site.id) for each in decisions))
        yield f"{note}: {counted(sum(each.site.count for each in decisions), 'place')}: {names}"
