"""Times of steps on this device: medians with their spread, outliers measured again, and the slowest rank's."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

Launch = Callable[[int], object]
"""One call of what is measured; the index says which, for buffers that take turns."""

NOISY = 0.15
"""A spread above it is measured again, twice as long; the calmer of the two counts."""
HEAD_START_CYCLES = 600_000
"""About 0.3 ms on the device: the host has enqueued the first replay before the ranks' barrier on the device."""


@dataclass(frozen=True)
class Sample:
    """A time in microseconds. `spread`: (third quartile - first quartile) / median of what it is the median of."""

    us: float
    spread: float


def sample_of(times_us: Sequence[float]) -> Sample:
    """Median and spread; of fewer than four times the spread is their range over the median."""
    middle = statistics.median(times_us)
    if len(times_us) < 4:
        return Sample(middle, (max(times_us) - min(times_us)) / middle)
    low, _, high = statistics.quantiles(times_us, n=4)
    return Sample(middle, (high - low) / middle)


def calm(measure: Callable[[float], Sequence[float]]) -> Sample:
    """`measure(effort)` once, and again with twice the effort where its times are spread widely."""
    first = sample_of(measure(1.0))
    if first.spread <= NOISY:
        return first
    second = sample_of(measure(2.0))
    return min(first, second, key=lambda sample: sample.spread)


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Waits for all ranks, on the host, with nothing left to do on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1), group=group)


def slowest(samples: Sequence[Sample], group: dist.ProcessGroup | None = None) -> list[Sample]:
    """Of each sample the largest time, and the largest spread, of all ranks."""
    found = torch.tensor([[sample.us, sample.spread] for sample in samples], dtype=torch.float64)
    if len(samples):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [Sample(float(us), float(spread)) for us, spread in found.reshape(-1, 2)]


class Clock(Protocol):
    """How steps are timed on a kind of device."""

    def alone(self, launch: Launch, expected_us: float) -> Sample:
        """A kernel of this rank's own, back to back with itself; ranks need not wait for one another."""
        ...

    def together(self, launch: Launch, expected_us: float, group: dist.ProcessGroup | None = None) -> Sample:
        """A step that the group takes together. All measure as often as the others; the slowest rank's time."""
        ...


class CpuClock:
    """By the host's clock, call by call: of several passes the fastest.

    What other programs of the host add to a pass is not the machine's. Ranks that poll suffer most from it.
    """

    LONGEST_S = 0.08
    NUM_PASSES = 3

    def alone(self, launch: Launch, expected_us: float) -> Sample:
        for index in range(3):
            launch(index)

        def times() -> list[float]:
            found: list[float] = []
            begin = time.perf_counter()
            while len(found) < 8 or (time.perf_counter() - begin < self.LONGEST_S and len(found) < 2000):
                start = time.perf_counter()
                launch(len(found))
                found.append((time.perf_counter() - start) * 1e6)
            return found

        return min((sample_of(times()) for _ in range(self.NUM_PASSES)), key=lambda sample: sample.us)

    def together(self, launch: Launch, expected_us: float, group: dist.ProcessGroup | None = None) -> Sample:
        def once(index: int) -> float:
            start = time.perf_counter()
            launch(index)
            return (time.perf_counter() - start) * 1e6

        # No rank may stop by its own clock.
        probe = torch.tensor([max(once(index) for index in range(4))], dtype=torch.float64)
        dist.all_reduce(probe, op=dist.ReduceOp.MAX, group=group)
        count = int(min(400, max(8, self.LONGEST_S * 1e6 / probe.item())))
        passes = []
        for _ in range(self.NUM_PASSES):
            barrier(group)
            passes += slowest([sample_of([once(index) for index in range(count)])], group)
        return min(passes, key=lambda sample: sample.us)


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures: memory of a pool is only used again on the stream that it was made for."""
    return torch.cuda.Stream()


def capture(step: Callable[[], object], pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    """`step`, run once and then captured. Not `torch.cuda.graph`, which empties the allocator each time."""
    graph = torch.cuda.CUDAGraph()
    side = _capture_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # what is set up once for a stream (cuBLAS workspaces) is not the graph's
        torch.cuda.synchronize()
        # NCCL's watchdog asks for events from its own thread, which a global capture would take for a mistake.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return graph


class CudaClock:
    """By events around replays of a CUDA graph that holds many calls, on a device that is warm.

    A graph of GEMMs at full power lowers the device's clock after some ten milliseconds; what comes before that
    is not what a model sees, so a kernel runs for `WARM_MS` before it counts. (With 15 ms, large GEMMs took a sixth
    more in the order of a grid, on four GPUs, than the same GEMMs in random order on one.)
    """

    WARM_MS = 60.0
    COUNTED_MS = 8.0
    CHAIN_US = 1200.0

    def __init__(self) -> None:
        self._settle = torch.zeros(1, device="cuda")
        self._pool = torch.cuda.graph_pool_handle()
        # A pool lives as long as a graph that uses it.
        self._keeper = capture(lambda: self._settle.add_(0), self._pool)

    def _chain(self, launch: Launch, expected_us: float, least: int = 2) -> tuple[torch.cuda.CUDAGraph, int]:
        count = int(min(64, max(least, self.CHAIN_US / max(expected_us, 1.0))))

        def run() -> None:
            for index in range(count):
                launch(index)

        return capture(run, self._pool), count

    def alone(self, launch: Launch, expected_us: float) -> Sample:
        graph, count = self._chain(launch, expected_us)
        replay_ms = max(self._timed(graph, 1)[0], 1e-3)
        # Only what takes the device's whole power changes its clock.
        warm_ms = self.WARM_MS if expected_us > 30 else 1.0
        for _ in range(math.ceil(warm_ms / replay_ms)):
            graph.replay()

        def times(effort: float) -> list[float]:
            replays = int(min(16, max(4, self.COUNTED_MS * effort / replay_ms)))
            return [replay * 1e3 / count for replay in self._timed(graph, replays)]

        sample = calm(times)
        graph.reset()
        return sample

    def _timed(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        """Milliseconds of each replay, back to back."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]

    def together(self, launch: Launch, expected_us: float, group: dist.ProcessGroup | None = None) -> Sample:
        """A barrier on the device, a small all-reduce of all ranks, precedes each replay."""
        barrier(group)
        graph, count = self._chain(launch, expected_us, least=4)
        best: Sample | None = None
        for effort in (1, 2):
            [found] = slowest([sample_of(self._in_step(graph, 8 * effort, count, group))], group)
            best = found if best is None else min(best, found, key=lambda sample: sample.spread)
            if best.spread <= NOISY:
                break
        barrier(group)
        graph.reset()
        assert best is not None
        return best

    def _in_step(
        self, graph: torch.cuda.CUDAGraph, replays: int, count: int, group: dist.ProcessGroup | None
    ) -> list[float]:
        barrier(group)
        torch.cuda._sleep(HEAD_START_CYCLES)
        events = []
        for _ in range(replays + 1):
            dist.all_reduce(self._settle, group=group)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) * 1e3 / count for begin, end in events]
        return times[1:]  # the first one warms up
