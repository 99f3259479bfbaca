"""Runs that the ranks time together: tried once, timed in turns, and dropped by all ranks where one rank fails."""

from __future__ import annotations

import functools
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from weaveopt.autotune.candidate_run import CandidateRun, running
from weaveopt.autotune.rank_agreement import RankAgreement
from weaveopt.cost_model import timing
from weaveopt.errors import AgreementError, PeerTimeoutError
from weaveopt.measure.clock import Clock, CudaClock, Meeting
from weaveopt.measure.host_clock import CpuClock
from weaveopt.records.candidate import Measured, Rejection
from weaveopt.wording import named

RAISED = (AgreementError, PeerTimeoutError)
"""Errors that end a run everywhere else and so here too."""
L = TypeVar("L", bound=Hashable)
"""Label of a run."""


@dataclass
class TimedRuns(Generic[L]):
    """The runs of one graph, and their failures, within a budget of time; the same on all ranks."""

    agreement: RankAgreement
    budget_s: float
    failures: dict[L, Rejection] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    is_over: bool = False

    def failed(self, label: L, why: str) -> bool:
        """Record a failure; True if any rank has one."""
        [failed] = self.agreement.most([float(bool(why))])
        if failed:
            found = why or "another rank could not"
            self.failures[label] = Rejection("not_run", f"it could not be run by itself on the ranks: {found}")
        return bool(failed)

    def tried(self, runs: Mapping[L, CandidateRun]) -> dict[L, float]:
        """Each called twice: microseconds of the second call, of all ranks the longest. What fails is dropped."""
        found: dict[L, float] = {}
        for label, run in runs.items():
            why, us = "", 0.0
            try:
                with running():
                    for _ in range(2):
                        _finish()
                        start = time.perf_counter()
                        run.launch(0)
                        _finish()
                        us = (time.perf_counter() - start) * 1e6
            except RAISED:
                raise
            except Exception as error:
                why = named(error)
            if not self.failed(label, why):
                [found[label]] = self.agreement.most([us])
        return found

    def times(
        self, runs: Mapping[L, CandidateRun], expected_us: Mapping[L, float], clock: Clock, meeting: Meeting
    ) -> dict[L, Measured]:
        with running():
            launches = [runs[label].launch for label in expected_us]
            samples = clock.in_turns(launches, [*expected_us.values()], meeting)
        values = [value for sample in samples for value in (sample.us, sample.spread)]
        answers = self.agreement.most(values)  # ranks of other groups have the same graph
        pairs = zip(expected_us, answers[::2], answers[1::2], strict=True)
        return {label: Measured(round(us, 3), round(timing.error_of(spread), 4)) for label, us, spread in pairs}

    def has_ended(self, more_s: float) -> bool:
        """True if the time budget does not allow `more_s` more; the same on all ranks."""
        [spent_s] = self.agreement.most([time.perf_counter() - self.began + more_s])
        self.is_over = spent_s > self.budget_s
        return self.is_over

    @property
    def ended(self) -> str:
        return f"not timed: the budget of {self.budget_s:g} s (option verify_budget_s) is spent"


@functools.cache
def clock_of(device: str) -> Clock:
    return CudaClock() if device == "cuda" else CpuClock()


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
