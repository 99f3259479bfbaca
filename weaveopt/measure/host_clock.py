"""Times of calls on a host: means without outliers, each call after another GEMM."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence

import torch

from weaveopt.measure.clock import Clock, Launch, Meeting, Sample, sample_of

SLOWEST = 0.05
"""Share of a host's calls, the slowest, in which the system did something else."""
HOST_GEMM, HOST_COPIES = (16, 512, 1024), 4
"""Rows, columns and inner size of the GEMM that runs before each call, and how many weights of 1 MB take turns."""
HOST_GEMM_US = 100.0
"""About how long it takes."""
APART = 5
"""Turns between the weight of what runs before a call and the call's own: it must not be in the caches for that."""


def summand_of(times_us: Sequence[float]) -> Sample:
    """Mean without the slowest twentieth, and spread: a model's time is the sum of its calls', and medians of what is
    skewed add up to less."""
    fastest = sorted(times_us)[: len(times_us) - math.ceil(len(times_us) * SLOWEST)]
    return Sample(statistics.fmean(fastest), sample_of(times_us).spread)


class CpuClock(Clock):
    """Clock of the host, for single calls: the fastest of several passes' means.

    Before each call runs a GEMM, which does not count. After it caches hold neither the code nor the operands of what
    is timed, and ranks reach an exchange apart by what their GEMMs differ: in a model both are so, in a loop of one
    call neither.

    Time that other programs of the host add to a pass is not the machine's. Ranks that poll suffer most from it. So
    passes end once the two fastest agree: after two on a quiet host, after `MOST_PASSES` on a busy one.
    """

    LONGEST_S = 0.03
    """Longest duration of a pass, unless its `FEWEST_CALLS` take longer."""
    FEWEST_CALLS, MOST_CALLS = 3, 200
    MOST_PASSES = 5
    AGREE = 0.04
    """Largest difference between the two fastest passes that counts as agreement."""

    def __init__(self, other: Launch | None = None) -> None:
        self._other = other or _host_gemm
        """Runs before each call."""

    def alone(self, launch: Launch, expected_us: float) -> Sample:
        # The first call is not the machine's: kernels are generated, memory is touched for the first time.
        us = min(self._once(launch, index) for index in range(2))
        count = self._count(us)
        passes: list[Sample] = []
        while self._continues(passes):
            passes.append(summand_of([self._once(launch, index) for index in range(count)]))
        return min(passes, key=lambda sample: sample.us)

    def among_others(self, launch: Launch, expected_us: float) -> Sample:
        return self.alone(launch, expected_us)

    def in_turns(
        self, launches: Sequence[Launch], expected_us: Sequence[float], ranks: Meeting, hot: bool = False
    ) -> list[Sample]:
        # No rank may stop by its own clock: counts, and whether another pass follows, are the slowest rank's.
        probes = ranks.slowest(
            [Sample(min(self._once(launch, index) for index in range(2)), 0.0) for launch in launches]
        )
        counts = [self._count(probe.us) for probe in probes]
        passes: list[list[Sample]] = [[] for _ in launches]
        while any(map(self._continues, passes)):
            for launch, count, found in zip(launches, counts, passes, strict=True):
                ranks.barrier()
                found += ranks.slowest([summand_of([self._once(launch, index) for index in range(count)])])
        return [min(found, key=lambda sample: sample.us) for found in passes]

    def takes_s(self, expected_us: float) -> float:
        """Seconds that a measurement takes on a quiet host."""
        return (2 + 2 * self._count(expected_us)) * (expected_us + HOST_GEMM_US) * 1e-6

    def _count(self, us: float) -> int:
        """Number of calls of a pass."""
        return int(min(self.MOST_CALLS, max(self.FEWEST_CALLS, self.LONGEST_S * 1e6 / (us + HOST_GEMM_US))))

    def _once(self, launch: Launch, index: int) -> float:
        """Microseconds of one call, after what runs before each."""
        self._other(index + APART)
        start = time.perf_counter()
        launch(index)
        return (time.perf_counter() - start) * 1e6

    def _continues(self, passes: Sequence[Sample]) -> bool:
        """True if another pass may still change the time."""
        if len(passes) < 2:
            return True
        first, second = sorted(sample.us for sample in passes)[:2]
        return second > first * (1 + self.AGREE) and len(passes) < self.MOST_PASSES


class CoarseCpuClock(CpuClock):
    """The same, for a look that takes seconds: few calls, and no pass more on a busy host."""

    LONGEST_S = 0.01
    MOST_PASSES = 2


def _host_gemm(index: int) -> None:
    """A GEMM of weights that take turns."""
    x, weights = _host_operands()
    torch.mm(x, weights[index % len(weights)])  # no `out=`: a process may measure in inference mode and outside of it


@functools.cache
def _host_operands() -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns, inner = HOST_GEMM
    return torch.ones(rows, inner, dtype=torch.bfloat16), torch.ones(HOST_COPIES, inner, columns, dtype=torch.bfloat16)
