"""Sections of the text report after the sites: timed kernels, the whole model by part, the arena, what would change a
choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weaveopt.records.candidate import LEAVE
from weaveopt.records.report import ChoiceRange, GraphReport, MachineSummary, Report, Sensitivity
from weaveopt.reporting.headline import headline_line
from weaveopt.reporting.memory import arena_line, arena_rows
from weaveopt.reporting.parts import parts
from weaveopt.reporting.reasons import collapse
from weaveopt.reporting.timeline import Times, total
from weaveopt.wording import counted

SHOWN_AROUND = 2
"""Stretches shown on each side of the one decided for; the JSON report has them all."""
SHOWN_KERNELS = 8
"""Local kernels, and doubts, in the text; the JSON report has them all."""


def broken(report: Report) -> Iterator[str]:
    """Lines on a model of several graphs: their number, graph breaks, communication outside them, and uncompiled
    calls."""
    yield from graph_count_lines(report)
    for found in report.breaks:
        hint = f" ({found.hint})" if found.hint else ""
        yield f"graph break ×{found.count} at {found.where or 'an unknown place'}: {found.reason}{hint}"
    yield from outside_lines(report)


def graph_count_lines(report: Report) -> Iterator[str]:
    """Line with the number of graphs that Dynamo made, if there are several."""
    if report.num_graphs > 1:
        ended = "Dynamo broke the model, and no rewrite reaches across a break" if report.breaks else "no graph break"
        yield f"{counted(report.num_graphs, 'graph')}: {ended}"


def outside_lines(report: Report) -> Iterator[str]:
    """Lines on what ran outside of the graphs: communication, and calls without compiled code."""
    for each in report.outside:
        yield (
            f"communication outside the graphs: at least {counted(each.collectives, 'collective')} of group "
            f"{each.group} after the break at {each.after}"
        )
    for calls in report.uncompiled:
        number = "" if calls.calls is None else f"{calls.calls} of "
        hint = f" ({calls.hint})" if calls.hint else ""
        yield f"uncompiled: {number}the calls of {calls.what or report.model}: {calls.reason}{hint}"


def kernel_lines(graph: GraphReport) -> Iterator[str]:
    """Timed kernels with the profile's prices, longest first, and choices that an unmeasured price may turn."""
    if graph.tuned:
        yield f"local kernels: {graph.tuned}"
    for kernel in graph.kernels[:SHOWN_KERNELS]:
        yield (
            f"  {kernel.kernel}: timed {kernel.us:,.1f} us ±{kernel.relative_error:.0%}, "
            f"the profile says {kernel.profile_us:,.1f}"
        )
    if len(graph.kernels) > SHOWN_KERNELS:
        yield f"  and {len(graph.kernels) - SHOWN_KERNELS} more"
    yield from doubt_lines(graph)


def doubt_lines(graph: GraphReport) -> Iterator[str]:
    """Choices that rest on a price which the profile interpolates or estimates, the dearest first."""
    modules = {decision.site.id: collapse(decision.site.module or decision.site.id) for decision in graph.decisions}
    for doubt in graph.doubts[:SHOWN_KERNELS]:
        where = ", ".join(dict.fromkeys(modules.get(site, site) for site in doubt.sites))
        yield (
            f"hangs on a price between measured ones: {where}: {doubt.kernel}, {doubt.us:,.1f} us: its error may turn "
            f"the choice, by up to {doubt.loss_us:,.1f} us"
        )


def whole(graph: GraphReport, machine: MachineSummary | None) -> list[RenderableType]:
    """Table of times before and after by part of the model, with exposed communication; one line if sites are all
    there is."""
    before, after = total(graph, fused=False), total(graph, fused=True)
    if not graph.work:
        failed = [Text(line, style="red") for line in work_failure_line(graph)]
        if not graph.decisions:
            return [*failed]
        return [Text(headline_line(graph, machine)), *failed]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("part, each", overflow="fold")
    for name in ("×", "before us", "after us", "saved", "exposed before us", "exposed after us"):
        table.add_column(name, justify="right")
    for part in parts(graph):
        table.add_row(part.name, str(part.count), *_cells(part.before, part.after))
    table.add_row("whole model", "", *_cells(before, after), style="bold")
    kinds: dict[str, float] = {}
    for work in graph.work:
        kinds[work.kind] = kinds.get(work.kind, 0.0) + work.us * work.count
    outside = ", ".join(f"{kind} {_us(us)}" for kind, us in kinds.items())
    return [Text(""), table, Text(headline_line(graph, machine)), Text(f"outside the sites: {outside} us"), Text("")]


