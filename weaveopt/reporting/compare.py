"""Comparison of two reports: the sites that are decided differently, and what each report predicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from weaveopt.errors import OptionError, WeaveError
from weaveopt.plain_json import JsonError, text_of
from weaveopt.records.report import GraphReport, MachineSummary, Report
from weaveopt.reporting.document_reader import from_json
from weaveopt.reporting.headline import headline, headline_line
from weaveopt.reporting.sections import work_failure_line
from weaveopt.reporting.terminal import to_text, width_of
from weaveopt.reporting.text import Row, choice_words, rows_of
from weaveopt.reporting.timeline import title
from weaveopt.wording import counted

Machines = tuple[MachineSummary | None, MachineSummary | None]


@dataclass(frozen=True)
class Pair:
    """A kind of site in both reports; None where one of them has none."""

    module: str
    left: Row | None
    right: Row | None

    @property
    def differs(self) -> bool:
        return self.left is None or self.right is None or _choice(self.left) != _choice(self.right)


def text(left: Path, right: Path, width: int | None = None, color: bool = False) -> str:
    """The comparison. Raises `OptionError`, one line, for a file that is no report of a schema known here."""
    first, second = _read(left), _read(right)
    width = width or width_of()
    parts: list[RenderableType] = [Text(_title("A", left, first)), Text(_title("B", right, second))]
    if not (first.graphs or second.graphs):
        parts.append(Text("neither has a graph"))
    for a, b in zip_longest(first.graphs, second.graphs):
        parts += [Text(""), *_graphs(a, b, (first.machine, second.machine), width)]
    return to_text(Group(*parts), width, color)


def pairs(left: GraphReport, right: GraphReport) -> tuple[Pair, ...]:
    """Kinds of sites by module, those of one module in their order; what only one has stands at the end."""
    others = dict(_numbered(right))
    found = [Pair(key[0], row, others.pop(key, None)) for key, row in _numbered(left)]
    return (*found, *(Pair(key[0], None, row) for key, row in others.items()))


def _numbered(graph: GraphReport) -> Iterator[tuple[tuple[str, int], Row]]:
    seen: dict[str, int] = {}
    for row in rows_of(graph):
        seen[row.module] = seen.get(row.module, -1) + 1
        yield (row.module, seen[row.module]), row


def _read(path: Path) -> Report:
    try:
        return from_json(text_of(path))
    except (JsonError, WeaveError) as error:
        raise OptionError(f"--compare {path}: {error}") from error


def _title(letter: str, path: Path, report: Report) -> str:
    machine = "no machine" if report.machine is None else report.machine.name
    return f"{letter}: {path}: {report.model} on {counted(report.world, 'rank')}, {machine}"


def _graphs(
    left: GraphReport | None, right: GraphReport | None, machines: Machines, width: int
) -> Iterator[RenderableType]:
    if left is None or right is None:
        only = left or right
        assert only is not None
        yield Text(f"only in {'B' if left is None else 'A'}: {title(only)}", style="bold")
        return
    same = title(left) == title(right)
    yield Text(title(left) if same else f"A: {title(left)}; B: {title(right)}", style="bold")
    found = pairs(left, right)
    if found:
        yield _table(found, width)
    num_different = sum(pair.differs for pair in found)
    yield Text(f"{counted(len(found), 'kind')} of sites: {num_different} decided otherwise (≠)")
    for letter, graph in (("A", left), ("B", right)):
        yield Text(f"{letter} sites: {graph.unfused_us:,.1f} -> {graph.predicted_us:,.1f} us")
    before, after = _ratio(left.unfused_us, right.unfused_us), _ratio(left.predicted_us, right.predicted_us)
    yield Text(f"B/A, sites: before {before}, after {after}")
    if left.work and right.work:
        yield Text(f"A {headline_line(left, machines[0])}")
        yield Text(f"B {headline_line(right, machines[1])}")
        first, second = headline(left), headline(right)
        before, after = _ratio(first.before.us, second.before.us), _ratio(first.counting.us, second.counting.us)
        yield Text(f"B/A, whole model: before {before}, after {after}")
    else:
        without = " and ".join(letter for letter, graph in (("A", left), ("B", right)) if not graph.work)
        yield Text(f"whole model: not predicted in {without}")
        for letter, graph in (("A", left), ("B", right)):
            yield from (Text(f"{letter}: {line}") for line in work_failure_line(graph))


def _table(found: tuple[Pair, ...], width: int) -> Table:
    """The pairs in columns whose widths are set here: rich drops columns where it runs out of width."""
    cells = [_cells(pair) for pair in found]
    names = ("site", "", "× A", "× B", "choice A", "choice B", "us A", "us B", "B/A")
    widths = [max(len(row[index]) for row in (names, *cells)) for index in range(len(names))]
    numbers = [index for index, name in enumerate(names) if name not in ("site", "choice A", "choice B")]
    rest = width - len(names) - sum(widths[index] for index in numbers)
    widths[0] = min(widths[0], rest * 2 // 5)
    for index in (4, 5):
        widths[index] = min(widths[index], (rest - widths[0]) // 2)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, name in enumerate(names):
        justify: JustifyMethod = "right" if index in numbers else "left"
        table.add_column(name, justify=justify, overflow="fold", width=widths[index])
    for row, pair in zip(cells, found, strict=True):
        table.add_row(*row, style="bold" if pair.differs else "")
    return table


def _cells(pair: Pair) -> tuple[str, ...]:
    sides = (pair.left, pair.right)
    left, right = (_us(row) for row in sides)
    return (
        pair.module,
        "≠" if pair.differs else "",
        *("-" if row is None else str(row.count) for row in sides),
        *("-" if row is None else _choice(row) for row in sides),
        *("-" if us is None else f"{us:,.1f}" for us in (left, right)),
        "" if left is None or right is None else _ratio(left, right),
    )


def _choice(row: Row) -> str:
    chosen = row.decisions[0].chosen
    return f"{choice_words(chosen)} ({chosen.fabric.value})"


def _us(row: Row | None) -> float | None:
    """Predicted for one place of the kind, as decided."""
    estimate = None if row is None else row.decisions[0].chosen.estimate
    return None if estimate is None else estimate.us


def _ratio(left: float, right: float) -> str:
    return f"{right / left:.2f}" if left else "-"
