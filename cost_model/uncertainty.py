"""Errors of readings: how far a price may be off, from how well a curve's own points predict each other.

A point that is left out is predicted by its neighbours; what that misses (the leave-one-out residual) is what a reading
in the middle of a gap may miss. At a point nothing is interpolated, so the error grows from there to the middle as that
of a line through a curved function does, `4 s (1 - s)` at share `s` of the gap; beyond the ends it grows with the
distance. Errors are relative, standard errors, and of logarithms where a residual is a ratio.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from math import hypot, log, sqrt

from weaveopt.cost_model.machine import MEASURED, Machine
from weaveopt.records.price import STAND_IN, Price, PriceSource, Reading, Uncertainty

UNMEASURED_ERROR = 0.25
"""Error of what was not measured, in a profile whose other parts were: that of every shipped profile without
measurements."""

Predict = Callable[[int, tuple[int, ...]], float]
"""Logarithm of the point at a position, predicted from those at others: one neighbour, two around it, or the two before
it (or after it), the nearest first."""


@cache
def is_measured(machine: Machine, origin: str) -> bool:
    """True if numbers of that origin were measured."""
    named = dict(machine.origins).get(origin)
    return named is None or named.kind == MEASURED


@cache
def point_error(machine: Machine, origin: str) -> float:
    """Relative error of a reading at one of its points.

    `relative_error` of the profile is that of the difference of two prices that are equal and independent, so each of
    the two has its share.
    """
    return (machine.relative_error if is_measured(machine, origin) else _unmeasured_error(machine)) / sqrt(2.0)


@cache
def _unmeasured_error(machine: Machine) -> float:
    """Error of what was not measured: that of the profile, if nothing of it was or it says that it is exact."""
    partly = any(origin.kind == MEASURED for _, origin in machine.origins)
    return (
        max(machine.relative_error, UNMEASURED_ERROR) if partly and machine.relative_error else machine.relative_error
    )


def read(machine: Machine, origin: str, us: float, reading: Reading, away: Callable[[], float] | None = None) -> Price:
    """The price of one reading of a block or curve of that origin; `away` returns its error beyond that at a point."""
    if machine.stands_in:
        return Price.read(us, STAND_IN, 1.0, PriceSource.ESTIMATED)
    if not machine.relative_error:
        return Price(us, Uncertainty(source=PriceSource.MEASURED))

    def known() -> Uncertainty:
        beyond = 0.0 if away is None else away()
        source = PriceSource.INTERPOLATED if beyond else PriceSource.MEASURED
        if not is_measured(machine, origin):
            source = PriceSource.ESTIMATED
        return Uncertainty({reading: us * hypot(point_error(machine, origin), beyond)}, source)

    return Price(us, known)


def estimated(machine: Machine, us: float, reading: Reading) -> Price:
    """The price of a model (α–β): no kernel of its kind was measured, whatever its constants are of."""
    if machine.stands_in:
        return Price.read(us, STAND_IN, 1.0, PriceSource.ESTIMATED)
    return Price.read(us, reading, _unmeasured_error(machine) / sqrt(2.0), PriceSource.ESTIMATED)


def away_error(sizes: Sequence[float], values: Sequence[float], at: float, beyond: Predict | None = None) -> float:
    """Relative error of a reading at size `at`, beyond that at a point, by the leave-one-out residuals of the points
    next to it.

    `values` are logarithms at ascending `sizes`, read linearly along the logarithm of the size; `beyond(position,
    others)` predicts an end from the points next to it, where that is anything but the nearest one's value.
    """
    last = len(sizes) - 1
    if last < 0:
        return 0.0
    if last == 0:
        return min(abs(log(at / sizes[0])), 1.0)  # the time may be constant, or proportional
    if at <= sizes[0]:
        return _beyond(sizes, values, at, (0, 1, 2), beyond)
    if at >= sizes[-1]:
        return _beyond(sizes, values, at, (last, last - 1, last - 2), beyond)
    right = bisect_left(sizes, at)
    if sizes[right] == at:
        return 0.0
    left = right - 1
    found = [_residual(sizes, values, each) for each in (left, right) if 0 < each < last]
    if not found:
        found = [min(abs(values[right] - values[left]) / 2.0, 1.0)]
    share = log(at / sizes[left]) / log(sizes[right] / sizes[left])
    return 4.0 * share * (1.0 - share) * sqrt(sum(each * each for each in found) / len(found))


def _residual(sizes: Sequence[float], values: Sequence[float], at: int) -> float:
    """Difference between an inner point and the value that its neighbours predict."""
    share = log(sizes[at] / sizes[at - 1]) / log(sizes[at + 1] / sizes[at - 1])
    return abs(values[at - 1] * (1.0 - share) + values[at + 1] * share - values[at])


def _beyond(
    sizes: Sequence[float], values: Sequence[float], at: float, ends: tuple[int, int, int], beyond: Predict | None
) -> float:
    """Difference between an end and the value that the points next to it predict, per distance between them, times the
    distance beyond the end."""
    end, near, next_to_it = ends
    if at == sizes[end]:
        return 0.0
    others = (near, next_to_it) if 0 <= next_to_it < len(sizes) else (near,)
    predicted = values[near] if beyond is None else beyond(end, others)
    gaps = abs(log(at / sizes[end]) / log(sizes[near] / sizes[end]))
    # Towards nothing a time levels off at its latency; towards more nothing holds it.
    return abs(predicted - values[end]) * (gaps if end else min(gaps, 1.0))
