"""When tasks on several streams start and end: the only schedule, of one lowering as of a whole graph.

Each stream runs its tasks in program order, each as soon as the one before it and all that it waits for are done.
While tasks of two streams run at once, each is slower by a factor that the machine's profile holds for the pair
(contention); while one is alone, it runs at full speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, log

from weaveopt.cost_model.machine import ContentionRow, Machine
from weaveopt.records.task import Stream, Task

Pair = tuple[Stream, Stream]
"""Two streams, in the order of `Stream`."""
Contention = Callable[[Task, Task], tuple[float, float] | None]
"""Slowdown of two tasks, in the order of their streams, while both run; None if it was not measured."""


@dataclass(frozen=True)
class Interval:
    """Start and end of a task, in microseconds from the start of the first."""

    start_us: float
    end_us: float


@dataclass(frozen=True)
class Schedule:
    """An interval for each task, in program order."""

    intervals: tuple[Interval, ...]
    not_measured: frozenset[Pair] = frozenset()
    """Pairs of streams that ran at once although their contention was not measured. Such tasks were taken not to slow
    each other down, so `us` is a lower bound; `serial` gives the upper one."""

    @property
    def us(self) -> float:
        """The makespan: when the last task is done."""
        return max((each.end_us for each in self.intervals), default=0.0)


def contention_row(machine: Machine, ctas: int) -> ContentionRow | None:
    """Contention of a GEMM and communication by `ctas` CTAs: the row of the nearest number measured, by ratio, and of
    two as near the one with more CTAs.

    None if unknown: nothing was measured, or only with fewer CTAs, whose GEMM had more of the device; 0 CTAs stand for
    as many as fit, which leave it none.
    """
    rows = () if machine.contention is None else machine.contention.rows
    if not 0 < ctas <= max((row.ctas for row in rows), default=0):
        return None
    return min(rows, key=lambda row: (abs(log(row.ctas / ctas)), -row.ctas))


def measured_contention(machine: Machine) -> Contention:
    """Contention as the profile of `machine` holds it, of computation with communication and with copies."""
    copies = None if machine.contention is None else machine.contention.copies

    def between(first: Task, second: Task) -> tuple[float, float] | None:
        if first.stream is not Stream.COMPUTE:
            return None
        if second.stream is Stream.COPIES:
            return None if copies is None else (copies.gemm, copies.copies)
        row = contention_row(machine, second.ctas)
        return None if row is None else (row.gemm, row.communication)

    return between


def library_ctas(machine: Machine, hosts: int) -> int:
    """CTAs that the library's collectives take on this machine, in a group on so many hosts; 0: not known.

    Contention of CPU ranks is measured between hosts: within a host the exchange is work of the same cores.
    """
    found = machine.contention
    return 0 if found is None or (found.between_hosts and hosts == 1) else found.library_ctas


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


def schedule(tasks: Sequence[Task], contention: Contention, *, serial: bool = False) -> Schedule:
    """The schedule of `tasks`, given in program order; exact, from event to event.

    With `serial`, tasks whose contention was not measured do not run at once: the one that could start later waits.
    Without any overlap every task starts when the one before it ends, so the makespan is the sum in program order, bit
    by bit.
    """
    for position, task in enumerate(tasks):
        assert all(0 <= other < position for other in task.waits_for), f"task {position} waits for {task.waits_for}"
        assert 0.0 <= task.us < inf, f"task {position} takes {task.us} us"
    run = _Simulation(tasks, contention, serial)
    while len(run.done) < len(tasks):
        run.start()
        run.slow_down()
        run.advance()
    return Schedule(tuple(run.done[position] for position in range(len(tasks))), frozenset(run.not_measured))


class _Simulation:
    """State of one simulation."""

    def __init__(self, tasks: Sequence[Task], contention: Contention, serial: bool) -> None:
        self._tasks, self._contention, self._serial = tasks, contention, serial
        self._queues = {stream: [i for i, task in enumerate(tasks) if task.stream is stream] for stream in Stream}
        self._heads = dict.fromkeys(Stream, 0)
        self._running: dict[Stream, _Running] = {}
        self._factors: dict[tuple[Pair, int, int], tuple[float, float] | None] = {}
        self._now_us = 0.0
        self.done: dict[int, Interval] = {}
        self.not_measured: set[Pair] = set()

    def start(self) -> None:
        """Start the head of every idle stream whose inputs are there."""
        for stream, queue in self._queues.items():
            if stream in self._running or self._heads[stream] == len(queue):
                continue
            position = queue[self._heads[stream]]
            task = self._tasks[position]
            if all(other in self.done for other in task.waits_for) and not (self._serial and self._must_wait(task)):
                self._running[stream] = _Running(position, self._now_us, self._now_us, float(task.us))
                self._heads[stream] += 1

    def _must_wait(self, task: Task) -> bool:
        others = (self._tasks[each.position] for each in self._running.values())
        return task.us > 0 and any(other.us > 0 and self._between(*_ordered(task, other)) is None for other in others)

    def _between(self, first: Task, second: Task) -> tuple[float, float] | None:
        key = (first.stream, second.stream), first.ctas, second.ctas
        if key not in self._factors:
            found = self._factors[key] = self._contention(first, second)
            assert found is None or min(found) >= 1.0, f"contention makes nothing faster: {found}"
        return self._factors[key]

    def slow_down(self) -> None:
        """Set the factors of everything that runs from now on."""
        factors = dict.fromkeys(self._running, 1.0)
        # A kernel of no length slows no other one down.
        busy = [stream for stream in Stream if stream in self._running and self._task(stream).us > 0]
        for a, b in combinations(busy, 2):
            found = self._between(self._task(a), self._task(b))
            if found is None:
                self.not_measured.add((a, b))
            else:
                factors[a] *= found[0]
                factors[b] *= found[1]
        for stream, each in self._running.items():
            each.slow_down(self._now_us, factors[stream])

    def _task(self, stream: Stream) -> Task:
        return self._tasks[self._running[stream].position]

    def advance(self) -> None:
        """Go on to the next end of a task."""
        self._now_us = min(each.end_us for each in self._running.values())
        for stream in [stream for stream, each in self._running.items() if each.end_us <= self._now_us]:
            ended = self._running.pop(stream)
            self.done[ended.position] = Interval(ended.start_us, self._now_us)


def _ordered(a: Task, b: Task) -> tuple[Task, Task]:
    order = list(Stream)
    return (a, b) if order.index(a.stream) < order.index(b.stream) else (b, a)
