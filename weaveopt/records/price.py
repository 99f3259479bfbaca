"""Prices: microseconds that know which readings of a profile they rest on, and what each may be off by.

First-order error propagation. A reading (one curve at one place) is off by an unknown amount; arithmetic on prices
carries along what that amount does to the result. Two prices that rest on the same reading are off together, so in
their difference it cancels; different readings are independent, and their errors add as the root of the sum of squares.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import sqrt
from types import MappingProxyType

Reading = Hashable
"""Names one curve at one place: equal where two prices read the same."""
STAND_IN: Reading = "a profile of other hardware"
"""The one reading of all prices by a profile that only stands in: they are off together, and by nobody knows what."""
_NONE: Mapping[Reading, float] = MappingProxyType({})


class PriceSource(StrEnum):
    """Sources of prices, the surest first; a sum is as sure as its least sure part."""

    TIMED = "timed"
    """The kernel itself, at this size, when the graph was compiled."""
    MEASURED = "measured"
    """A point of the profile."""
    INTERPOLATED = "interpolated"
    """Between or beyond points of the profile."""
    ESTIMATED = "estimated"
    """A model on datasheets, papers, or curves of something else."""


_ORDER = {source: at for at, source in enumerate(PriceSource)}


@dataclass(frozen=True)
class Uncertainty:
    """Errors of a price, and its source."""

    errors: Mapping[Reading, float] = field(default_factory=dict)
    """Standard error in microseconds that each reading brings in, with its sign."""
    source: PriceSource = PriceSource.ESTIMATED

    def plus(self, other: Uncertainty, sign: float = 1.0) -> Uncertainty:
        """The uncertainty of the sum of two prices, or of their difference."""
        found = dict(self.errors)
        for reading, error_us in other.errors.items():
            found[reading] = found.get(reading, 0.0) + sign * error_us
        return Uncertainty(found, _less_sure(self.source, other.source))

    def times(self, factor: float) -> Uncertainty:
        return Uncertainty({reading: error * factor for reading, error in self.errors.items()}, self.source)


class Price(float):
    """Microseconds, and what they may be off by.

    A `float` in every comparison and in arithmetic with numbers. Sums, differences, and products and quotients with
    numbers are prices too; other functions (`exp`, `round`) return plain floats. What it may be off by is worked out
    when it is asked for: most prices are only compared.
    """

    __slots__ = ("_known",)
    _known: Uncertainty | Callable[[], Uncertainty]

    def __new__(cls, us: float, known: Uncertainty | Callable[[], Uncertainty] = Uncertainty()) -> Price:
        made = super().__new__(cls, us)
        made._known = known
        return made

    @staticmethod
    def read(us: float, reading: Reading, relative_error: float, source: PriceSource) -> Price:
        """The price of one reading that is off by `relative_error` of itself."""
        return Price(us, Uncertainty({reading: us * relative_error}, source))

    @property
    def uncertainty(self) -> Uncertainty:
        if not isinstance(self._known, Uncertainty):
            self._known = self._known()
        return self._known

    @property
    def errors(self) -> Mapping[Reading, float]:
        """Standard error in microseconds that each reading brings in, with its sign."""
        return self.uncertainty.errors

    @property
    def source(self) -> PriceSource:
        """Source of the least sure part."""
        return self.uncertainty.source

    @property
    def error_us(self) -> float:
        """Standard error: root of the sum of squares over independent readings."""
        return root_sum_of_squares(self.errors)

    def with_error(self, reading: Reading, relative_error: Callable[[], float], source: PriceSource) -> Price:
        """The same with one more reading that it is off by; if it is at all, it is no surer than `source`."""

        def known() -> Uncertainty:
            error = relative_error()
            more = Uncertainty({reading: float(self) * error}, source)
            return self.uncertainty.plus(more) if error else self.uncertainty

        return Price(self, known)

    def __add__(self, other: float) -> Price:
        us = float.__add__(self, other)
        if isinstance(other, Price):
            return Price(us, lambda: self.uncertainty.plus(other.uncertainty))
        return Price(us, self._known)

    def __radd__(self, other: float) -> Price:
        return Price(float.__add__(self, other), self._known)

    def __sub__(self, other: float) -> Price:
        us = float.__sub__(self, other)
        if isinstance(other, Price):
            return Price(us, lambda: self.uncertainty.plus(other.uncertainty, -1.0))
        return Price(us, self._known)

    def __rsub__(self, other: float) -> Price:
        return Price(float.__rsub__(self, other), lambda: self.uncertainty.times(-1.0))

    def __neg__(self) -> Price:
        return Price(float.__neg__(self), lambda: self.uncertainty.times(-1.0))

    def __mul__(self, other: float) -> Price:
        factor = float(other)
        return self if factor == 1.0 else Price(float.__mul__(self, factor), lambda: self.uncertainty.times(factor))

    def __rmul__(self, other: float) -> Price:
        return self * other

    def __truediv__(self, other: float) -> Price:
        factor = 1.0 / float(other)
        return Price(float.__truediv__(self, other), lambda: self.uncertainty.times(factor))

    def __reduce__(self) -> tuple[type[Price], tuple[float, Uncertainty]]:
        known = self.uncertainty
        return Price, (float(self), Uncertainty(dict(known.errors), known.source))


def errors_of(us: float) -> Mapping[Reading, float]:
    """The errors of a price; none of a plain number."""
    return us.errors if isinstance(us, Price) else _NONE


def error_us_of(us: float) -> float:
    """The standard error of a price; 0 of a plain number."""
    return us.error_us if isinstance(us, Price) else 0.0


def source_of(us: float) -> PriceSource:
    """The source of a price; a plain number is an estimate."""
    return us.source if isinstance(us, Price) else PriceSource.ESTIMATED


def hypotenuse(a: float, b: float, exponent: float = 2.0) -> float:
    """`sqrt(a² + b²)`, of prices a price; with a larger exponent, nearer to the larger of the two."""
    length: float = (float(a) ** exponent + float(b) ** exponent) ** (1.0 / exponent)
    if length == 0.0 or not (isinstance(a, Price) or isinstance(b, Price)):
        return length
    shares = [(each, (each / length) ** (exponent - 1.0)) for each in (a, b)]
    return Price(length, lambda: added(Price(each, _known(each)) * share for each, share in shares).uncertainty)


def added(prices: Iterable[float]) -> Price:
    """The sum of many prices."""
    every = tuple(prices)

    def known() -> Uncertainty:
        errors, source = dict[Reading, float](), PriceSource.TIMED
        for each in every:
            if isinstance(each, Price):
                uncertainty = each.uncertainty
                source = _less_sure(source, uncertainty.source)
                for reading, error_us in uncertainty.errors.items():
                    errors[reading] = errors.get(reading, 0.0) + error_us
        return Uncertainty(errors, source)

    return Price(sum(map(float, every)), known)


def difference_error_us(a: Price, b: Price) -> float:
    """`(a - b).error_us`, in one pass: decisions ask for it at every candidate."""
    errors, square = dict(a.uncertainty.errors), 0.0
    for reading, error_us in b.uncertainty.errors.items():
        known = errors.pop(reading, None)
        square += (error_us if known is None else known - error_us) ** 2
    return sqrt(square + sum(error * error for error in errors.values()))


def _known(us: float) -> Uncertainty:
    return us.uncertainty if isinstance(us, Price) else Uncertainty()


def root_sum_of_squares(errors: Mapping[Reading, float]) -> float:
    return sqrt(sum(error * error for error in errors.values()))


def _less_sure(a: PriceSource, b: PriceSource) -> PriceSource:
    return a if _ORDER[a] >= _ORDER[b] else b
