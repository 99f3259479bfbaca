"""Launches: from one kernel to the next, and what a call costs the host."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch

from weaveopt.cost_model.machine import LaunchCosts
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Clock
from weaveopt.measure.draft import Draft
from weaveopt.measure.session import CalibrationSession

EAGER_CALLS = 2000


def launches(clock: Clock, device: torch.device) -> tuple[float, float]:
    """Microseconds from kernel to kernel in a graph (CPU: a call of a compiled function), and of one eager call."""
    x = torch.zeros(8, device=device)
    if device.type == "cuda":
        graph_us = clock.alone(lambda index: x.add_(1), 2.0).us
    else:
        empty = torch.compile(lambda value: value + 1, dynamic=False)
        empty(x)
        graph_us = clock.alone(lambda index: empty(x), 2.0).us
    start = time.perf_counter()
    for _ in range(EAGER_CALLS):
        x.add_(1)
    eager_us = (time.perf_counter() - start) / EAGER_CALLS * 1e6
    if device.type == "cuda":
        torch.cuda.synchronize()
    return graph_us, eager_us


@dataclass
class Launches(Family):
    """Taken first, because others leave out what is a launch's."""

    devices: ClassVar = frozenset({"cpu", "cuda"})
    graph_us: float = 0.0
    eager_us: float = 0.0

    def measure_alone(self, session: CalibrationSession) -> None:
        session.show_progress("launches", 0, 1)
        with session.as_many_as_cores() as active:
            if active:
                self.graph_us, self.eager_us = launches(session.clock, session.device)
        session.launch_us, session.eager_us = self.graph_us, self.eager_us

    def write(self, draft: Draft) -> None:
        origin = draft.origin("launch", (), "one-element kernels")
        draft.launch = LaunchCosts(origin, round(self.graph_us, 3), round(self.eager_us, 3))
