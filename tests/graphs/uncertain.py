"""Estimates of made-up candidates, with errors of their own."""

from __future__ import annotations

from weaveopt.records.candidate import Estimate, Term
from weaveopt.records.price import Price, PriceSource


def estimate_of(relative_error: float, *terms: tuple[str, float]) -> Estimate:
    """An estimate that is off by `relative_error` in all: its terms are off together, and with no other estimate."""
    reading = object()
    made = (Term(name, Price.read(us, reading, relative_error, PriceSource.ESTIMATED)) for name, us in terms)
    return Estimate(tuple(made))
