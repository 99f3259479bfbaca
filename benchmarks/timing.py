"""Times of steps that take turns: captured in CUDA graphs on GPUs, by the host's clock on CPU ranks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from benchmarks.ranks import Place, barrier, slowest
from weaveopt.measure import clock

T = TypeVar("T")
Step = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How often steps are timed: in so many rounds, each so often in a row."""

    rounds: int
    repeats: int

    def of(self, place: Place) -> Effort:
        return Effort(min(self.rounds, 2), min(self.repeats, 2)) if place.quick else self


def nothing() -> None:
    """Restores nothing between timed steps."""


def capture(step: Step, pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    """`step`, run once and then captured, after a barrier of all ranks."""
    barrier()
    return clock.capture(step, pool)


def order_of(steps: Iterable[str], turn: int) -> list[str]:
    """Random order of a round, the same on all ranks and another one in each: at the power limit the clock is what the
    step before has left."""
    names = list(steps)
    return random.Random(turn).sample(names, len(names))


def enqueued_us(
    place: Place, steps: Mapping[str, Step], effort: Effort, restore: Step = nothing, calls: int = 1
) -> dict[str, float]:
    """Microseconds of each step on the GPU by name: median of all times, and of the ranks the largest.

    Steps take turns in rounds (see `order_of`); a round more comes first and does not count. Before each timed step
    `restore` runs and the ranks synchronize on the device by an all-reduce of a few bytes. A step is `calls` calls, of
    which one's time is returned.
    """
    effort, settle = effort.of(place), torch.zeros(1, device=place.device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(effort.rounds + 1):
        for name in order_of(steps, turn):
            barrier()
            torch.cuda._sleep(clock.HEAD_START_CYCLES)
            events = []
            for _ in range(effort.repeats if turn else 1):
                restore()
                dist.all_reduce(settle)
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                steps[name]()
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
            if turn:
                times[name] += [begin.elapsed_time(end) * 1e3 / calls for begin, end in events]
    return _medians(times)


def replayed_us(
    place: Place,
    steps: Mapping[str, Step],
    effort: Effort,
    calls: int = 1,
    restore: Step = nothing,
    may_fail: Collection[str] = (),
) -> dict[str, float]:
    """The same of steps that are captured in CUDA graphs; without those `may_fail` whose capture raises on a rank.

    All but `may_fail` run once before the first capture, as compiled graphs move weights in their first call.
    """
    for name, step in steps.items():
        if name not in may_fail:
            step()
    shared = torch.cuda.graph_pool_handle()
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, step in steps.items():
        if name not in may_fail:
            graphs[name] = capture(step, shared)
            continue
        # A capture that fails leaves its pool unusable.
        graph = attempt(place, name, lambda step=step: capture(step, torch.cuda.graph_pool_handle()))  # type: ignore[misc]
        if graph is not None:
            graphs[name] = graph
    return graphs_us(place, graphs, effort, calls, restore)


def graphs_us(
    place: Place, graphs: Mapping[str, torch.cuda.CUDAGraph], effort: Effort, calls: int = 1, restore: Step = nothing
) -> dict[str, float]:
    """The same of graphs that were captured before; frees them."""
    us = enqueued_us(place, {name: graph.replay for name, graph in graphs.items()}, effort, restore, calls)
    barrier()
    for graph in graphs.values():
        graph.reset()
    return us


def attempt(place: Place, what: str, act: Callable[[], T]) -> T | None:
    """Result of `act`; None where it raises on any rank, which is said."""
    found, why = None, ""
    try:
        found = act()
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if slowest([float(bool(why))]) == [0.0]:
        return found
    place.say(f"  {what} is left out: {why or 'it raised on another rank'}")
    return None


def chain(step: Callable[[], object], count: int) -> Step:
    """`count` calls in a row."""

    def run() -> None:
        for _ in range(count):
            step()

    return run


def host_us(
    place: Place,
    steps: Mapping[str, Step],
    effort: Effort,
    restore: Step = nothing,
    warm: int = 2,
    meets: bool = False,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Microseconds of each step by the host's clock `now`: median of all times, and of the ranks the largest.

    Steps take turns in rounds, each after a barrier and `warm` calls that do not count; a call of each comes first and
    does not count. `meets`: a barrier before every call.
    """
    effort = effort.of(place)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(effort.rounds + 1):
        for name in order_of(steps, turn):
            calls = range(-warm, effort.repeats) if turn else range(-1, 0)
            for repeat in calls:
                restore()
                if meets or repeat == calls.start:
                    barrier()
                begin = now()
                steps[name]()
                us = (now() - begin) * 1e6
                if repeat >= 0:
                    times[name].append(us)
    return _medians(times)


def _medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return dict(zip(times, slowest([statistics.median(found) for found in times.values()]), strict=True))
