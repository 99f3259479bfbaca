"""How far predictions are off: by kind of case, and how good the choices are that rest on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from benchmarks.record import Row

CHOICE = "choice"
"""Kind of the rows that hold a site's choice against its other candidates, and against leaving it alone."""
SWEPT = "swept"
"""Parameter of those rows of which only the choice and leaving were measured: how often each of the two was."""
NEVER_SLOWER = 0.99
"""Least acceptable speed of a choice, as a share of the speed of leaving the site alone."""
KIND = "kind"
ALL = "all"


def is_accuracy(rows: Sequence[Row]) -> bool:
    """True if these are rows of the suite `prediction`."""
    return bool(rows) and all(KIND in row.case for row in rows)


def error_of(row: Row) -> float:
    """|predicted / measured - 1|."""
    assert row.predicted_us is not None, f"{row.case} has no prediction"
    return abs(row.predicted_us / row.weave_us - 1)


def p90(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


@dataclass(frozen=True)
class Errors:
    """Errors of the predictions of one kind."""

    kind: str
    cases: int
    mean: float
    p90: float
    largest: float


@dataclass(frozen=True)
class Best:
    """The choice's speed as a share of the best candidate's, at sites whose candidates were all measured."""

    sites: int
    mean: float
    least: float


@dataclass(frozen=True)
class Leaving:
    """The choice's speed as a share of the speed of leaving the site alone, at all sites."""

    sites: int
    least: float
    worst: str
    """Site with the least share."""
    slower: int
    """Sites below `NEVER_SLOWER`."""
    unknown: int
    """Sites that are not counted, because the model's choice is not the one that was measured."""


@dataclass(frozen=True)
class Choices:
    best: Best | None
    leaving: Leaving | None


def predictions(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.case[KIND] != CHOICE]


def errors(rows: Sequence[Row]) -> list[Errors]:
    """A line for each kind, and one for all."""
    by_kind: dict[str, list[float]] = {}
    for row in predictions(rows):
        by_kind.setdefault(str(row.case[KIND]), []).append(error_of(row))
    everything = [error for found in by_kind.values() for error in found]
    return [
        Errors(kind, len(found), fmean(found), p90(found), max(found))
        for kind, found in [*by_kind.items(), (ALL, everything)]
        if found
    ]


def choices(rows: Sequence[Row]) -> Choices:
    """How good the choices are; None for what no row tells."""
    sites = [row for row in rows if row.case[KIND] == CHOICE]
    of_best = [float(row.parameters["of_best"]) for row in sites if "of_best" in row.parameters]
    best = Best(len(of_best), fmean(of_best), min(of_best)) if of_best else None
    known = [row for row in sites if "of_leaving" in row.parameters]
    if not known:
        return Choices(best, None)
    worst = min(known, key=of_leaving)
    where = " x ".join(str(worst.case[name]) for name in ("ranks", "tokens", "hidden"))
    slower = sum(of_leaving(row) < NEVER_SLOWER for row in known)
    return Choices(best, Leaving(len(known), of_leaving(worst), where, slower, len(sites) - len(known)))


def of_leaving(row: Row) -> float:
    return float(row.parameters["of_leaving"])


def sentence(found: Choices) -> str:
    """Both figures; empty without any site."""
    parts = []
    best, leaving = found.best, found.leaving
    if best is not None:
        parts.append(
            f"{best.sites} sites, all candidates measured: the choice has {best.mean:.1%} of the best candidate's "
            f"speed on average and {best.least:.1%} at least."
        )
    if leaving is not None:
        parts.append(
            f"{leaving.sites} sites against leaving them alone: {leaving.least:.2f}x at least ({leaving.worst}), "
            f"{leaving.slower} below {NEVER_SLOWER}x."
        )
        if leaving.unknown:
            parts.append(f"{leaving.unknown} more are not counted: the choice there is not the one that was measured.")
    return " ".join(parts)
