"""Steps back to back for a second, at whatever clock the power limit leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks import clocks
from benchmarks.ranks import Place, barrier, slowest
from benchmarks.timing import Step

STEADY_US = 1.0e6


@dataclass(frozen=True)
class Steady:
    """One variant back to back, on the slowest rank; watts, clock and power limit of the worst rank."""

    us: float
    watts: float
    sm_mhz: float
    limited: float


def steadily(step: Step, restore: Step, us: float, place: Place) -> Steady:
    count = max(int(STEADY_US / us), 3)
    barrier()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def all_of_them() -> None:
        begin.record()
        for _ in range(count):
            restore()
            step()
        end.record()

    seen = clocks.observe(all_of_them, 1, place.device) or clocks.Clocks(0.0, 0.0)
    torch.cuda.synchronize()
    worst = [1e3 * begin.elapsed_time(end) / count, seen.watts, -seen.sm_mhz, seen.limited]
    us, watts, mhz, limited = slowest(worst)
    return Steady(us, watts, -mhz, limited)
