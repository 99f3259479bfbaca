"""Timeline: the schedule of a whole graph's tasks on its streams, the only record of what overlaps.

Kernels run on the compute stream in graph order, collectives of the library on the communication stream from their
place in the graph to the first reader of their result, and the tasks of a rewritten site where its lowering says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weaveopt.cost_model import Interval, Machine, Schedule, measured_contention, schedule
from weaveopt.cost_model.energy import GraphEnergy, PowerCosts, steady_us
from weaveopt.records.price import Price, added
from weaveopt.records.task import ScheduledTask, Stream, Task


@dataclass(frozen=True)
class Placed:
    """Tasks that the graph enqueues at one place, in order: a kernel, or the lowering of a site."""

    position: int
    """Position of the place in the graph."""
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Timeline:
    """All tasks of a graph in the order in which they are enqueued, and when each runs."""

    tasks: tuple[Task, ...]
    schedule: Schedule
    upper: Schedule
    """Schedule in which streams of unmeasured contention do not run at once; the other one is a lower bound."""
    prices: tuple[float, ...] = ()
    """The price of every kernel and of every rewritten site."""
    energy: GraphEnergy | None = None
    """Energy of all that runs; None where the profile has none."""
    power: PowerCosts | None = None
    computed_us: float = 0.0
    """Computation of all kernels and lowerings, each by itself."""

    @property
    def us(self) -> float:
        """The makespan."""
        return self.schedule.us

    @cached_property
    def steady_us(self) -> float:
        """Time of the graph run after run: longer than `us` where the device would draw more than it may."""
        return steady_us(self.power, self.energy, self.us)

    @cached_property
    def upper_steady_us(self) -> float:
        """The same of `upper`."""
        return steady_us(self.power, self.energy, self.upper.us)

    @cached_property
    def price(self) -> Price:
        """The time in steady state, with the errors of all that runs: overlap takes nothing off them."""
        return Price(self.steady_us, added(self.prices).uncertainty)

    @cached_property
    def exposed_us(self) -> float:
        """Time in which communication or copies run and nothing is computed."""
        computing = list(_busy(self._on(Stream.COMPUTE)))
        others = _busy([*self._on(Stream.COMMUNICATION), *self._on(Stream.COPIES)])
        return sum((each.end_us - each.start_us - _common_us(each, computing) for each in others), 0.0)

    @cached_property
    def scheduled(self) -> tuple[ScheduledTask, ...]:
        """Tasks of some length, and when each of them runs."""
        pairs = zip(self.tasks, self.schedule.intervals, strict=True)
        return tuple(
            ScheduledTask(task.name, task.stream, each.start_us, each.end_us - each.start_us, task.module)
            for task, each in pairs
            if task.us > 0
        )

    def _on(self, stream: Stream) -> list[Interval]:
        pairs = zip(self.tasks, self.schedule.intervals, strict=True)
        return [interval for task, interval in pairs if task.stream is stream]


def timeline(
    places: Sequence[Placed],
    order: Mapping[str, int],
    machine: Machine,
    prices: Sequence[float] = (),
    energy: GraphEnergy | None = None,
    computed_us: float = 0.0,
) -> Timeline:
    """The timeline of tasks at their places, whose prices are `prices` and of which `computed_us` is computation;
    `order`: position of each node of the graph, by name."""
    tasks = tuple(in_program_order(places, order))
    contention = measured_contention(machine)
    found = schedule(tasks, contention)
    upper = schedule(tasks, contention, serial=True) if found.not_measured else found
    return Timeline(tasks, found, upper, tuple(prices), energy, machine.power, computed_us)


def in_program_order(places: Sequence[Placed], order: Mapping[str, int]) -> Iterator[Task]:
    """All tasks in the order in which the host enqueues them, with what each waits for.

    A task on another stream than compute begins when everything that computes and was enqueued before it is done. What
    computes waits for the tasks that end before it: those of earlier places, but for one that says which node waits.
    """
    entries = sorted(_entries(places, order), key=lambda entry: entry.key)
    index_of = {(entry.place, entry.index): at for at, entry in enumerate(entries)}
    pending: list[tuple[tuple[int, int], int]] = []
    last_computed: int | None = None
    for at, entry in enumerate(entries):
        task = entry.task
        waits = {index_of[entry.place, other] for other in task.waits_for}
        if task.stream is Stream.COMPUTE:
            now = entry.key[:2]
            waits.update(other for end, other in pending if end <= now)
            pending = [each for each in pending if each[0] > now]
            last_computed = at
        else:
            if last_computed is not None:
                waits.add(last_computed)
            pending.append((entry.end, at))
        yield replace(task, waits_for=tuple(sorted(waits)))


@dataclass(frozen=True)
class _PlacedTask:
    key: tuple[int, int, int]
    """Position in the graph, place, and task of it: the order in which the host enqueues."""
    place: int
    index: int
    task: Task
    end: tuple[int, int]
    """The first position and place that wait for it."""


def _entries(places: Sequence[Placed], order: Mapping[str, int]) -> Iterator[_PlacedTask]:
    last_place = len(places)
    for number, place in enumerate(sorted(places, key=lambda each: each.position)):
        for index, task in enumerate(place.tasks):
            begin = (order[task.begins_after], last_place) if task.begins_after else (place.position, number)
            end = (order[task.ends_before], 0) if task.ends_before else (place.position, number + 1)
            yield _PlacedTask((*begin, index), number, index, task, end)


def _busy(intervals: Sequence[Interval]) -> Iterator[Interval]:
    """The union of intervals, as intervals that do not touch."""
    current: Interval | None = None
    for each in sorted(intervals, key=lambda each: each.start_us):
        if current is not None and each.start_us <= current.end_us:
            current = Interval(current.start_us, max(current.end_us, each.end_us))
        else:
            if current is not None:
                yield current
            current = each
    if current is not None:
        yield current


def _common_us(each: Interval, others: Sequence[Interval]) -> float:
    return sum(max(0.0, min(each.end_us, other.end_us) - max(each.start_us, other.start_us)) for other in others)
