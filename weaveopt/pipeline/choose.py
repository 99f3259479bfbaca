"""Choose: of the captured graph and its variants, each decided for itself, the one that is predicted fastest.

A variant has to be predicted faster than the captured graph by more than the two predictions may be off by, at every
token count that the compiled graph serves. Overlap whose contention was not measured saves nothing. Where both were
timed (option `verify`), the measured times decide, at other token counts scaled as the predictions are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from weaveopt import cost_model
from weaveopt.cost_model.schedule import Pair
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.pipeline.timeline import Timeline
from weaveopt.pipeline.token_counts import exchanged_rows, tokens_at
from weaveopt.records.candidate import Measured, Rejection
from weaveopt.records.price import Price, PriceSource
from weaveopt.records.report import Regime, Variant
from weaveopt.rule import CapturedGraph, Context


@dataclass(frozen=True)
class ChosenGraph:
    """The graph that runs, and what it was compared with."""

    best: DecidedGraph
    compared: tuple[Variant, ...]
    """The captured graph first."""
    regime: Regime | None
    """Token counts at which it is the best one."""


class TimedGraphs(Protocol):
    """Decided graphs that were timed whole; by position among them."""

    @property
    def times(self) -> Mapping[int, Measured]: ...

    @property
    def failures(self) -> Mapping[int, Rejection]:
        """Why a graph could not be run."""
        ...

    @property
    def line(self) -> str:
        """Note of the measurement; empty where there was nothing to time."""
        ...


@dataclass(frozen=True)
class _Time:
    """Time of a graph in steady state, predicted or measured."""

    price: Price
    upper_us: float
    """The same where streams of unmeasured contention do not run at once."""
    not_measured: frozenset[Pair] = frozenset()
    is_timed: bool = False


@dataclass(frozen=True)
class _Measurements:
    """Measured times of graphs by position, each over its prediction at the token count that was decided for."""

    ratios: Mapping[int, float]
    errors: Mapping[int, float]
    failures: Mapping[int, Rejection]

    @staticmethod
    def of(timed: TimedGraphs | None, decided: Sequence[DecidedGraph]) -> _Measurements:
        known = {} if timed is None or 0 not in timed.times else timed.times
        ratios = {}
        for index, measured in known.items():
            timeline = decided[index].timeline
            if timeline is not None and timeline.steady_us > 0.0:
                ratios[index] = measured.us / timeline.steady_us
        errors = {index: known[index].relative_error for index in ratios}
        return _Measurements(ratios if 0 in ratios else {}, errors, {} if timed is None else timed.failures)

    def times(self, index: int, captured: Timeline | None, variant: Timeline | None) -> tuple[_Time, _Time] | None:
        """Times of the captured graph and of a variant, both measured or both predicted; None without a price."""
        if captured is None or variant is None:
            return None
        if index in self.ratios:
            return self._measured(0, captured), self._measured(index, variant)
        return _predicted(captured), _predicted(variant)

    def _measured(self, index: int, timeline: Timeline) -> _Time:
        us = timeline.steady_us * self.ratios[index]
        return _Time(Price.read(us, ("timed", index), self.errors[index], PriceSource.TIMED), us, is_timed=True)

    def upper_us(self, index: int, timeline: Timeline | None) -> float:
        if timeline is None:
            return float("inf")
        ratio = self.ratios.get(index)
        return timeline.upper_steady_us if ratio is None else timeline.steady_us * ratio


def _predicted(timeline: Timeline) -> _Time:
    return _Time(timeline.price, timeline.upper_steady_us, timeline.schedule.not_measured)


def choose(
    decided: Sequence[DecidedGraph],
    refused: Sequence[CapturedGraph],
    regimes: Sequence[Regime | None],
    context: Context,
    timed: TimedGraphs | None = None,
) -> ChosenGraph:
    """Choose among `decided`, the captured graph first, each with its regime. `refused` are variants that their rules
    refused themselves; every rejected variant is returned with its reason. `timed`: those that the ranks ran."""
    measurements = _Measurements.of(timed, decided)
    winner, against = _winner([each.timeline for each in decided], decided, measurements, context)
    compared = []
    for index, each in enumerate(decided):
        rejections = (*each.variant.rejections, *against[index])
        measured = None if timed is None else timed.times.get(index)
        added_us = _added_us(decided[0], each) if index else each.variant.added_us
        compared.append(replace(each.variant, rejections=rejections, added_us=added_us, measured=measured))
    compared.extend(Variant(each.variant, each.rule, rejections=each.rejections) for each in refused)
    regime = regimes[0]
    if len(decided) > 1 and regime is not None:
        regime = _with_same_winner(winner, decided, measurements, _common(regime, regimes[winner]), context)
    return ChosenGraph(decided[winner], tuple(compared), regime)


def _added_us(captured: DecidedGraph, variant: DecidedGraph) -> float | None:
    if captured.timeline is None or variant.timeline is None:
        return None
    return variant.timeline.computed_us - captured.timeline.computed_us


def _winner(
    timelines: Sequence[Timeline | None],
    decided: Sequence[DecidedGraph],
    measurements: _Measurements,
    context: Context,
) -> tuple[int, list[tuple[Rejection, ...]]]:
    """Position of the best graph, and what is against each of the others."""
    against: list[tuple[Rejection, ...]] = [()]
    best = 0
    upper_us = [measurements.upper_us(index, each) for index, each in enumerate(timelines)]
    for index, each in enumerate(decided[1:], start=1):
        forced = each.priced.captured.rule in context.config.force
        failed = measurements.failures.get(index)
        if failed is not None:
            against.append((failed,))
            continue
        against.append(() if forced else _against(measurements.times(index, timelines[0], timelines[index])))
        if not against[index] and (best == 0 or forced or upper_us[index] < upper_us[best]):
            best = index
    for index in range(1, len(decided)):
        if index != best and not against[index]:
            against[index] = (Rejection("slower_variant", "the variant that was chosen is predicted faster"),)
    return best, against


def _against(times: tuple[_Time, _Time] | None) -> tuple[Rejection, ...]:
    if times is None:
        return (Rejection("not_priced", "what the graph runs could not be priced"),)
    captured, variant = times
    error_us = (captured.price - variant.price).error_us
    if captured.price - variant.upper_us > error_us:
        return ()
    name = "measured_us" if variant.is_timed else "predicted_us"
    values = (("captured_us", round(float(captured.price), 2)), (name, round(variant.upper_us, 2)))
    if captured.price - variant.price > error_us:
        pairs = ", ".join(" and ".join(pair) for pair in sorted(variant.not_measured))
        message = "it saves only by work that runs at once, and how much that slows each other down was not measured"
        return (Rejection("not_measured", message, (*values, ("streams", pairs))),)
    message = "the predicted saving does not exceed what the two predictions may be off by"
    if variant.is_timed:
        message = "the measured saving does not exceed what the two times vary by"
    return (Rejection("no_saving", message, (*values, ("error_us", round(error_us, 2)))),)


def _common(a: Regime, b: Regime | None) -> Regime:
    if b is None:
        return a
    ends = [end for end in (a.max_tokens, b.max_tokens) if end is not None]
    return Regime(max(a.min_tokens, b.min_tokens), min(ends) if ends else None)


def _with_same_winner(
    winner: int, decided: Sequence[DecidedGraph], measurements: _Measurements, regime: Regime, context: Context
) -> Regime:
    """The part of a regime, around the count that was decided for, at all of whose counts the same graph is best."""
    captured = decided[0].priced.captured
    here = captured.tokens
    last = max(here, min(regime.max_tokens or context.config.max_tokens, context.config.max_tokens))
    grid = sorted(
        {here, regime.min_tokens, last}.union(
            tokens
            for length, dtype in exchanged_rows(decided[0].priced.frame.sites)
            for tokens in cost_model.token_grid(context.machine, length, dtype, regime.min_tokens, last)
        )
    )

    @cache
    def wins(tokens: int) -> bool:
        timelines = [timeline_at(each, tokens) for each in decided]
        return _winner(timelines, decided, measurements, context)[0] == winner

    below = _last_that_wins([each for each in reversed(grid) if regime.min_tokens <= each <= here], wins)
    above = _last_that_wins([each for each in grid if here <= each <= last], wins)
    return Regime(below, regime.max_tokens if above == last else above)


def _last_that_wins(counts: Sequence[int], wins: Callable[[int], bool]) -> int:
    """The last of `counts`, from the first on, up to which all win; the first is the one that was decided for."""
    found = counts[0]
    for tokens in counts[1:]:
        if not wins(tokens):
            break
        found = tokens
    return found


def timeline_at(decided: DecidedGraph, tokens: int) -> Timeline | None:
    """Timeline of a graph as it was decided, in a call of so many tokens."""
    priced = decided.priced
    counts = tokens_at(priced.captured, priced.frame.sites, tokens)
    problem = priced.frame.problem(counts)
    hint = priced.captured.tokens
    priced = replace(priced, problem=problem, ratio=tokens / hint if hint else 1.0)
    choices = []
    for site, position in zip(problem.sites, decided.positions, strict=True):
        able = position is not None and position in site.choices
        choices.append(site.choices.index(position) if able and position is not None else len(site.choices))
    rewritten = {}
    for index in range(len(choices)):
        proposal = problem.settled(index, tuple(choices))
        if proposal is not None and proposal.candidate.estimate is not None:
            rewritten[index] = (proposal.candidate.estimate, proposal.tasks)
    return priced.timeline(rewritten)
