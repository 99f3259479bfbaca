"""Times of steps on this device with their spread, outliers measured again, and the slowest rank's.

Of hosts see `host_clock`.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from weaveopt.ops.captured_graphs import note_followed

Launch = Callable[[int], object]
"""One call of what is measured; the index says which, for buffers that take turns."""

NOISY = 0.15
"""A spread above it is measured again, twice as long; the calmer of the two counts."""
HOT_US = 30.0
"""A kernel that takes longer has enough CTAs to take the device's whole power."""
OTHER_GEMM = (16, 4096, 8192)
"""Rows, columns and inner size of the GEMM that short kernels take turns with: its weight is 64 MB."""
OTHER_US = 15.0
"""About how long it takes."""
LEAST_US = 0.5
"""No kernel of a CUDA graph is shorter."""
HEAD_START_CYCLES = 600_000
"""About 0.3 ms on the device: the host has enqueued the first replay before the ranks' barrier on the device."""


@dataclass(frozen=True)
class Sample:
    """A time in microseconds. `spread`: (third quartile - first quartile) / median of what it sums up."""

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
    """Return the largest time and the largest spread of each sample over all ranks."""
    found = torch.tensor([[sample.us, sample.spread] for sample in samples], dtype=torch.float64)
    if len(samples):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [Sample(float(us), float(spread)) for us, spread in found.reshape(-1, 2)]


