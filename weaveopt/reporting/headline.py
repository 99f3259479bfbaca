"""The predicted gain of a graph in one line: without the rewrites that prove nothing, and with what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from weaveopt.records.candidate import NEVER_RAN
from weaveopt.records.report import Decision, GraphReport, MachineSummary, OutsideWork
from weaveopt.reporting.reasons import kernel_of
from weaveopt.reporting.timeline import Times, blocks, count_of, times_of, total
from weaveopt.wording import counted

MEASURED = "measured"
"""The kind of an origin whose constants were measured on such a machine."""


class Standing(Enum):
    """Significance of a decision's predicted saving."""

    COUNTS = "counts"
    NEVER_RAN = "never ran"
    """Kernels that have never run on any machine."""
    WITHIN_ERROR = "within the error"
    """Savings that do not exceed what the two prices may be off by."""


@dataclass(frozen=True)
class Headline:
    """Times of a graph as it is, with the rewrites that count, and with all that were chosen."""

    before: Times
    counting: Times
    chosen: Times
    never_ran: tuple[str, ...] = ()
    """Kernels that were chosen and have never run: `multimem two_shot direct`."""
    num_within_error: int = 0
    """Places of the model whose rewrite saves no more than the error."""
    relative_error: float = 0.0
    """The largest one of those, relative to the time that the site takes as it is."""


def standing(decision: Decision) -> Standing:
    if decision.rewritten and decision.chosen.fabric in NEVER_RAN:
        return Standing.NEVER_RAN
    return Standing.WITHIN_ERROR if decision.rewritten and _within_error(decision) else Standing.COUNTS


def headline(graph: GraphReport) -> Headline:
    standings = [(decision, standing(decision)) for decision in graph.decisions]
    doubtful = [decision for decision, found in standings if found is Standing.WITHIN_ERROR]
    counting = Times()
    for block in blocks(graph):
        fused = isinstance(block, OutsideWork) or standing(block) is Standing.COUNTS
        counting += times_of(block, fused) * count_of(block)
    after = total(graph, fused=True)
    if any(each.name == graph.variant for each in graph.variants[1:]):
        counting = after  # a timeline: what a site adds to it is not known
    unrun = [decision.chosen for decision, found in standings if found is Standing.NEVER_RAN]
    return Headline(
        before=total(graph, fused=False),
        counting=counting,
        chosen=after,
        never_ran=tuple(dict.fromkeys(f"{each.fabric.value} {kernel_of(each)}" for each in unrun)),
        num_within_error=sum(decision.site.count for decision in doubtful),
        relative_error=max((_relative_error(decision) for decision in doubtful), default=0.0),
    )


def headline_line(graph: GraphReport, machine: MachineSummary | None) -> str:
    """`whole model: 100.0 -> 80.0 us, 1.25 times as fast, by constants of papers; communication exposed ...`."""
    found = headline(graph)
    before, after = found.before, found.counting
    what = "whole model" if graph.work else "sites alone, as kernels outside them were not predicted"
    parts = [f"{what}: {before.us:,.1f} -> {after.us:,.1f} us{_faster(before, after)}{prices_from(machine)}"]
    if found.never_ran:
        also = _faster(before, found.chosen).removeprefix(", ") or "the same"
        parts.append(f"{also} with kernels that have never run ({', '.join(found.never_ran)})")
    if found.num_within_error:
        places = counted(found.num_within_error, "rewrite")
        saves = "saves" if found.num_within_error == 1 else "save"
        parts.append(f"{places} that {saves} no more than the error of {found.relative_error:.0%} not counted")
    parts.extend(_steady(graph, before, after))
    shares = f"{before.exposed_us:,.1f} us ({before.exposed_share:.0%}) -> {after.exposed_us:,.1f} us"
    parts.append(f"communication exposed {shares} ({after.exposed_share:.0%})")
    return "; ".join(parts)


def machine_line(machine: MachineSummary | None) -> str:
    """The machine, and what of it was measured."""
    if machine is None:
        return "machine: none (nothing was estimated)"
    return f"{_machine(machine)}{f'; {machine.note}' if machine.note else ''}"


def _machine(machine: MachineSummary) -> str:
    if machine.stands_in_for:
        gpus = ", ".join(machine.stands_in_for)
        return f"machine: {machine.name} stands in for {gpus}, which has no profile: run `weaveopt calibrate`"
    if machine.measured:
        return f"machine: {machine.name} (every constant measured)"
    kinds: dict[str, dict[str, None]] = {}
    for kind, constant in _origins(machine):
        kinds.setdefault(kind, {})[constant] = None
    if MEASURED not in kinds:
        return f"machine: {machine.name} (nothing measured on it) {_listed(kinds)}".rstrip()
    return f"machine: {machine.name} (not all measured) {_listed(kinds)}".rstrip()


def _listed(kinds: dict[str, dict[str, None]]) -> str:
    return "; ".join(f"{kind}: {', '.join(constants)}" for kind, constants in sorted(kinds.items()))


def _origins(machine: MachineSummary) -> Iterator[tuple[str, str]]:
    """(kind, block of constants) of every constant; the JSON report has each by itself."""
    for constant, origin in machine.origins:
        words = str(origin).split()
        yield words[0].rstrip(":,;") if words else "unknown", ".".join(constant.split(".")[:2])


def prices_from(machine: MachineSummary | None) -> str:
    """`, by constants of papers`: the sources of prices that were not measured on such a machine; empty if all were."""
    if machine is None or machine.measured:
        return ""
    if machine.stands_in_for:
        return f", by constants of {machine.name}"
    kinds = sorted({kind for kind, _ in _origins(machine)})
    others = [f"{kind}s" for kind in kinds if kind != MEASURED]
    if not others:
        return ""
    return f", {'partly ' if MEASURED in kinds else ''}by constants of {' and '.join(others)}"


def _steady(graph: GraphReport, before: Times, after: Times) -> Iterator[str]:
    """`run after run, at the power limit: 27,600.0 -> 24,800.0 us`, where that is longer than a single run.

    Power is known of the captured layers. Where those stand for more, the whole model is as much slower as they are.
    """
    chosen = next((each for each in graph.variants if each.name == graph.variant), None)
    captured = graph.variants[0] if graph.variants else None
    if chosen is None or captured is None or not captured.baseline_us or not chosen.predicted_us:
        return
    if chosen.steady_us is None or captured.baseline_steady_us is None:
        return
    slower = captured.baseline_steady_us / captured.baseline_us, chosen.steady_us / chosen.predicted_us
    if max(slower) > 1.005:  # else it prints as the same
        times = f"{before.us * slower[0]:,.1f} -> {after.us * slower[1]:,.1f} us"
        yield f"run after run, at the power limit: {times}"


def _faster(before: Times, after: Times) -> str:
    if not after.us or f"{before.us:.1f}" == f"{after.us:.1f}":
        return ""
    return f", {before.us / after.us:.2f} times as fast"


def _within_error(decision: Decision) -> bool:
    before, after = decision.baseline, decision.chosen.estimate
    return before is not None and after is not None and decision.saving_us <= decision.saving_error_us


def _relative_error(decision: Decision) -> float:
    before = decision.baseline
    return 0.0 if before is None or not before.decided_us else decision.saving_error_us / before.decided_us
