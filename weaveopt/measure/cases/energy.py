"""Energy of kernels, back to back, by the GPU's own counter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist

from weaveopt.cost_model.energy import EnergyPoint, PowerCosts, Work, WorkEnergy
from weaveopt.measure.cases.collectives import collective
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Launch, capture, slowest
from weaveopt.measure.draft import Draft
from weaveopt.measure.energy_counter import EnergyCounter, counter_of
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession

STEADY_S = 1.5
"""How long each kernel runs: the controller of the power settles within some tenths of a second."""
RENEWAL_S = 0.2
"""Pause before the counter is read: it is renewed some ten times a second."""
BURST_US = 2000.0
"""Work of one CUDA graph: the host is done with the next one long before."""
GEMMS = ((64, 8192, 8192), (512, 4096, 4096), (2048, 8192, 4096), (4096, 8192, 8192), (8192, 8192, 14336))
"""Rows, columns and depth: from one that reads weights to one that runs for milliseconds."""
ATTENTIONS = (512, 2048, 8192)
"""Queries of causal attention by 16 heads of 128."""
COPIES = (1 << 22, 1 << 26, 1 << 29)
EXCHANGES = (1 << 20, 1 << 24, 1 << 27)
"""Bytes of a copy, and of an all-reduce."""


@dataclass(frozen=True)
class Drawn:
    """One kernel, back to back."""

    alone_us: float
    """Its time by itself, before the device reaches its limit."""
    joules: float


def joules_of(
    burst: Callable[[], object], burst_us: float, counter: EnergyCounter, idle_watts: float,
    synchronize: Callable[[], None],
) -> float:  # fmt: skip
    """Joules of one call of `burst`, run for `STEADY_S` and more. The counter is read while the device is idle, after a
    pause in which it is renewed; what the device draws in that pause is taken off."""
    calls = max(int(STEADY_S * 1e6 / burst_us), 1)
    for _ in range(max(calls // 10, 1)):
        burst()
    synchronize()
    time.sleep(RENEWAL_S)
    before = counter.joules()
    for _ in range(calls):
        burst()
    synchronize()
    time.sleep(RENEWAL_S)
    return (counter.joules() - before - idle_watts * RENEWAL_S) / calls


@dataclass
class Energies(Family):
    """Taken by all ranks at once, as a model's kernels run; not with `--quick`, nor where a rank has no counter."""

    devices: ClassVar = frozenset({"cuda"})
    drawn: dict[Work, list[Drawn]] = field(default_factory=dict)
    limit_watts: float = 0.0
    idle_watts: float = 0.0

    def measure_alone(self, session: CalibrationSession) -> None:
        counter = None if session.quick else common_counter(session.device)
        if counter is None:
            return
        self.limit_watts, self.idle_watts = counter.limit_watts(), idle_watts(counter)
        every = tuple(local_kernels(session.device))
        for index, (work, kernel, guess_us) in enumerate(every):
            session.show_progress("energy", index, len(every))
            us = slowest([session.clock.alone(kernel, guess_us)])[0].us
            joules = captured_joules(kernel, us, counter, self.idle_watts)
            self.drawn.setdefault(work, []).append(Drawn(us, joules))

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        if session.quick or ranks.world != session.world or not self.drawn:
            return
        counter = common_counter(session.device)
        if counter is None:
            return
        for index, size in enumerate(EXCHANGES):
            session.show_progress("energy of exchanges", index, len(EXCHANGES))
            kernel, guess_us = collective(ranks, "all_reduce", size), 15.0 + size / 2e5
            us = session.clock.together(kernel, guess_us, ranks.process_group).us
            joules = captured_joules(kernel, us, counter, self.idle_watts)
            self.drawn.setdefault(Work.COMMUNICATION, []).append(Drawn(us, joules))

    def write(self, draft: Draft) -> None:
        if not self.drawn:
            return
        origin = draft.origin("power", (), f"back to back for {STEADY_S} s each, by the GPU's energy counter")
        energies = tuple(WorkEnergy(work, growing(rows)) for work, rows in sorted(self.drawn.items()))
        kept = tuple(each for each in energies if each.points)
        draft.power = PowerCosts(origin, round(self.limit_watts, 1), round(self.idle_watts, 1), kept)


def captured_joules(kernel: Launch, us: float, counter: EnergyCounter, idle_watts: float) -> float:
    """Joules of a kernel that takes `us` by itself, from a CUDA graph of many calls. All ranks of a collective pass the
    same `us`, and so call it as often."""
    count = max(int(BURST_US / us), 1)

    def calls() -> None:
        for index in range(count):
            kernel(index)

    graph = capture(calls, torch.cuda.graph_pool_handle())
    joules = joules_of(graph.replay, count * us, counter, idle_watts, torch.cuda.synchronize) / count
    graph.reset()
    return joules


def common_counter(device: torch.device) -> EnergyCounter | None:
    """The counter of this rank's device; None where any rank has none. All ranks call it."""
    counter = counter_of(device)
    lacking = torch.tensor([float(counter is None)])
    dist.all_reduce(lacking)
    return None if float(lacking) else counter


def growing(rows: list[Drawn]) -> tuple[EnergyPoint, ...]:
    """Points whose times and energies grow; of what contradicts that, the longer kernel counts."""
    found: list[EnergyPoint] = []
    for each in sorted(rows, key=lambda row: row.alone_us):
        point = EnergyPoint(round(each.alone_us, 3), round(each.joules, 9))
        if point.joules <= 0.0:
            continue
        while found and (found[-1].joules > point.joules or found[-1].us >= point.us):
            found.pop()
        found.append(point)
    return tuple(found)


def idle_watts(counter: EnergyCounter, pause_s: float = STEADY_S) -> float:
    """Power of the device with nothing to do."""
    before, start = counter.joules(), time.monotonic()
    time.sleep(pause_s)
    return max((counter.joules() - before) / (time.monotonic() - start), 0.1)


def local_kernels(device: torch.device) -> Iterator[tuple[Work, Launch, float]]:
    """(work, kernel, guess of its microseconds)."""
    for m, n, k in GEMMS:
        yield Work.GEMM, _gemm(device, m, n, k), 3.0 + 2.0 * m * n * k / 6e8
    for queries in ATTENTIONS:
        yield Work.ATTENTION, _attention(device, queries), 5.0 + 2.0 * 16 * queries * queries * 128 / 3e8
    for size in COPIES:
        yield Work.MEMORY, _scale(device, size), 3.0 + 2 * size / 3e6


def _gemm(device: torch.device, m: int, n: int, k: int) -> Launch:
    a, b = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
    return lambda _: torch.mm(a, b)


def _attention(device: torch.device, queries: int) -> Launch:
    q, k, v = (torch.randn(1, 16, queries, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    return lambda _: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _scale(device: torch.device, size: int) -> Launch:
    x = torch.randn(size // 4, device=device)
    out = torch.empty_like(x)
    return lambda _: torch.mul(x, 2.0, out=out)
