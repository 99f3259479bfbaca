"""Levers on a model's speed: missing measurements, graph breaks, candidates that are slower, by time at stake."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from weaveopt.records.candidate import LEAVE, Candidate, Fabric
from weaveopt.records.report import Decision, Report
from weaveopt.reporting.reasons import absent_fabrics, collapse

MOST = 5
CALIBRATE = "weaveopt calibrate"
UNMEASURED = frozenset(("not_measured", "contention_not_measured", "beyond_measured", "machine_not_measured"))
"""Codes of candidates that lack a measurement and nothing else."""
SHOWN_US = 0.05
"""Smallest time that is not shown as 0.0."""
OVERLAPS = "overlaps"
"""Code of candidates whose nodes another rewrite replaces."""
SLOWER = frozenset(("no_saving", "library_faster", "slower_algorithm", "slower_candidate", "slower_variant"))


@dataclass
class Lever:
    """One thing that holds the model back, and the places that it is about."""

    words: str
    us: float = 0.0
    """Time at stake: communication that nothing hides, or the time of local sites, in the whole model."""
    places: dict[str, int] = field(default_factory=dict)
    rules: dict[str, None] = field(default_factory=dict)
    """Rules that lack a measurement, with their fabrics."""

    def sentence(self) -> str:
        if self.rules:
            return f"not measured: {', '.join(self.rules)}: {self.words}"
        where = ", ".join(f"{module} ×{count}" for module, count in self.places.items())
        return f"{where}: {self.words}"


def lever_lines(report: Report) -> tuple[tuple[str, str], ...]:
    """Return (time at stake, what to do or why not) of at most five: graph breaks, whose time is unknown, then the
    rest."""
    breaks = sorted(report.breaks, key=lambda found: -found.count)
    lines = [
        ("", f"graph break ×{each.count} at {each.where or 'an unknown place'}: {each.reason}{_hint(each.hint)}")
        for each in breaks
    ]
    ranked = sorted(levers(report), key=lambda lever: -lever.us)
    lines += [(f"{lever.us:,.1f} us", lever.sentence()) for lever in ranked]
    more = len(lines) - MOST
    return (*lines[: MOST - 1], ("", f"and {more + 1} more")) if more > 0 else tuple(lines)


def levers(report: Report) -> tuple[Lever, ...]:
    """One for each reason, with the time at stake of all places that it holds for."""
    found: dict[Hashable, Lever] = {}
    for graph in report.graphs:
        absent = absent_fabrics(graph.decisions)
        for decision in graph.decisions:
            here = [each for each in decision.alternatives if each.choice != LEAVE and each.fabric.value not in absent]
            stake_us = _stake_us(decision)
            for key, lever in _levers_of(decision, here, report) if stake_us > 0 else ():
                lever = found.setdefault(key, lever)
                lever.us += stake_us
                module = collapse(decision.site.module or decision.site.id)
                lever.places[module] = lever.places.get(module, 0) + decision.site.count
                lever.rules |= {_named(each): None for each in here if _unmeasured(each)}
    return tuple(found.values())


def _stake_us(decision: Decision) -> float:
    """Communication that nothing hides, as chosen; of a local site that is left for other reasons than prices, all of
    its time."""
    estimate = decision.chosen.estimate
    if estimate is None:
        return 0.0
    if decision.site.groups:
        return estimate.exposed_us * decision.site.count
    return 0.0 if decision.rewritten or is_fastest(decision) else estimate.us * decision.site.count


def is_fastest(decision: Decision) -> bool:
    """True if a local site is left and nothing is against its candidates but prices, or rewrites of the same nodes."""
    others = [each for each in decision.alternatives if each.choice != LEAVE]
    is_left = not decision.rewritten and not decision.site.groups
    return is_left and bool(others) and all(_is_priced(each, SLOWER | {OVERLAPS}) for each in others)


def _is_priced(candidate: Candidate, but_for: frozenset[str] = SLOWER) -> bool:
    """True if nothing is against a candidate but what these codes name."""
    return candidate.estimate is not None and {each.code for each in candidate.rejections} <= but_for


def _levers_of(decision: Decision, here: list[Candidate], report: Report) -> Iterator[tuple[Hashable, Lever]]:
    if any(_unmeasured(each) for each in here):
        run = f"torchrun --nproc-per-node {report.world} -m weaveopt calibrate" if report.world > 1 else CALIBRATE
        yield UNMEASURED, Lever(f"run `{run}` on such a machine")
        return
    if decision.rewritten:
        return
    priced = [each for each in here if _is_priced(each)]
    if decision.site.rejections:
        reason = decision.site.rejections[0]
        yield (reason.code, reason.message), Lever(f"{reason.code}: {reason.message}")
    elif priced:
        best = min(priced, key=lambda each: each.estimate.decided_us if each.estimate is not None else 0.0)
        words = _slower(decision, best)
        yield words, Lever(words)
    elif rejected := [each for each in here if each.rejections]:
        nearest = min(rejected, key=lambda each: len(each.rejections))
        reason = nearest.rejections[0]
        yield (nearest.choice, reason.code, reason.message), Lever(f"{nearest.choice}: {reason.code}: {reason.message}")


def _slower(decision: Decision, best: Candidate) -> str:
    """Describe by how much the fastest candidate of an unmodified site is slower, or too little faster."""
    assert best.estimate is not None and decision.chosen.estimate is not None, decision
    more_us = best.estimate.decided_us - decision.chosen.estimate.decided_us
    named = f"{_named(best)} ({best.variant})" if best.variant else _named(best)
    if abs(more_us) < SHOWN_US:
        return f"left: {named} would be as fast"
    if more_us > 0:
        return f"left: {named} would be slower by {more_us:,.1f} us each"
    error_us = best.estimate.error_us if best.estimate.saving_error_us is None else best.estimate.saving_error_us
    return f"left: {named} would save {-more_us:,.1f} us each, within the error of {error_us:,.1f} us"


def _unmeasured(candidate: Candidate) -> bool:
    codes = {rejection.code for rejection in candidate.rejections}
    return bool(codes) and codes <= UNMEASURED


def _named(candidate: Candidate) -> str:
    """The rule and its fabric; the rule alone where it communicates through the library or not at all."""
    on = "" if candidate.fabric is Fabric.LIBRARY else f" on {candidate.fabric.value}"
    return f"{candidate.choice}{on}"


def _hint(hint: str) -> str:
    return f" ({hint})" if hint else ""
