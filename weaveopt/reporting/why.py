"""Full report of one site: what it computes, every candidate with its terms, every reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from weaveopt.errors import OptionError, closest
from weaveopt.records.candidate import Candidate, Estimate, Rejection, Term
from weaveopt.records.price import PriceSource
from weaveopt.records.report import Decision, GraphReport, Report, Variant
from weaveopt.records.site import Site
from weaveopt.reporting.memory import table_text
from weaveopt.reporting.reasons import absent_fabrics, collapse
from weaveopt.reporting.sections import sensitivity_lines
from weaveopt.reporting.terminal import to_text
from weaveopt.reporting.timeline import title
from weaveopt.wording import counted

_TURNS = {
    "turns_at_link": "with {} times the link's bandwidth another graph is best, all else held",
    "turns_at_contention": "where GEMMs take {} times as long while the library exchanges another graph is best",
}
"""Values of a variant that say what would turn the choice, in words."""


def find(report: Report, wanted: str) -> tuple[tuple[GraphReport, Decision], ...]:
    """Sites whose id or module is `wanted`, or whose collapsed module is; then those whose module holds it.

    Raises `OptionError` that names the nearest site where there is none.
    """
    every = tuple((graph, decision) for graph in report.graphs for decision in graph.decisions)
    exact = tuple(pair for pair in every if wanted in (pair[1].site.id, pair[1].site.module))
    collapsed = tuple(pair for pair in every if collapse(pair[1].site.module) == wanted)
    holding = tuple(pair for pair in every if wanted in pair[1].site.module)
    found = exact or collapsed or (holding if wanted else ())
    if not found:
        known = tuple(dict.fromkeys(name for _, d in every for name in (d.site.id, d.site.module)))
        raise OptionError(
            f"--why {wanted}: no such site: {closest(wanted, known)}" if known else "--why: the graph has no site"
        )
    return found


def text(report: Report, wanted: str, width: int | None = None, color: bool = False) -> str:
    """Format the full report of the sites that `wanted` names, or of variants by their name or that of their rule."""
    parts: list[RenderableType] = []
    for graph in report.graphs:
        made = [each for each in graph.variants if each.rule and wanted in (each.rule, each.name)]
        if made:
            parts.append(Text(f"graph {graph.name}: {title(graph)}", style="bold"))
            parts.extend(line for each in (*graph.variants[:1], *made) for line in _variant(graph, each))
    if parts:
        return to_text(Group(*parts), width, color)
    for graph, decision in find(report, wanted):
        parts.extend(_site(graph, decision))
    return to_text(Group(*parts), width, color)


def _variant(graph: GraphReport, variant: Variant) -> Iterator[RenderableType]:
    """Lines on a variant of a graph: times, what its rule chose, and every reason against it."""
    times = [("as it is", variant.baseline_us), ("as decided", variant.predicted_us)]
    times += [("exposed", variant.exposed_us), ("computation added", variant.added_us)]
    known = ", ".join(f"{name} {us:,.2f} us" for name, us in times if us is not None)
    status = "runs" if variant.name == graph.variant else "does not run"
    yield _line(f"{variant.name}: {status}{f'; {known}' if known else ''}")
    values = [*variant.parameters, *(pair for why in variant.rejections for pair in why.values)]
    shown = [(name, value) for name, value in variant.parameters if name not in _TURNS]
    if shown:
        yield _line(", ".join(f"{name} {value}" for name, value in shown), 4)
    for why in variant.rejections:
        plain = tuple((name, value) for name, value in why.values if name not in _TURNS)
        yield _line(_reason(replace(why, values=plain)), 4)
    for name, value in values:
        if name in _TURNS:
            yield _line(_TURNS[name].format(value), 4)


def _site(graph: GraphReport, decision: Decision) -> list[RenderableType]:
    site = decision.site
    parts: list[RenderableType] = [
        Text(f"site {site.id}: {site.module}", style="bold"),
        _line(f"graph {graph.name}: {title(graph)}; stands for {counted(site.count, 'place')} of the model"),
        _line(f"kind {site.kind}, {_where(site)}, collectives {', '.join(site.collectives) or 'none'}"),
        _line(f"form: {site.description or 'not recognized'}"),
        _line(f"{counted(site.tokens.hint, 'token')} (at most {site.tokens.most})"),
    ]
    if site.facts:
        parts.append(_line("; ".join(f"{name} {value}" for name, value in site.facts if value != "")))
    parts.extend(_line(f"every rule: {_reason(rejection)}") for rejection in site.rejections)
    parts.append(_line(f"unfused: {_estimate(decision.baseline)}"))
    parts.extend(_candidate("chosen", decision.chosen))
    if decision.chosen.table:
        parts.append(_line(f"run-time table: {table_text(decision.chosen.table, site.tokens.most)}"))
    parts.extend(_line(note) for note in decision.chosen.notes)
    absent = absent_fabrics(graph.decisions)
    for candidate in decision.alternatives:
        if candidate.fabric.value in absent:
            continue
        parts.extend(_candidate("allowed" if candidate.allowed else "rejected", candidate))
    if absent:
        parts.append(_line(f"no fabric here: {'; '.join(absent.values())}"))
    parts.append(_line(f"saved: {decision.saving_us:,.2f} us each{_interval(decision)}"))
    for found in graph.sensitivity:
        if site.id in found.sites:
            parts.append(_line("what would change the choice, all else held:"))
            parts.extend(_line(line, 4) for line in sensitivity_lines(found))
    return parts


def _candidate(status: str, candidate: Candidate) -> list[RenderableType]:
    parameters = "".join(f" {name}={value}" for name, value in candidate.parameters)
    variant = f", {candidate.variant}" if candidate.variant else ""
    head = f"{status}: {candidate.choice} on {candidate.fabric.value}{variant}{parameters}: "
    lines: list[RenderableType] = [_line(head + _estimate(candidate.estimate))]
    lines.extend(_line(_reason(rejection), 4) for rejection in candidate.rejections)
    return lines


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "not estimated"
    terms = "".join(f" {'-' if term.us < 0 else '+'} {_term(term)}" for term in estimate.terms)
    exposed = f", communication exposed {estimate.exposed_us:,.2f}"
    found = estimate.measured
    measured = "" if found is None else f"; measured {found.us:,.2f} us ±{found.relative_error:.0%}"
    return f"{estimate.us:,.2f} us ±{estimate.relative_error:.0%} ={terms.removeprefix(' +')}{exposed}{measured}"


def _term(term: Term) -> str:
    """`gemm 30.31 ±1.20 interpolated`: the term, its standard error, and where it comes from unless it was measured."""
    error = f" ±{term.error_us:,.2f}" if term.error_us >= 0.005 else ""
    source = "" if term.source is PriceSource.MEASURED or not error else f" {term.source.value}"
    return f"{term.name} {abs(term.us):,.2f}{error}{source}"


def _interval(decision: Decision) -> str:
    """Interval of the saving, by the errors of the two prices that it is the difference of."""
    saved_us, error_us = decision.saving_us, decision.saving_error_us
    if not decision.rewritten:
        return ""
    return f" ±{error_us:,.2f} ({saved_us - error_us:,.2f} to {saved_us + error_us:,.2f})"


def _reason(rejection: Rejection) -> str:
    values = ", ".join(f"{name}={value}" for name, value in rejection.values)
    return f"{rejection.code}: {rejection.message}" + (f" ({values})" if values else "")


def _where(site: Site) -> str:
    return f"group {', '.join(site.groups)}" if site.groups else "local"


def _line(line: str, indent: int = 2) -> RenderableType:
    return Padding(Text(line), (0, 0, 0, indent))
