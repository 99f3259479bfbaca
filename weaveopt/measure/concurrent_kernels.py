"""Two kernels at the same time, on two streams of one GPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from weaveopt.measure.clock import Sample, barrier, slowest
from weaveopt.measure.ranks import Ranks

Step = Callable[[], object]
ROUNDS = 5
DTYPE = torch.bfloat16
ROWS, COLUMNS, DEPTH = 4096, 8192, 7168


class LargeGemm:
    """A GEMM that fills the device for about half a millisecond."""

    def __init__(self, device: torch.device) -> None:
        self._a = torch.randn(ROWS, DEPTH, device=device, dtype=DTYPE)
        self._weight = torch.randn(COLUMNS, DEPTH, device=device, dtype=DTYPE).t() * 0.02
        self._out = torch.empty(ROWS, COLUMNS, device=device, dtype=DTYPE)

    def __call__(self) -> object:
        return torch.mm(self._a, self._weight, out=self._out)


def concurrent_us(ranks: Ranks, timed: Step, count: int, other: Step | None, other_count: float) -> float:
    """Time one `timed`, in microseconds, while `other` runs on another stream; the slowest rank's."""
    side = torch.cuda.Stream()
    times = []
    for _ in range(ROUNDS):
        barrier(ranks.process_group)
        if other is not None:
            with torch.cuda.stream(side):
                for _ in range(int(other_count) + 2):
                    other()
            # Both streams are full before anything is timed.
            timed()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            timed()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    [slow] = slowest([Sample(median(times), 0.0)], ranks.process_group)
    return slow.us


def alone_us(step: Step) -> float:
    """Microseconds of one `step` of this rank alone, back to back with itself."""
    step()
    times: list[float] = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(8):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / 8)
    return median(times)
