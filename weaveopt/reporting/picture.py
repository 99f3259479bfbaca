"""Picture of the predicted timeline: one layer before rewriting above, after rewriting below, and the whole model on
the right. Where a variant of the graph runs, whose work overlaps between layers, all captured layers are drawn."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

from weaveopt.errors import OptionError
from weaveopt.records.report import GraphReport, Report
from weaveopt.reporting.headline import Headline, headline, prices_from
from weaveopt.reporting.parts import ReportPart, typical
from weaveopt.reporting.timeline import STREAMS, Block, Span, Times, spans_of, title, total
from weaveopt.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

COLORS = {
    "compute": ("#3b6ea5", "#7fb069", "#1f4468", "#8fb8de", "#4a8c84", "#b4c7a5", "#6a7fa8", "#2f5d50"),
    "communication": ("#c8553d", "#e08e45", "#8c2f39", "#f2b880", "#b56576", "#d9a441"),
}
"""Colors by stream, assigned to names in order of first appearance."""
EXPOSED = "#c8553d"
REST = "#3b6ea5"
INCHES_WIDE, INCHES_HIGH = 13.0, 4.6
DOTS_PER_INCH = 120
LEAST_LABELLED = 0.06
"""Share of the axis below which a span is too narrow for its name."""


def require() -> None:
    """Check for matplotlib, before any slow step. Raises `OptionError` if it is not installed."""
    try:
        found = importlib.util.find_spec("matplotlib")
    except ValueError:  # blocked in this process
        found = None
    if found is None:
        raise OptionError("a picture needs matplotlib: pip install matplotlib")


def draw(report: Report, form: str) -> bytes:
    """The picture as a file of `form` (`png` or `svg`), one row of panels a graph. Raises `OptionError` without any."""
    require()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not report.graphs:
        raise OptionError(f"{report.model}: no graph to draw")
    height = INCHES_HIGH * len(report.graphs)
    figure = pyplot.figure(figsize=(INCHES_WIDE, height), layout="constrained")
    machine = "" if report.machine is None else f" on {report.machine.name}"
    figure.suptitle(f"{report.model}, {counted(report.world, 'rank')}{machine}: predicted{prices_from(report.machine)}")
    for row, graph in zip(figure.subfigures(len(report.graphs), 1, squeeze=False)[:, 0], report.graphs, strict=True):
        panels = row.subplot_mosaic([["before", "whole"], ["after", "whole"]], width_ratios=(4, 1))
        _layer(graph, typical(graph), panels["before"], panels["after"])
        _whole(graph, panels["whole"])
    written = io.BytesIO()
    figure.savefig(written, format=form, dpi=DOTS_PER_INCH)
    pyplot.close(figure)
    return written.getvalue()


def _layer(graph: GraphReport, part: ReportPart | None, above: Axes, below: Axes) -> None:
    """One place of the part, before and after on the same axis."""
    members: tuple[Block, ...] = () if part is None else part.blocks
    colors: dict[str, str] = {}
    longest_us = max((span.end_us for fused in (False, True) for span in _spans(graph, members, fused)), default=1.0)
    named = "no part" if part is None else f"{part.name} (×{part.count})"
    named = "the layers that were captured" if graph.schedule else named
    where = f"{title(graph)}: {named}{'' if graph.work else ', sites alone'}"
    for axes, fused, times in ((above, False, part and part.before), (below, True, part and part.after)):
        for span in _spans(graph, members, fused):
            palette = COLORS[span.stream]
            color = colors.setdefault(span.name, palette[sum(c in palette for c in colors.values()) % len(palette)])
            track = STREAMS.index(span.stream)
            axes.broken_barh([(span.start_us, span.duration_us)], (track - 0.4, 0.8), color=color, edgecolor="white")
            if span.duration_us >= LEAST_LABELLED * longest_us:
                middle = span.start_us + span.duration_us / 2
                axes.text(middle, track, span.name, ha="center", va="center", color="white", fontsize=8, clip_on=True)
        axes.set_yticks(range(len(STREAMS)), STREAMS)
        axes.set_ylim(len(STREAMS) - 0.4, -0.6)
        axes.set_xlim(0, longest_us)
        ends_us = max((span.end_us for span in _spans(graph, members, fused)), default=0.0)
        words = f"{ends_us:,.1f} us" if graph.schedule else _words(times or Times())
        axes.set_title(f"{where}, {'after' if fused else 'before'}: {words}", fontsize=9, loc="left")
    below.set_xlabel("microseconds")
    handles = [_patch(color) for color in colors.values()]
    if handles:
        below.legend(handles, list(colors), ncols=8, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.3))


def _spans(graph: GraphReport, members: tuple[Block, ...], fused: bool) -> list[Span]:
    """Spans of a panel: the schedule of the graph if the report has one, otherwise the members one after the other."""
    if graph.schedule:
        tasks = graph.schedule if fused else graph.schedule_before
        return [Span(task.name, task.stream, task.start_us, task.us) for task in tasks if task.stream in STREAMS]
    return [span for *_, span in spans_of(((block, 0) for block in members), fused)]


def _whole(graph: GraphReport, axes: Axes) -> None:
    """Exposed communication on top of everything else, before and after."""
    times = (total(graph, fused=False), total(graph, fused=True))
    rest = [(each.us - each.exposed_us) / 1e3 for each in times]
    exposed = [each.exposed_us / 1e3 for each in times]
    names = ["before", "after"]
    axes.bar(names, rest, color=REST, label="all else")
    top = axes.bar(names, exposed, bottom=rest, color=EXPOSED, label="exposed communication")
    labels = [f"{each.us / 1e3:,.2f} ms\n{each.exposed_share:.0%} exposed" for each in times]
    axes.bar_label(top, labels=labels, fontsize=8)
    axes.set_title(f"{'whole model' if graph.work else 'all sites'}{_faster(headline(graph))}", fontsize=9)
    axes.set_ylabel("milliseconds")
    axes.margins(y=0.2)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.06))


def _faster(found: Headline) -> str:
    """`: ×1.04, ×1.13 with kernels that have never run`."""
    if not found.counting.us:
        return ""
    never = f", ×{found.before.us / found.chosen.us:.2f}\nwith kernels that have never run" if found.never_ran else ""
    return f": ×{found.before.us / found.counting.us:.2f}{never}"


def _patch(color: str) -> Patch:
    from matplotlib.patches import Patch

    return Patch(color=color)


def _words(times: Times) -> str:
    return f"{times.us:,.1f} us, {times.exposed_us:,.1f} ({times.exposed_share:.0%}) of it exposed communication"