class Meeting(Protocol):
    """How ranks that measure together wait for one another, and hear of each other's times."""

    def barrier(self) -> None:
        """Waits for all ranks, on the host, with nothing left to do on the device."""
        ...

    def slowest(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the largest time and the largest spread of each sample over all ranks."""
        ...

    def align(self, signal: torch.Tensor) -> None:
        """Make the device wait for all ranks; enqueued, without blocking the host."""
        ...


@dataclass(frozen=True)
class CollectiveRendezvous:
    """Synchronization through collectives of a process group, for ranks that do nothing else; None: all ranks."""

    group: dist.ProcessGroup | None = None

    def barrier(self) -> None:
        barrier(self.group)

    def slowest(self, samples: Sequence[Sample]) -> list[Sample]:
        return slowest(samples, self.group)

    def align(self, signal: torch.Tensor) -> None:
        dist.all_reduce(signal, group=self.group)


class Clock(Protocol):
    """Interface to time steps on a kind of device."""

    def alone(self, launch: Launch, expected_us: float) -> Sample:
        """Time a local kernel, back to back with itself; ranks need not wait for one another."""
        ...

    def among_others(self, launch: Launch, expected_us: float) -> Sample:
        """The same of a kernel that takes turns with another one, as in a model, if it is as short as that matters."""
        ...

    def together(
        self, launch: Launch, expected_us: float, group: dist.ProcessGroup | None = None, hot: bool = False
    ) -> Sample:
        """Time a step that the group takes together. All measure equally often; the slowest rank's time.

        `hot`: at the clock that the step's own power leaves the device, as `alone` measures. Steps that hold a GEMM are
        compared with GEMMs that were measured so.
        """
        [sample] = self.in_turns([launch], [expected_us], CollectiveRendezvous(group), hot)
        return sample

    def in_turns(
        self, launches: Sequence[Launch], expected_us: Sequence[float], ranks: Meeting, hot: bool = False
    ) -> list[Sample]:
        """Several such steps, pass by pass, each in its turn: what disturbs one of them disturbs the others too."""
        ...

    def takes_s(self, expected_us: float) -> float:
        """About how many seconds `in_turns` takes for a step."""
        ...


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


class CudaClock(Clock):
    """Clock of CUDA events around replays of a CUDA graph with many calls, on a warm device.

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
        note_followed(self._keeper)  # it reads no weights
        self._other: Launch | None = None
        self._other_us = 0.0

    def _length(self, expected_us: float, least: int) -> int:
        """Number of calls of a chain."""
        return int(min(64, max(least, self.CHAIN_US / max(expected_us, 1.0))))

    def _chain(self, launch: Launch, expected_us: float, least: int = 2) -> tuple[torch.cuda.CUDAGraph, int]:
        count = self._length(expected_us, least)

        def run() -> None:
            for index in range(count):
                launch(index)

        return capture(run, self._pool), count

    def alone(self, launch: Launch, expected_us: float) -> Sample:
        graph, count = self._chain(launch, expected_us)
        replay_ms = max(self._timed(graph, 1)[0], 1e-3)
        for _ in range(math.ceil(self._warm_ms(expected_us) / replay_ms)):
            graph.replay()

        def times(effort: float) -> list[float]:
            replays = int(min(16, max(4, self.COUNTED_MS * effort / replay_ms)))
            return [replay * 1e3 / count for replay in self._timed(graph, replays)]

        sample = calm(times)
        graph.reset()
        return sample

    def among_others(self, launch: Launch, expected_us: float) -> Sample:
        """In turns with a GEMM of few rows, whose weight displaces what the L2 cache holds, and whose own time is
        subtracted. Back to back with itself a short kernel finds there what in a model it does not."""
        if expected_us > HOT_US:
            return self.alone(launch, expected_us)
        if self._other is None:
            self._other = self._make_other()
            self._other_us = self.alone(self._other, OTHER_US).us
        other = self._other

        def in_turn(index: int) -> None:
            launch(index)
            other(index)

        both = self.alone(in_turn, min(expected_us + OTHER_US, HOT_US))
        us = max(both.us - self._other_us, LEAST_US)
        return Sample(us, both.spread * both.us / us)

    def release(self) -> None:
        """Give the memory of `among_others` back; it is taken again when it is next asked for."""
        self._other = None

    def _make_other(self) -> Launch:
        rows, columns, inner = OTHER_GEMM
        x, weight = (torch.randn(each, inner, dtype=torch.float16, device="cuda") for each in (rows, columns))
        out = torch.empty(rows, columns, dtype=torch.float16, device="cuda")
        return lambda index: torch.mm(x, weight.t(), out=out)

    def _warm_ms(self, expected_us: float) -> float:
        """Milliseconds that a kernel runs before it counts. Only one that takes all power changes the clock."""
        return self.WARM_MS if expected_us > HOT_US else 1.0

    def _timed(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        """Milliseconds of each replay, back to back."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]

    def in_turns(
        self, launches: Sequence[Launch], expected_us: Sequence[float], ranks: Meeting, hot: bool = False
    ) -> list[Sample]:
        """A barrier on the device, a small all-reduce of all ranks, precedes each replay."""
        ranks.barrier()
        chains = [self._chain(each, us, least=4) for each, us in zip(launches, expected_us, strict=True)]
        best: list[Sample | None] = [None for _ in chains]
        for effort in (1, 2):
            for index, (graph, count) in enumerate(chains):
                before = best[index]
                if before is None or before.spread > NOISY:
                    if hot:  # by what is expected, so that all ranks replay as often
                        for _ in range(math.ceil(self.WARM_MS * 1e3 / (count * max(expected_us[index], 1.0)))):
                            graph.replay()
                    [found] = ranks.slowest([sample_of(self._in_step(graph, 8 * effort, count, ranks))])
                    best[index] = found if before is None else min(before, found, key=lambda sample: sample.spread)
        ranks.barrier()
        for graph, _ in chains:
            graph.reset()
        return [sample for sample in best if sample is not None]

    def takes_s(self, expected_us: float) -> float:
        return 30 * self._length(expected_us, 4) * expected_us * 1e-6  # run, captured, 9 replays, 17 where it is noisy

    def _in_step(self, graph: torch.cuda.CUDAGraph, replays: int, count: int, ranks: Meeting) -> list[float]:
        ranks.barrier()
        torch.cuda._sleep(HEAD_START_CYCLES)
        events = []
        for _ in range(replays + 1):
            ranks.align(self._settle)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) * 1e3 / count for begin, end in events]
        return times[1:]  # the first one warms up
