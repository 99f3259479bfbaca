"""Times of local kernels on this rank's device, the most worthwhile first, within a budget."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from weaveopt.autotune.asked_kernels import AskedKernel
from weaveopt.autotune.candidate_run import running
from weaveopt.autotune.kernel_calls import CPU_COLD_BYTES, GPU_COLD_BYTES, Operands, is_own, launch_of
from weaveopt.cost_model.gemm import GEMM
from weaveopt.cost_model.timed import KernelShape, KernelTime
from weaveopt.measure.clock import HOT_US, CudaClock, Launch, Sample
from weaveopt.measure.host_clock import HOST_GEMM_US, CpuClock


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

    Set-up and first calls do not count: they load libraries and compile this package's kernels, as the model's own
    would. `LOADING_S` and `COMPILING_S` bound them.
    `weight_bytes`: those of the graph, which bound what its caches are cold for.
    """
    try:
        return _timed(kernels, device, budget_s, weight_bytes)
    finally:
        if device.type == "cuda":
            if _gpu_clock.cache_info().currsize:
                _gpu_clock().release()
            torch.cuda.empty_cache()  # a CUDA graph that is captured later cannot take memory that is cached here


def _timed(kernels: Sequence[AskedKernel], device: torch.device, budget_s: float, weight_bytes: int) -> KernelTimings:
    most = CPU_COLD_BYTES if device.type == "cpu" else GPU_COLD_BYTES
    operands = Operands(device, min(most, max(weight_bytes, 1)))
    began, times, left, failed = time.perf_counter(), list[KernelTime](), list[KernelShape](), list[KernelShape]()
    with running():
        # The GPU's clock captures graphs of its own: of real tensors, though a compile traces fake ones.
        clock = (
            _gpu_clock() if device.type == "cuda" else TuningCpuClock(began + budget_s, gemm_between(kernels, operands))
        )
        first_calls_s = {False: time.perf_counter() - began, True: 0.0}
        for kernel in kernels:
            is_compiled = is_own(kernel.shape)
            counted_s = time.perf_counter() - began - sum(first_calls_s.values())
            most_s = COMPILING_S if is_compiled else LOADING_S
            if counted_s + _takes_s(kernel, clock) > budget_s or first_calls_s[is_compiled] > most_s:
                left.append(kernel.shape)
                continue
            first = time.perf_counter()
            try:
                launch = launch_of(kernel.shape, operands)
                if launch is None:
                    failed.append(kernel.shape)
                    continue
                launch(0)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                first_calls_s[is_compiled] += time.perf_counter() - first
                sample = clock.among_others(launch, kernel.us)
            except Exception:  # no memory, no such kernel here, or not compiled: the profile's price stands
                failed.append(kernel.shape)
                continue
            times.append(KernelTime(kernel.shape, round(sample.us, 3), round(sample.spread, 4)))
    return KernelTimings(tuple(times), tuple(left), tuple(failed))


LOADING_S = 2.0
"""Longest time of set-up and first calls of a graph's library kernels, in seconds. A process loads a library once."""
COMPILING_S = 8.0
"""The same of this package's kernels, which Triton compiles once for a host and keeps."""
COMPILE_S = 1.0
"""Seconds that Triton is taken to need for one of them."""


class TuningCpuClock(CpuClock):
    """The host's clock, for a look that a compile has time for."""

    LONGEST_S = 0.006
    FEWEST_CALLS = 2
    MOST_CALLS = 40
    MOST_PASSES = 4

    def __init__(self, ends: float = math.inf, other: Launch | None = None) -> None:
        super().__init__(other)
        self._ends = ends
        """No pass but the first begins after this time of `perf_counter`: a busy host is slower than predicted."""

    def _continues(self, passes: Sequence[Sample]) -> bool:
        return super()._continues(passes) and (not passes or time.perf_counter() < self._ends)


