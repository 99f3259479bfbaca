"""Decisions for a graph as lines of a log: one for the graph, one a site, one a failure."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from weaveopt.records.report import Decision, GraphReport
from weaveopt.wording import counted

LOGGER = logging.getLogger("weaveopt")
"""The only one: each graph at INFO; a table of its sites, and the reasons, at DEBUG. `TORCH_LOGS=weaveopt` and
`+weaveopt` show them, and so does `WEAVE_DEBUG` (see `weaveopt.debug`)."""
COLUMNS = ("site", "module", "kind", "×", "choice", "before us", "after us")


def log(graph: GraphReport) -> None:
    """Writes the graph's lines; costs nothing where the log is off."""
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("%s", graph_line(graph))
        for fallback in graph.fallbacks:
            LOGGER.info("%s runs unrewritten, step %s: %s", graph.name, fallback.step, fallback.error)
        for rule, error in graph.failed_rules:
            LOGGER.info("%s has no variant of %s, which failed: %s", graph.name, rule, error)
    if LOGGER.isEnabledFor(logging.DEBUG):
        for line in (*decision_table(graph), *site_lines(graph)):
            LOGGER.debug("%s", line)


def graph_line(graph: GraphReport) -> str:
    """`graph0 (prefill, 512 tokens): 2 of 3 sites rewritten (RULE on shm ×2), 100.0 -> 80.0 us`."""
    sites = counted(len(graph.decisions), "site")
    found = Counter(_choice(decision) for decision in graph.decisions if decision.rewritten)
    choices = ", ".join(f"{choice} ×{times}" for choice, times in found.items())
    rewritten = f"{graph.num_rewritten} of {sites} rewritten{f' ({choices})' if choices else ''}"
    times = f", {graph.unfused_us:,.1f} -> {graph.predicted_us:,.1f} us" if graph.decisions else ""
    variant = "" if graph.variant == "captured" else f", variant {graph.variant}"
    return f"{graph.name} ({graph.phase}, {counted(graph.tokens, 'token')}{variant}): {rewritten}{times}"


def decision_table(graph: GraphReport) -> Iterator[str]:
    """The decisions, a row each, in columns."""
    rows = [COLUMNS, *map(_row, graph.decisions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if graph.decisions else ():
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()


def _row(decision: Decision) -> tuple[str, ...]:
    site, before, after = decision.site, decision.baseline, decision.chosen.estimate
    times = ("-" if each is None else f"{each.us:,.1f}" for each in (before, after))
    return (site.id, site.module, site.kind, str(site.count), _choice(decision), *times)


def site_lines(graph: GraphReport) -> Iterator[str]:
    """Each site's choice, and the first reason against every candidate that was not chosen."""
    for decision in graph.decisions:
        site = decision.site
        yield f"{graph.name} {site.id} {site.module} ({site.kind}): {_choice(decision)}{_against(decision)}"


def _choice(decision: Decision) -> str:
    chosen = decision.chosen
    return f"{chosen.choice} on {chosen.fabric.value}" if decision.rewritten else chosen.choice


def _against(decision: Decision) -> str:
    own = [f"{reason.code}: {reason.message}" for reason in decision.site.rejections[:1]]
    others = [
        f"{each.choice} on {each.fabric.value}: {each.rejections[0].code}: {each.rejections[0].message}"
        for each in decision.alternatives
        if each.rejections
    ]
    return "".join(f"; not {reason}" for reason in (*own, *others))
