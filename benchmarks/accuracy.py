"""How far predictions are off: by kind of case, and how good the choices are that rest on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from benchmarks.record import Row

CHOICE = "choice"
"""Kind of the rows that hold a site's choice against all of its candidates."""
KIND = "kind"
ALL = "all"


def is_accuracy(rows: Sequence[Row]) -> bool:
    """Whether these are the rows of the suite `prediction`."""
    return bool(rows) and all(KIND in row.case for row in rows)


def error_of(row: Row) -> float:
    """|predicted / measured - 1|."""
    assert row.predicted_us is not None, f"{row.case} has no prediction"
    return abs(row.predicted_us / row.weave_us - 1)


def p90(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


@dataclass(frozen=True)
class Errors:
    """Of the predictions of one kind."""

    kind: str
    cases: int
    mean: float
    p90: float
    largest: float


@dataclass(frozen=True)
class Choices:
    """Of sites whose candidates were all measured: the choice against the best of them, and against leaving it."""

    sites: int
    mean_of_best: float
    least_of_best: float
    least_of_leaving: float
    worst: str


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


def choices(rows: Sequence[Row]) -> Choices | None:
    """None without any site."""
    sites = [row for row in rows if row.case[KIND] == CHOICE]
    if not sites:
        return None
    of_best = [float(row.parameters["of_best"]) for row in sites]
    worst = min(sites, key=lambda row: float(row.parameters["of_leaving"]))
    where = " x ".join(str(worst.case[name]) for name in ("ranks", "tokens", "hidden"))
    return Choices(len(sites), fmean(of_best), min(of_best), float(worst.parameters["of_leaving"]), where)


def sentence(found: Choices) -> str:
    return (
        f"{found.sites} sites, all candidates measured: the choice has {found.mean_of_best:.1%} of the best "
        f"candidate's speed on average and {found.least_of_best:.1%} at least; against leaving the site alone "
        f"{found.least_of_leaving:.2f}x at least ({found.worst})."
    )
