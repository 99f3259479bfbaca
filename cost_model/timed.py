"""Times of local kernels at exact shapes, taken on the machine that a graph is compiled on, in place of its profile.

A table of them is a part of the machine. A kernel that is in it takes what was timed. At another size of a kernel that
is in it (more tokens, all else equal) the profile's curve holds the form and the timed sizes the height: the logarithm
of timed / predicted is interpolated along log size, and fades beyond the outermost timed sizes.

A time is off by what its single times spread over. Where that is more than the profile's price may be off by, the
profile's price stands.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log
from typing import Protocol

from weaveopt.cost_model.timing import LEAST_ERROR, error_of
from weaveopt.records.price import (
    STAND_IN,
    Price,
    PriceSource,
    Uncertainty,
    error_us_of,
    errors_of,
    source_of,
)

FADE = log(4.0)
"""Beyond the outermost timed sizes the correction is gone at this logarithm of the ratio: at four times the size a
library may have picked another kernel."""

ByProfile = Callable[[int], float]
"""Size of a kernel -> what the profile says, in microseconds."""


@dataclass(frozen=True, order=True)
class KernelShape:
    """A local kernel at exact sizes, as it is called."""

    kernel: str
    """`gemm`, `bmm`, `grouped_gemm`, or of attention its kernel and form: `attention sdpa masked`."""
    dtype: str
    size: int
    """Size that grows with the token count: rows of a GEMM, queries of attention."""
    rest: tuple[int, ...]
    """All other sizes: `(k, n)` of a GEMM."""
    layout: str = ""
    """How the operands are stored; empty: as any graph stores them (candidates do not say)."""

    def __str__(self) -> str:
        sizes = "x".join(map(str, (self.size, *self.rest)))
        return " ".join(word for word in (self.kernel, self.dtype, sizes, self.layout) if word)


@dataclass(frozen=True, order=True)
class KernelTime:
    """The time of one kernel, in microseconds, and the spread of its single times."""

    shape: KernelShape
    us: float
    spread: float = 0.0
    """(third quartile - first quartile) / median."""

    @property
    def relative_error(self) -> float:
        """Standard error of the time, relative to it."""
        return error_of(self.spread)

    @property
    def price(self) -> Price:
        """The time, with its error."""
        return Price.read(self.us, self.shape, self.relative_error, PriceSource.TIMED)

    def is_surer(self, predicted: float) -> bool:
        """True if the time may be off by no more than the profile's price of the kernel, or spreads as times do."""
        return self.relative_error <= LEAST_ERROR or self.relative_error * predicted <= error_us_of(predicted)


class KernelTimes(Protocol):
    """Table that prices of local kernels are looked up in before the profile's curves."""

    def us(self, shape: KernelShape, by_profile: ByProfile) -> float:
        """Microseconds of a kernel; `by_profile` predicts it at any size."""
        ...

    def has(self, shape: KernelShape) -> bool:
        """True if the kernel was timed, at this size or at others, or is looked at to be."""
        ...

    def slowdown(self, kernel: str, by_profile: Callable[[KernelShape], float]) -> float:
        """How many times as long as `by_profile` predicts the timed shapes of a kernel take, all together; 1 where none
        was timed."""
        ...

    def __hash__(self) -> int: ...


class TimedKernels:
    """A table of timed kernels: empty in profiles, filled where a graph is compiled on the devices that it runs on."""

    def __init__(self, kernels: Iterable[KernelTime] = ()) -> None:
        self.kernels: Mapping[KernelShape, KernelTime] = {each.shape: each for each in sorted(kernels)}
        self._hash = hash(tuple(self.kernels.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimedKernels) and self.kernels == other.kernels

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"TimedKernels({list(self.kernels.values())})"

    def find(self, shape: KernelShape) -> KernelTime | None:
        """The kernel as it is stored; of a shape without layout, the first layout that was timed."""
        found = self.kernels.get(shape)
        if found is not None or shape.layout:
            return found
        return self._by_size.get(replace(shape, size=0), {}).get(shape.size)

    def has(self, shape: KernelShape) -> bool:
        return replace(shape, size=0) in self._by_size

    def us(self, shape: KernelShape, by_profile: ByProfile) -> float:
        """Microseconds: as timed, else the profile's, corrected by the sizes of this kernel that were timed."""
        if not self.kernels:
            return by_profile(shape.size)
        found, predicted = self.find(shape), by_profile(shape.size)
        if found is not None and found.is_surer(predicted):
            return found.price
        # A layout that was not timed takes after the others.
        known = self._by_size.get(replace(shape, size=0)) or self._by_size.get(replace(shape, size=0, layout=""), {})
        series = {size: each for size, each in known.items() if each.is_surer(by_profile(size))}
        return _corrected(series, shape.size, predicted, by_profile) if series else predicted

    def slowdown(self, kernel: str, by_profile: Callable[[KernelShape], float]) -> float:
        pairs = [(each, by_profile(shape)) for shape, each in self.kernels.items() if shape.kernel == kernel]
        surer = [(each.us, predicted) for each, predicted in pairs if each.is_surer(predicted) and predicted > 0.0]
        return sum(us for us, _ in surer) / sum(predicted for _, predicted in surer) if surer else 1.0

    @cached_property
    def _by_size(self) -> dict[KernelShape, dict[int, KernelTime]]:
        """Timed sizes, ascending, of each kernel with and without its layout."""
        found: dict[KernelShape, dict[int, KernelTime]] = {}
        for shape, kernel in self.kernels.items():
            for layout in dict.fromkeys((shape.layout, "")):
                found.setdefault(replace(shape, size=0, layout=layout), {}).setdefault(shape.size, kernel)
        return {key: dict(sorted(sizes.items())) for key, sizes in found.items()}


NOTHING_TIMED = TimedKernels()


def _corrected(series: Mapping[int, KernelTime], size: int, predicted: float, by_profile: ByProfile) -> Price:
    """The profile's price, times timed / predicted as the timed sizes next to it have it.

    It is off by what the profile's price is, and by what the times are. Of a profile that only stands in no more than
    the form counts, so its error grows with the distance to the next timed size.
    """
    shares = _shares([*series], size)
    factor = exp(sum(share * _ratio(series[at], by_profile) for at, share in shares.items()))
    us = float(predicted) * factor

    def known() -> Uncertainty:
        away = min(1.0, *(abs(log(size / at)) / FADE for at in shares))
        errors = {
            reading: error_us * factor * (away if reading == STAND_IN else 1.0)
            for reading, error_us in errors_of(predicted).items()
        }
        for at, share in shares.items():
            errors[series[at].shape] = us * share * series[at].relative_error
        return Uncertainty(errors, source_of(predicted))

    return Price(us, known)


def _shares(sizes: Sequence[int], size: int) -> dict[int, float]:
    """Weights of the timed sizes next to `size`: between two linear in its logarithm, beyond the ends fading."""
    right = bisect_left(sizes, size)
    if right in (0, len(sizes)):
        end = sizes[min(right, len(sizes) - 1)]
        return {end: max(0.0, 1.0 - abs(log(size / end)) / FADE)}
    low, high = sizes[right - 1], sizes[right]
    share = log(size / low) / log(high / low)
    return {low: 1.0 - share, high: share}


def _ratio(timed: KernelTime, by_profile: ByProfile) -> float:
    """log(timed / predicted) at a timed size."""
    predicted = by_profile(timed.shape.size)
    return log(timed.us / predicted) if predicted > 0.0 else 0.0
