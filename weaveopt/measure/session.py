"""Context shared by all measurement families: the device, its clock, and the order in which ranks take steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from weaveopt.measure import fit
from weaveopt.measure.clock import Clock, CudaClock, Sample, barrier
from weaveopt.measure.host_clock import CoarseCpuClock, CpuClock

ShowProgress = Callable[[str, int, int], None]
"""(what, steps done, steps in all)."""
OVERALL = "all kinds"
"""Name of the whole run in `ShowProgress`: kinds of measurements done, and all."""
Rows = list[tuple[int, Sample]]
"""(size, time) of a curve, sizes ascending."""


class CalibrationSession:
    """One run of `calibrate` on one rank. `quick`: a coarse look for tests."""

    def __init__(self, device: torch.device, show_progress: ShowProgress, quick: bool = False) -> None:
        self.device, self.show_progress, self.quick = device, show_progress, quick
        self.is_gpu = device.type == "cuda"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        cpu_clock = CoarseCpuClock if quick else CpuClock
        self.clock: Clock = CudaClock() if self.is_gpu else cpu_clock()
        self.launch_us = self.eager_us = 0.0
        """Times from kernel to kernel, and of an eager call, measured first on this rank."""

    @property
    def worlds(self) -> tuple[int, ...]:
        """Sizes of the groups that measure together."""
        every = range(2, self.world + 1)
        # GPU groups are halves of halves; CPU ranks come in any number.
        return tuple(n for n in every if not self.is_gpu or n == self.world or n & (n - 1) == 0)

    @property
    def num_active(self) -> int:
        """Number of ranks that measure local kernels at the same time."""
        return self.world if self.is_gpu else min(self.world, len(os.sched_getaffinity(0)))

    @contextmanager
    def as_many_as_cores(self) -> Iterator[bool]:
        """Yield True if this rank measures now: CPU ranks beyond the core count wait, so that measurements do not
        share cores."""
        yield self.rank < self.num_active
        barrier()

    def curve(self, what: str, sizes: Sequence[int], take: Callable[[int], Sample]) -> Rows:
        """A time for each size, by its position; those that stand out are measured again."""
        rows = []
        for index, size in enumerate(sizes):
            self.show_progress(what, index, len(sizes))
            rows.append((size, take(index)))
        return fit.calmed(rows, take)
