"""The report in one screen: the machine, the sites, the gain with what it rests on, and what would make it faster."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weaveopt.records.candidate import LEAVE
from weaveopt.records.report import GraphReport, Report
from weaveopt.reporting import generation, sections
from weaveopt.reporting.headline import Standing, headline_line, machine_line, standing
from weaveopt.reporting.levers import is_fastest, lever_lines
from weaveopt.reporting.terminal import to_text, width_of
from weaveopt.reporting.text import Row, fallback_lines, rows_of
from weaveopt.reporting.timeline import title, total
from weaveopt.wording import counted

Cells = tuple[str, ...]
MOST_GRAPHS = 3
"""Shown with their sites: those that take longest."""
MORE = "more: .full() and .why(SITE) of this report"
NUMBERS = (("before us", 9), ("after us", 9), ("saved", 6))


def text(report: Report, width: int | None = None, color: bool = False, more: str = MORE) -> str:
    """The short report as text of `width` columns; `more` is the last line, which says how to see the rest."""
    width = width or width_of()
    return to_text(Group(*_report(report, width), Text(more)), width, color)


def _report(report: Report, width: int) -> Iterator[RenderableType]:
    yield Text(f"{report.model} on {counted(report.world, 'rank')}", style="bold")
    yield Text(machine_line(report.machine))
    yield from map(Text, report.notes)
    yield from map(Text, sections.graph_count_lines(report))
    yield from map(Text, sections.outside_lines(report))
    yield from map(Text, generation.lines(report.generation))
    if not report.graphs:
        yield Text("no graph was compiled yet")
    with_sites = [graph for graph in report.graphs if graph.decisions]
    longest = sorted(with_sites, key=lambda graph: -total(graph, fused=False).us)[:MOST_GRAPHS]
    for graph in report.graphs:
        if any(graph is each for each in longest):
            yield Text("")
            yield from _graph(graph, report, width)
    others, siteless = len(with_sites) - len(longest), len(report.graphs) - len(with_sites)
    if others:
        yield Text(f"and {counted(others, 'graph')} with sites that take less time")
    if siteless:
        yield Text(f"{counted(siteless, 'graph')} without a site: nothing there waits for another rank")
    yield from _faster(report)
    yield from (Text(line, style="red") for line in (*sections.failure_lines(report), *fallback_lines(report)))


def _graph(graph: GraphReport, report: Report, width: int) -> Iterator[RenderableType]:
    name = f" ({graph.name})" if len(report.graphs) > 1 else ""
    yield Text(f"{title(graph)}{name}", style="bold")
    rows = rows_of(graph)
    num_fastest = sum(row.count for row in rows if is_fastest(row.decisions[0]))
    rows = tuple(row for row in rows if not is_fastest(row.decisions[0]))
    yield _table(_cells(rows), width)
    weights = [(d.rewritten, d.site.count * len(d.site.collectives)) for d in graph.decisions]
    num, rewritten = sum(n for _, n in weights), sum(n for done, n in weights if done)
    uncounted = [row for row in rows if standing(row.decisions[0]) is not Standing.COUNTS]
    note = "; (…) is not in the next line's first figure" if uncounted else ""
    fastest = f"; {counted(num_fastest, 'local site')} left" if num_fastest else ""
    yield Text(f"{counted(num, 'collective')}: {rewritten} rewritten, {num - rewritten} left{fastest}{note}")
    yield Text(headline_line(graph, report.machine), style="bold")


def _table(cells: list[Cells], width: int) -> Table:
    """A line a kind of site, in columns whose widths are set here: rich drops columns where it runs out of width."""
    names = ("site", "×", "choice", "fabric")
    widths = [max(len(row[index]) for row in (names, *cells)) for index in range(len(names))]
    rest = width - len(names) - len(NUMBERS) + 1 - widths[1] - widths[3] - sum(size for _, size in NUMBERS)
    if widths[0] + widths[2] > rest:
        widths[0] = min(widths[0], max(rest // 2, rest - widths[2]))
        widths[2] = min(widths[2], rest - widths[0])
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name, size in zip(names, widths, strict=True):
        table.add_column(name, justify="right" if name == "×" else "left", overflow="fold", width=size)
    for name, size in NUMBERS:
        table.add_column(name, justify="right", overflow="fold", width=size)
    for row_cells in cells:
        table.add_row(*row_cells[:2], Text(row_cells[2], "" if row_cells[2] == LEAVE else "green"), *row_cells[3:])
    return table


def _cells(rows: tuple[Row, ...]) -> list[Cells]:
    """A line each; sites that differ only in what is not shown are one. A kind is named where a module has several."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(row.module, set()).add(row.decisions[0].site.kind)
    counts: dict[Cells, int] = {}
    for row in rows:
        kind = f" ({row.decisions[0].site.kind})" if len(kinds[row.module]) > 1 else ""
        cells = (f"{row.module or row.decisions[0].site.id}{kind}", *_choice_and_times(row))
        counts[cells] = counts.get(cells, 0) + row.count
    return [(cells[0], str(count), *cells[1:]) for cells, count in counts.items()]


def _choice_and_times(row: Row) -> Cells:
    first = row.decisions[0]
    before, after = first.baseline, first.chosen.estimate
    saved = ""
    if before is not None and before.decided_us and after is not None:
        saved = f"{first.saving_us / before.decided_us:.0%}"
        saved = saved if standing(first) is Standing.COUNTS else f"({saved})"
    times = ("-" if each is None else f"{each.decided_us:,.1f}" for each in (before, after))
    choice = " ".join(word for word in (first.chosen.choice, first.chosen.variant) if word)
    return (choice, first.chosen.fabric.value, *times, saved)


def _faster(report: Report) -> Iterator[RenderableType]:
    lines = lever_lines(report)
    if not lines:
        return
    yield Text("")
    yield Text("what would make it faster, by the time at stake:", style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for line in lines:
        table.add_row(*line)
    yield Padding(table, (0, 0, 0, 2))
