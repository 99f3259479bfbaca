"""Times of local kernels on this rank's device, the most worthwhile first, within a budget."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weaveopt.autotune.asked_kernels import AskedKernel
from weaveopt.autotune.candidate_run import running
from weaveopt.autotune.kernel_calls import CPU_COLD_BYTES, GPU_COLD_BYTES, Operands, launch_of
from weaveopt.cost_model.timed import KernelShape, KernelTime
from weaveopt.measure.clock import Clock, CpuClock, CudaClock, Sample


@dataclass(frozen=True)
class KernelTimings:
    """Times that were taken, and what was not."""

    times: tuple[KernelTime, ...]
    left: tuple[KernelShape, ...] = ()
    """Kernels for which the budget had no time."""
    failed: tuple[KernelShape, ...] = ()
    """Kernels that could not be called alone."""


def time_kernels(
    kernels: Sequence[AskedKernel], device: torch.device, budget_s: float, weight_bytes: int
) -> KernelTimings:
    """Time kernels in this order; one that would exceed the budget is left, and shorter ones after it are not.

    `weight_bytes`: those of the graph, which bound what its caches are cold for.
    """
    most = CPU_COLD_BYTES if device.type == "cpu" else GPU_COLD_BYTES
    operands = Operands(device, min(most, max(weight_bytes, 1)))
    began, times, left, failed = time.perf_counter(), list[KernelTime](), list[KernelShape](), list[KernelShape]()
    with running():
        # The GPU's clock captures graphs of its own: of real tensors, though a compile traces fake ones.
        clock = _gpu_clock() if device.type == "cuda" else TuningCpuClock(began + budget_s)
        for kernel in kernels:
            if time.perf_counter() - began + _takes_s(kernel, device) > budget_s:
                left.append(kernel.shape)
                continue
            try:
                launch = launch_of(kernel.shape, operands)
                if launch is None:
                    failed.append(kernel.shape)
                    continue
                sample = clock.alone(launch, kernel.us)
            except RuntimeError:  # no memory, or no such kernel here: the profile's price stands
                failed.append(kernel.shape)
                continue
            times.append(KernelTime(kernel.shape, round(sample.us, 3), round(sample.spread, 4)))
    return KernelTimings(tuple(times), tuple(left), tuple(failed))


class TuningCpuClock(CpuClock):
    """The host's clock, for a look that a compile has time for."""

    LONGEST_S = 0.006
    FEWEST_CALLS = 2
    MOST_CALLS_ALONE = 400
    MOST_PASSES = 4

    def __init__(self, ends: float = math.inf) -> None:
        self._ends = ends
        """No pass but the first begins after this time of `perf_counter`: a busy host is slower than predicted."""

    def _continues(self, passes: Sequence[Sample]) -> bool:
        return super()._continues(passes) and (not passes or time.perf_counter() < self._ends)


@functools.cache
def _gpu_clock() -> Clock:
    return CudaClock()


_SET_UP_S = 0.01
"""Operands and the first call."""
_GPU_S = 0.1
"""Seconds that a GPU warms up and counts."""


def _takes_s(kernel: AskedKernel, device: torch.device) -> float:
    """About how many seconds a kernel takes to be timed."""
    if device.type == "cuda":
        return _SET_UP_S + (_GPU_S if kernel.us > 30 else 0.3 * _GPU_S)
    calls_s = 2 * max(TuningCpuClock.LONGEST_S, TuningCpuClock.FEWEST_CALLS * kernel.us * 1e-6)
    return _SET_UP_S + 2 * kernel.us * 1e-6 + calls_s
