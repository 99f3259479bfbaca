"""Records of one run of a few ranks and of its outcome, which cross from the test to the ranks and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum


class Mode(StrEnum):
    """How the ranks use weaveopt."""

    EAGER = "eager"
    """The operator itself, on an arena that the program reserved."""
    GRAPH = "graph"
    """All layers in one compiled graph."""
    REGIONS = "regions"
    """Each layer compiled apart."""
    PAIRS = "pairs"
    """The operator in groups of two, (0, 1), (1, 2), ...: a rank waits for its neighbours alone."""


class Moment(StrEnum):
    """Moments in the life of a rank at which a fault strikes, in their order."""

    START = "before capture"
    COMPILING = "while compiling, before ranks agree"
    AGREED = "between agreement and arena"
    MAPPING = "before it maps the peers' memory"
    COMPILED = "before the end of compilation"
    FIRST_CALL = "before the first call"
    BETWEEN = "between calls"
    WITHIN = "within a call"
    EXIT = "at exit"
    ANY = "at any moment"
    """A signal from outside, after `Case.delay_s`."""


COMPILE_ONLY = frozenset({Moment.COMPILING, Moment.COMPILED})
MEETINGS = frozenset({Moment.START, Moment.COMPILING, Moment.AGREED, Moment.MAPPING, Moment.COMPILED})
"""Peers wait for the rank in the store, for as long as compiling may take."""

NUM_STEPS = 5
FAULT_STEP = 2
"""The step that a fault between or within calls strikes."""


@dataclass(frozen=True)
class Case:
    """One run. Everything random about it was drawn before."""

    fault: str
    moment: Moment
    mode: Mode
    world: int
    victim: int
    timeout_s: float
    compile_timeout_s: float
    one_shot: bool = True
    catches: bool = False
    """Ranks catch weaveopt's error and go on."""
    store_on_rank: bool = False
    """Rank 0 has the store, and not an agent that outlives it."""
    delay_s: float = 0.0
    occurrence: int = 0
    """Which of the times that the moment comes."""
    ends_interpreter: bool = False
    """The interpreter is taken down in order when a rank ends, which takes it a second."""

    @property
    def name(self) -> str:
        ways = ["one-shot" if self.one_shot else "two-shot"] * (self.mode in (Mode.EAGER, Mode.PAIRS))
        ways += ["errors caught"] * self.catches + ["store on rank 0"] * self.store_on_rank
        ways += [f"after {self.delay_s:.3f} s"] * bool(self.delay_s)
        return f"{self.fault} {self.moment}, rank {self.victim} of {self.world}, {', '.join([self.mode, *ways])}"


@dataclass(frozen=True)
class Said:
    """How one rank ended, by its own report."""

    steps: tuple[str, ...] = ()
    """A digest of every step's results; `wrong ...` where they are not those of the reference."""
    error: str = ""
    """`Type: message` of the exception that ended the steps."""
    is_ours: bool = False
    """True if it was a `WeaveError`."""
    later: tuple[str, ...] = ()
    """Errors that the same call raised afterwards, if errors are caught."""
    began_at: float = 0.0
    """When the step that failed began, on the host's monotonic clock."""
    ended_at: float = 0.0
    held: tuple[str, ...] = ()
    """Descriptors of shared memory that the rank still had open."""


@dataclass(frozen=True)
class Ended:
    """How one rank ended, as its parent saw it."""

    said: Said | None
    """None: it never came so far."""
    code: int | None
    """Exit code of the process: below 0 a signal. None: it had to be killed after the deadline, or while it was
    stopped."""
    output: str = ""
    """Its standard error, the last part."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    ranks: tuple[Ended, ...]
    injected_at: float | None
    """When the fault struck; None: it did not."""
    left: tuple[str, ...]
    """Processes and files that were still there."""
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Outcome:
        record = json.loads(text)
        ranks = tuple(Ended(said_of(each["said"]), each["code"], each["output"]) for each in record["ranks"])
        return Outcome(ranks, record["injected_at"], tuple(record["left"]), record["seconds"])


def said_of(record: Mapping[str, object] | None) -> Said | None:
    """From JSON, where tuples are lists."""
    if record is None:
        return None
    return Said(**{key: tuple(x) if isinstance(x, list) else x for key, x in record.items()})  # type: ignore[arg-type]


def case_to_json(case: Case) -> str:
    return json.dumps(asdict(case))


def case_from_json(text: str) -> Case:
    record = json.loads(text)
    return Case(**{**record, "moment": Moment(record["moment"]), "mode": Mode(record["mode"])})