def failure_lines(report: Report) -> Iterator[str]:
    for graph in report.graphs:
        yield from work_failure_line(graph)


def work_failure_line(graph: GraphReport) -> tuple[str, ...]:
    """Line on the failure that left the whole model without a prediction; decisions do not depend on it."""
    if graph.work_failure is None:
        return ()
    return (f"the work outside the sites of {graph.name} could not be estimated: {graph.work_failure}",)


def _cells(before: Times, after: Times) -> tuple[str, ...]:
    saved = f"{1 - after.us / before.us:.0%}" if before.us else ""
    exposed = (f"{_us(times.exposed_us)} {f'({times.exposed_share:.0%})':>6}" for times in (before, after))
    return (_us(before.us), _us(after.us), saved, *exposed)


def arena(graph: GraphReport) -> list[RenderableType]:
    """Each group's symmetric memory, slot by slot."""
    found: list[RenderableType] = []
    for plan in graph.plans:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(overflow="fold", max_width=30)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold", ratio=1)
        for what, offset, num_bytes, owners in arena_rows(plan, graph.decisions):
            table.add_row(what, f"at {offset}", f"{num_bytes} bytes", owners)
        found += [Text(arena_line(plan)), Padding(table, (0, 0, 0, 2))]
    return found


def sensitivity(graph: GraphReport) -> list[RenderableType]:
    """Lines on the token counts and constants at which another choice would win; equal answers once."""
    sites = {decision.site.id: decision.site for decision in graph.decisions}
    equal: dict[Sensitivity, dict[str, int]] = {}
    for found in graph.sensitivity:
        names = equal.setdefault(replace(found, sites=()), {})
        for site in found.sites:
            module = collapse(sites[site].module or site) if site in sites else site
            names[module] = names.get(module, 0) + (sites[site].count if site in sites else 1)
    lines: list[RenderableType] = [Text("what would change the choice, all else held:")] if equal else []
    for found, names in equal.items():
        lines.append(_line(", ".join(f"{name} ×{count}" for name, count in names.items()), 2))
        lines.extend(_line(line, 4) for line in sensitivity_lines(found))
    return lines


def sensitivity_lines(found: Sensitivity) -> tuple[str, str]:
    """The choice by token count around the one decided for, and the constants that turn it."""
    choices = {stretch.choice for stretch in found.stretches} | {str(choice) for _, choice in found.constants}
    rules = {choice.split()[0] for choice in choices | {found.choice} if choice != LEAVE}
    # With a single rule, only its variants need to be distinguished.
    rule = f"{rules.pop()} " if len(rules) == 1 else ""
    short = replace(
        found,
        choice=found.choice.removeprefix(rule),
        stretches=tuple(replace(each, choice=each.choice.removeprefix(rule)) for each in found.stretches),
        constants=tuple((change, str(choice).removeprefix(rule)) for change, choice in found.constants),
    )
    return f"tokens: {_stretches(short.stretches, found.tokens)}", f"constants: {_constants(short)}"


def _stretches(stretches: Sequence[ChoiceRange], tokens: int) -> str:
    here = max(index for index, stretch in enumerate(stretches) if index == 0 or stretch.tokens <= tokens)
    first, last = max(here - SHOWN_AROUND, 0), min(here + SHOWN_AROUND, len(stretches) - 1)
    words = []
    for index in range(first, last + 1):
        start = f"from {stretches[index].tokens:,} " if index else ""
        end = f"up to {stretches[index + 1].tokens - 1:,} " if index == 0 and len(stretches) > 1 else ""
        chosen = f" (here: {tokens:,})" if index == here else ""
        words.append(f"{start or end or 'at every count '}{stretches[index].choice}{chosen}")
    return f"{'… ' if first else ''}{'; '.join(words)}{' …' if last + 1 < len(stretches) else ''}"


def _constants(found: Sensitivity) -> str:
    turned: dict[str, list[str]] = {}
    for change, choice in found.constants:
        if choice != found.choice:
            turned.setdefault(str(choice), []).append(change)
    tried, num_turned = len(found.constants), sum(map(len, turned.values()))
    if not turned:
        return f"none of {counted(tried, 'change')} turns it (the JSON report lists them)"
    words = (f"{choice} with {', '.join(changes)}" for choice, changes in turned.items())
    return f"{'; '.join(words)} ({num_turned} of {counted(tried, 'change')} turn it)"


def _line(line: str, indent: int) -> RenderableType:
    return Padding(Text(line), (0, 0, 0, indent))


def _us(us: float) -> str:
    return f"{us:,.1f}"