def gemm_between(kernels: Sequence[AskedKernel], operands: Operands) -> Launch | None:
    """The graph's GEMM of the largest weight, which leaves the caches as its model does; None: there is none that is
    short."""
    gemms = [each for each in kernels if each.is_captured and each.shape.kernel == GEMM and each.us < LONGEST_OTHER_US]
    for each in sorted(gemms, key=lambda each: math.prod(each.shape.rest), reverse=True):
        with suppress(Exception):  # no memory for its operands, say; what is timed then is after another one
            launch = launch_of(each.shape, operands)
            if launch is not None:
                launch(0)
                return launch
    return None


LONGEST_OTHER_US = 500.0
"""Most that a GEMM which others are timed after may take: beyond, caches matter less than the time of timing."""
FEWEST_CALLS_ALONE = 10
"""Calls of a kernel that is longer than any chain of calls: two a replay, of which the first and four more count."""


class TuningGpuClock(CudaClock):
    """The clock of a GPU, for kernels that are timed one after the other: the first leaves the device warm.

    Profiles hold times at the clock that a kernel's own power leaves the device, and times that are compared with them
    have to be of the same. A device at its power limit lowers its clock after some ten milliseconds of load, and only
    as long as little of the time is idle.
    """

    WARM_MS = 100.0
    STILL_WARM_MS = 30.0
    """The same where the device was busy until now."""
    COOLS_S = 0.05
    """Seconds after which a device that was hot is taken for a cool one."""
    COUNTED_MS = 3.0
    CHAIN_US = 500.0

    def __init__(self) -> None:
        super().__init__()
        self._was_hot = -math.inf

    def alone(self, launch: Launch, expected_us: float) -> Sample:
        sample = super().alone(launch, expected_us)
        if expected_us > HOT_US:
            self._was_hot = time.perf_counter()
        return sample

    def _warm_ms(self, expected_us: float) -> float:
        is_hot = time.perf_counter() - self._was_hot < self.COOLS_S
        return min(super()._warm_ms(expected_us), self.STILL_WARM_MS if is_hot else math.inf)

    def takes_alone_s(self, expected_us: float) -> float:
        """About how many seconds `alone` takes, its captures included."""
        return _takes_on_gpu_s(expected_us, self._warm_ms(expected_us))


def _takes_on_gpu_s(expected_us: float, warm_ms: float) -> float:
    fewest_calls_ms = FEWEST_CALLS_ALONE * expected_us * 1e-3
    return (warm_ms + max(2 * TuningGpuClock.COUNTED_MS, fewest_calls_ms)) * 1e-3


@functools.cache
def _gpu_clock() -> TuningGpuClock:
    return TuningGpuClock()


_SET_UP_S = 0.01
"""Seconds for operands and the first call."""


def _takes_s(kernel: AskedKernel, clock: TuningGpuClock | TuningCpuClock) -> float:
    """About how many seconds a kernel takes to be timed."""
    if isinstance(clock, TuningGpuClock):
        return _SET_UP_S + clock.takes_alone_s(kernel.us)
    return _SET_UP_S + _takes_on_cpu_s(kernel.us)


def _takes_on_cpu_s(us: float) -> float:
    call_s = (us + HOST_GEMM_US) * 1e-6
    return 2 * call_s + 2 * max(TuningCpuClock.LONGEST_S, TuningCpuClock.FEWEST_CALLS * call_s)


def take_all_s(kernels: Sequence[AskedKernel], device: str) -> float:
    """About how many seconds all of the kernels take to be timed, on a device that is cool at first, and which has run
    none of this package's own."""
    found_s, warm_ms = 0.0, TuningGpuClock.WARM_MS
    for kernel in kernels:
        found_s += _SET_UP_S + COMPILE_S * (device == "cuda" and is_own(kernel.shape))
        if device == "cpu":
            found_s += _takes_on_cpu_s(kernel.us)
        elif kernel.us > HOT_US:
            found_s += _takes_on_gpu_s(kernel.us, warm_ms)
            warm_ms = TuningGpuClock.STILL_WARM_MS
        else:
            found_s += _takes_on_gpu_s(kernel.us, 1.0)
    return found_s
