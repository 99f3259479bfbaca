"""When kernels on two streams start and end: one stream computes, the other communicates.

Each stream runs its tasks in program order, each as soon as the one before it and all that it waits for are done.
While both streams are busy, each side runs slower by a factor; while one is alone, it runs at full speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, log

from weaveopt.cost_model.machine import Machine


class Stream(StrEnum):
    """Stream that a task runs on."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True)
class Task:
    """One kernel or collective; `us` is its time alone."""

    us: float
    stream: Stream = Stream.COMPUTE
    waits_for: tuple[int, ...] = ()
    """Positions, in program order, of earlier tasks whose results it reads."""


@dataclass(frozen=True)
class Interval:
    """Start and end of a task, in microseconds from the start of the first."""

    start_us: float
    end_us: float


@dataclass(frozen=True)
class Schedule:
    """An interval for each task, in program order."""

    intervals: tuple[Interval, ...]

    @property
    def us(self) -> float:
        """The makespan: when the last task is done."""
        return max((each.end_us for each in self.intervals), default=0.0)


LIBRARY_CTAS = 24
"""CTAs that the library's kernels take on a GPU: NCCL opens 24 channels, each a CTA, between GPUs on NVSwitch."""


def stream_contention(machine: Machine) -> tuple[float, float]:
    """(compute, communication): how many times slower each runs while the other runs too; 1.0 where not measured.

    Profiles measure a GEMM concurrently with communication by some numbers of CTAs. The row counts whose number is
    nearest to `LIBRARY_CTAS`, by ratio, and of two as near the one with more CTAs.
    """
    if machine.contention is None:
        return 1.0, 1.0
    row = min(machine.contention.rows, key=lambda row: (abs(log(row.ctas / LIBRARY_CTAS)), -row.ctas))
    return row.gemm, row.communication


@dataclass
class _Running:
    """The task at a stream's head: what was left of it, alone, at `since_us`, and how much slower it runs since."""

    position: int
    start_us: float
    since_us: float
    left_us: float
    factor: float = 1.0

    @property
    def end_us(self) -> float:
        return self.since_us + self.left_us * self.factor

    def slow_down(self, now_us: float, factor: float) -> None:
        if factor != self.factor:
            self.left_us = max(self.left_us - (now_us - self.since_us) / self.factor, 0.0)
            self.since_us, self.factor = now_us, factor


def schedule_streams(tasks: Sequence[Task], compute_factor: float = 1.0, communication_factor: float = 1.0) -> Schedule:
    """The schedule of `tasks`, given in program order; exact, from event to event.

    The factors (at least 1) slow both streams down while both are busy, as `stream_contention` returns them. Without
    any overlap every task starts when the one before it ends, so the makespan is the sum in program order, bit by bit.
    """
    factors = {Stream.COMPUTE: compute_factor, Stream.COMMUNICATION: communication_factor}
    assert min(factors.values()) >= 1.0, f"contention makes nothing faster: {factors}"
    for position, task in enumerate(tasks):
        assert all(0 <= other < position for other in task.waits_for), f"task {position} waits for {task.waits_for}"
        assert 0.0 <= task.us < inf, f"task {position} takes {task.us} us"
    queues = {stream: [i for i, task in enumerate(tasks) if task.stream is stream] for stream in Stream}
    heads = dict.fromkeys(Stream, 0)
    running: dict[Stream, _Running] = {}
    done: dict[int, Interval] = {}
    now_us = 0.0
    while len(done) < len(tasks):
        for stream, queue in queues.items():
            if stream not in running and heads[stream] < len(queue):
                position = queue[heads[stream]]
                if all(other in done for other in tasks[position].waits_for):
                    running[stream] = _Running(position, now_us, now_us, tasks[position].us)
                    heads[stream] += 1
        # A kernel of no length disturbs nobody.
        both = all(stream in running and tasks[running[stream].position].us > 0 for stream in Stream)
        for stream, each in running.items():
            each.slow_down(now_us, factors[stream] if both else 1.0)
        now_us = min(each.end_us for each in running.values())
        for stream in [stream for stream, each in running.items() if each.end_us <= now_us]:
            ended = running.pop(stream)
            done[ended.position] = Interval(ended.start_us, now_us)
    return Schedule(tuple(done[position] for position in range(len(tasks))))
