"""Candidates: a lowering of a site, its estimate, and the reasons against it."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import hypot

from weaveopt.records.price import Price, PriceSource, added, difference_error_us, error_us_of, source_of
from weaveopt.records.task import Stream

Scalar = bool | int | float | str


Values = tuple[tuple[str, Scalar], ...]


def values_of(record: object, *without: str) -> Values:
    """The fields of a frozen record of scalars, but for those named `without`, as names and values."""
    assert is_dataclass(record) and not isinstance(record, type), record
    found: list[tuple[str, Scalar]] = []
    for field in fields(record):
        if field.name not in without:
            value = getattr(record, field.name)
            assert isinstance(value, bool | int | float | str), (field.name, value)
            found.append((field.name, value))
    return tuple(found)


LEAVE = "leave"
"""The choice that changes nothing: a candidate at every site."""


class Fabric(StrEnum):
    """Transport by which the ranks of a group reach each other's memory."""

    MULTIMEM = "multimem"
    PEER = "peer"
    HOST = "host"
    SHM = "shm"
    TCP = "tcp"
    NVSHMEM = "nvshmem"
    LIBRARY = "library"


NEVER_RAN = frozenset((Fabric.MULTIMEM,))
"""Fabrics whose kernels are compiled and checked, and have never run on any machine."""


COMPUTE_WORDS = frozenset(
    ("gemm", "attention", "expert", "experts", "add", "norm", "copy", "kernel", "launch", "memory", "host")
)
"""A term whose name has one of these words runs on the compute stream; every other one moves data between ranks."""


def stream_of(name: str) -> Stream:
    """The stream that a term, or a kind of kernel, runs on."""
    return Stream.COMMUNICATION if COMPUTE_WORDS.isdisjoint(name.split("_")) else Stream.COMPUTE


@dataclass(frozen=True)
class Term:
    """One named part of an estimate; negative where work is hidden under other work."""

    name: str
    us: float
    """Microseconds: a `Price`, or a plain number that is taken to be exact."""

    @property
    def error_us(self) -> float:
        """Standard error in microseconds."""
        return error_us_of(self.us)

    @property
    def source(self) -> PriceSource:
        """Source of the number: timed, measured, interpolated or estimated."""
        return source_of(self.us)


@dataclass(frozen=True)
class Measured:
    """A time that the ranks measured, the slowest one's, and what such a time varies by."""

    us: float
    relative_error: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """Predicted time as a sum of named terms, each with its error; measured too with `verify`."""

    terms: tuple[Term, ...]
    measured: Measured | None = None
    saving_error_us: float | None = None
    """Standard error of what it saves of its site's baseline, without what both are off by alike; set by `decide`."""

    @cached_property
    def price(self) -> Price:
        """Predicted, with its error."""
        return added(term.us for term in self.terms)

    @property
    def us(self) -> float:
        """Predicted."""
        return sum(float(term.us) for term in self.terms)

    @property
    def relative_error(self) -> float:
        """Standard error of the predicted time, relative to it."""
        return self.price.error_us / abs(self.us) if self.us else 0.0

    @property
    def exposed_us(self) -> float:
        """Communication that nothing hides: the terms that move data, less the negative ones, which hide them."""
        moving = sum(term.us for term in self.terms if term.us > 0 and stream_of(term.name) is Stream.COMMUNICATION)
        return max(0.0, moving + sum(term.us for term in self.terms if term.us < 0))

    @property
    def decided_us(self) -> float:
        """Time that decides: the measured one if there is one, else the predicted one."""
        return self.us if self.measured is None else self.measured.us

    @property
    def error_us(self) -> float:
        """Standard error of the time that decides, in microseconds."""
        return self.price.error_us if self.measured is None else abs(self.measured.us) * self.measured.relative_error

    @property
    def us_with_margin(self) -> float:
        """Cost charged to a rewrite: its time plus the error of its saving, or its own where that is not known."""
        return self.decided_us + (self.error_us if self.saving_error_us is None else self.saving_error_us)

    def plus(self, other: Estimate) -> Estimate:
        """Add two estimates, one after the other: terms of one name are summed, zero terms dropped.

        The predicted time of `other` is added to a measured time too.
        """
        summed: dict[str, float] = {}
        for term in (*self.terms, *other.terms):
            summed[term.name] = summed[term.name] + term.us if term.name in summed else term.us
        found = tuple(Term(name, us) for name, us in summed.items() if us != 0.0)
        measured = None if self.measured is None else replace(self.measured, us=self.measured.us + other.decided_us)
        return Estimate(found, measured)


def error_between_us(a: Estimate, b: Estimate) -> float:
    """Standard error of the difference of two estimates, in microseconds.

    What both read at the same place cancels; the rest is independent. Times that were measured are off by what such
    times vary by.
    """
    if a.measured is None and b.measured is None:
        return difference_error_us(a.price, b.price)
    return hypot(a.error_us, b.error_us)


@dataclass(frozen=True)
class Rejection:
    """Reason why a candidate may not be used: a stable code, one sentence, and the values that decided it."""

    code: str
    message: str
    values: Values = ()

    @property
    def text(self) -> str:
        """The sentence with the values."""
        return f"{self.message} ({', '.join(f'{name} {value}' for name, value in self.values)})"


NO_TOKENS = Rejection("no_tokens", "the token count is 0: there is nothing to reduce or to gather")
"""An arena of no bytes cannot be had."""


@dataclass(frozen=True)
class TableRow:
    """One row of a run-time table: which kernel variant serves calls of up to `max_tokens` tokens."""

    max_tokens: int
    variant: str
    values: Values = ()


@dataclass(frozen=True)
class Candidate:
    """A lowering of a site: its rule, fabric and kernel variant."""

    choice: str
    """Rule name, or `leave`."""
    fabric: Fabric = Fabric.LIBRARY
    variant: str = ""
    """The kernel that serves the token count that was decided for: `two_shot bulk`."""
    parameters: Values = ()
    estimate: Estimate | None = None
    """Estimate of the whole site: the nodes that the rule inserts, and those of the site that stay."""
    rejections: tuple[Rejection, ...] = ()
    table: tuple[TableRow, ...] = ()
    """The run-time table by token count, ascending; more tokens than the last row has go through the library."""
    notes: tuple[str, ...] = ()
    """Remarks of the rule on this candidate among the other choices, one line each."""

    @property
    def allowed(self) -> bool:
        return not self.rejections
