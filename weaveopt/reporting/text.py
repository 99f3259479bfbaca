"""The report as text: one row a kind of site, then every reason, then what it costs in memory and rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weaveopt.records.candidate import LEAVE, Candidate, Estimate, Fabric
from weaveopt.records.report import Decision, GraphReport, MachineSummary, Report
from weaveopt.reporting import generation, sections
from weaveopt.reporting.headline import machine_line
from weaveopt.reporting.memory import note_lines, routing_lines, table_lines, unmeasured_line
from weaveopt.reporting.reasons import absent_fabrics, collapse, collect, tried
from weaveopt.reporting.terminal import to_text, width_of
from weaveopt.reporting.timeline import title
from weaveopt.wording import counted


@dataclass(frozen=True)
class Row:
    """Sites that differ only in their layer: same form, same choice, same times."""

    module: str
    decisions: tuple[Decision, ...]

    @property
    def count(self) -> int:
        return sum(decision.site.count for decision in self.decisions)


def text(report: Report, width: int | None = None, color: bool = False) -> str:
    """The whole report as text of `width` columns; nothing is cut, long lines are folded."""
    width = width or width_of()
    return to_text(Group(*_report(report, width)), width, color)


def _report(report: Report, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(f"{report.model} on {counted(report.world, 'rank')}", style="bold")]
    parts.append(Text(machine_line(report.machine)))
    parts.extend(Text(note) for note in report.notes)
    parts.extend(Text(line) for line in sections.broken(report))
    parts.extend(Text(line) for line in generation.lines(report.generation))
    if not report.graphs:
        parts.append(Text("no graph was compiled yet"))
    for graph in report.graphs:
        parts.append(Text(""))
        parts.extend(_graph(graph, report.machine, width))
    parts.extend(Text(line, style="red") for line in fallback_lines(report))
    return parts


def fallback_lines(report: Report) -> Iterator[str]:
    """Each step that failed, with the graph that therefore runs as it was, and each graph rule that did."""
    for graph in report.graphs:
        for rule, error in graph.failed_rules:
            yield f"fault: graph {graph.name} has no variant of {rule}, which failed: {error}"
    for fallback in dict.fromkeys((*report.fallbacks, *(f for graph in report.graphs for f in graph.fallbacks))):
        yield f"fallback: graph {fallback.graph} runs unrewritten, step {fallback.step}: {fallback.error}"


def _graph(graph: GraphReport, machine: MachineSummary | None, width: int) -> list[RenderableType]:
    rows = rows_of(graph)
    parts: list[RenderableType] = [Text(f"{title(graph)} ({graph.name})", style="bold")]
    parts.append(_table(rows, width) if rows else Text("no site: nothing in this graph waits for another rank"))
    parts.append(Text(_total_line(graph)))
    parts.extend(Text(line) for line in _variant_lines(graph))
    parts.extend(Text(f"verify: {line}") for line in graph.timed)
    parts.extend(Text(line) for line in sections.kernel_lines(graph))
    parts.extend(sections.whole(graph, machine))
    parts.extend(Text(line) for line in (*table_lines(graph), *routing_lines(graph), *unmeasured_line(graph)))
    parts.extend(_reasons(graph))
    parts.extend(sections.sensitivity(graph))
    parts.extend(sections.arena(graph))
    parts.extend(Text(line) for line in note_lines(graph))
    parts.extend(Text(f"rounding: {line}") for line in graph.rounding)
    if graph.steps_us:
        steps = ", ".join(f"{name} {float(us) / 1e3:.1f} ms" for name, us in graph.steps_us)
        parts.append(Text(f"time of the steps: {steps}"))
    return parts


def _variant_lines(graph: GraphReport) -> Iterator[str]:
    """Lines on the variants that were compared with the captured graph, and which of them runs."""
    for variant in graph.variants if len(graph.variants) > 1 else ():
        times = f"{_us(variant.baseline_us)} -> {_us(variant.predicted_us)} us"
        if variant.exposed_us is not None:
            times += f", {_us(variant.exposed_us)} us of it exposed communication"
        if variant.measured is not None:
            times += f", measured {_us(variant.measured.us)} us"
        if variant.added_us is not None:
            times += f", {variant.added_us:+,.1f} us of computation"
        parameters = "".join(f", {name} {value}" for name, value in variant.parameters)
        why = "; ".join(f"{each.code}: {each.message}" for each in variant.rejections)
        state = "runs" if variant.name == graph.variant else why or "predicted slower"
        yield f"variant {variant.name}{f' ({variant.rule})' if variant.rule else ''}{parameters}: {times}; {state}"


def _table(rows: tuple[Row, ...], width: int) -> Table:
    """The rows in columns whose widths are set here: rich drops columns where it runs out of width."""
    timed = any(row.decisions[0].baseline is not None and row.decisions[0].baseline.measured for row in rows)
    cells = [_cells(row, timed) for row in rows]
    counts, columns = 3, [("unfused us", 12), ("predicted us", 12), ("saved", 5)]
    if timed:
        columns = [("unfused us", 10), ("measured", 8), ("predicted us", 12), ("measured", 8), ("saved", 5)]
    fabric = max(len(name.value) for name in Fabric)
    rest = width - counts - sum(column_width for _, column_width in columns) - fabric - len(columns) - 4
    choice = min(max(len(word) for row in cells for word in ("choice", *str(row[3]).split())), rest // 3)
    site = min(max(len(row.module) for row in rows), (rest - choice) * 3 // 5)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("site", overflow="fold", width=site)
    table.add_column("×", justify="right", width=counts)
    table.add_column("form", overflow="fold", width=rest - choice - site)
    table.add_column("choice", overflow="fold", width=choice)
    table.add_column("fabric", overflow="fold", width=fabric)
    for name, column_width in columns:
        table.add_column(name, justify="right", overflow="fold", width=column_width)
    for row_cells in cells:
        table.add_row(*row_cells)
    return table


def rows_of(graph: GraphReport) -> tuple[Row, ...]:
    """Decisions that are equal but for the layer and what rules say of it, in the order of the first of them."""
    equal: dict[object, list[Decision]] = {}
    for decision in graph.decisions:
        module = collapse(decision.site.module)
        anonymous = replace(decision.site, id="", module=module, collectives=(), count=1)
        silent = replace(decision.chosen, notes=())
        key = (replace(decision, site=anonymous, chosen=silent), len(decision.site.collectives))
        equal.setdefault(key, []).append(decision)
    return tuple(Row(collapse(decisions[0].site.module), tuple(decisions)) for decisions in equal.values())


def _cells(row: Row, timed: bool) -> tuple[str | Text, ...]:
    first = row.decisions[0]
    before, after = first.baseline, first.chosen.estimate
    saved = ""
    if before is not None and before.decided_us and after is not None:
        saved = f"{first.saving_us / before.decided_us:.0%}"
    choice = Text(choice_words(first.chosen), style="" if first.chosen.choice == LEAVE else "green")
    return (
        row.module,
        str(row.count),
        first.site.description or "not recognized",
        choice,
        first.chosen.fabric.value,
        *_times(before, timed),
        *_times(after, timed),
        saved,
    )


def _times(estimate: Estimate | None, timed: bool) -> tuple[str, ...]:
    """Format predicted times, with measured ones next to them if the table has any."""
    predicted = _us(None if estimate is None else estimate.us)
    if not timed:
        return (predicted,)
    return predicted, _us(None if estimate is None or estimate.measured is None else estimate.measured.us)


def choice_words(candidate: Candidate) -> str:
    if candidate.choice == LEAVE:
        return LEAVE
    ctas = dict(candidate.parameters).get("num_ctas")
    return " ".join(str(word) for word in (candidate.choice, candidate.variant, ctas) if word)


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:,.1f}"


def _total_line(graph: GraphReport) -> str:
    weights = [(d, d.site.count * len(d.site.collectives)) for d in graph.decisions]
    total = sum(n for _, n in weights)
    rewritten = sum(n for d, n in weights if d.rewritten)
    unfused, predicted = graph.unfused_us, graph.predicted_us
    saved = f" ({1 - predicted / unfused:.0%} saved)" if unfused else ""
    times = f"all sites as chosen {_us(unfused)} -> {_us(predicted)} us{saved}"
    timed = [d for d in graph.decisions if d.baseline is not None and d.baseline.measured is not None]
    if timed:
        before = sum(d.baseline.decided_us * d.site.count for d in timed if d.baseline is not None)
        saving = sum(d.saving_us * d.site.count for d in timed)
        times += f"; those that were timed {_us(before)} -> {_us(before - saving)} us ({saving / before:.0%} saved)"
    return f"{counted(total, 'collective')}: {rewritten} rewritten, {total - rewritten} left; {times}"


def _reasons(graph: GraphReport) -> list[RenderableType]:
    """Each reason once, with the number of places of the model that it holds for."""
    absent = absent_fabrics(graph.decisions)
    found = collect(graph.decisions, without=absent)
    if not found and not absent:
        return []
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", max_width=30)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    tried_here = tried(graph.decisions)
    for reason in found:
        table.add_row(f"×{reason.num_places}", reason.where(tried_here), reason.code, reason.sentence())
    nowhere = [Text(f"no fabric here: {'; '.join(absent.values())}")] if absent else []
    return [Text("why not (more with --why SITE):"), *nowhere, Padding(table, (0, 0, 0, 2))]
