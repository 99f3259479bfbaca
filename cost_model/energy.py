"""Energy and power: what kernels draw, and what a device at its power limit makes of it.

A GPU that runs one forward after the other is held at its power limit: it lowers its clock until it draws no more. A
forward then takes its energy over the limit, however short its kernels are one by one. So what saves arithmetic saves
time in proportion, and what only hides communication saves what waiting draws.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import copysign


class Work(StrEnum):
    """Kinds of work that draw differently."""

    GEMM = "gemm"
    ATTENTION = "attention"
    MEMORY = "memory"
    """Point-wise operations, reductions and copies."""
    COMMUNICATION = "communication"
    """Exchanges between ranks, waiting included."""
    HOST = "host"
    """Waiting for the host; never measured, so it draws what an idle device does."""


@dataclass(frozen=True)
class EnergyPoint:
    """Energy of one kernel that takes `us` microseconds by itself."""

    us: float
    joules: float


@dataclass(frozen=True)
class WorkEnergy:
    """Energy of the kernels of one kind of work by their time, all that the device draws meanwhile included."""

    work: Work
    points: tuple[EnergyPoint, ...]
    """Times and energies grow."""


@dataclass(frozen=True)
class PowerCosts:
    """Energy of a device's kernels, back to back, and the power that it may draw."""

    origin: str
    limit_watts: float
    idle_watts: float
    """Power of the device with nothing to do."""
    energies: tuple[WorkEnergy, ...]


def at_other_clock(power: PowerCosts, work: Work, ratio: float) -> PowerCosts:
    """The energies where kernels of one kind take `ratio` times as long as by the profile.

    At any clock a kernel computes and reads the same, and draws about the same energy. Read by its time, one that runs
    on a device with more power to spare than the profile's had would draw too little.
    """
    energies = tuple(
        replace(each, points=tuple(replace(point, us=point.us * ratio) for point in each.points))
        if each.work is work
        else each
        for each in power.energies
    )
    return replace(power, energies=energies)


def work_of(name: str) -> Work:
    """The kind of work of a kernel's or a term's name: `gemm`, `add_norm`, `all_reduce ring`."""
    words = set(name.replace(" ", "_").split("_"))
    if words & {"gemm", "expert", "experts"}:
        return Work.GEMM
    if "attention" in words:
        return Work.ATTENTION
    if "host" in words:
        return Work.HOST
    return Work.MEMORY if words & {"add", "norm", "copy", "memory", "rows", "pad", "kernel"} else Work.COMMUNICATION


def graph_energy(power: PowerCosts | None, kernels: Iterable[tuple[str, float]]) -> GraphEnergy | None:
    """Energy of kernels given as (name, microseconds); those of negative times are taken off. None where the profile
    has no energies."""
    if power is None:
        return None
    joules = total_us = 0.0
    for name, us in kernels:
        joules += copysign(kernel_joules(power, work_of(name), abs(us)), us)
        total_us += us
    return GraphEnergy(joules, total_us)


def kernel_joules(power: PowerCosts, work: Work, us: float) -> float:
    """Energy of a kernel of that kind that takes `us` by itself: linear between points, beyond them at the power of the
    nearest one. Work that was not measured draws what an idle device does."""
    points = next((each.points for each in power.energies if each.work is work), ())
    if not points:
        return power.idle_watts * us * 1e-6
    right = bisect_left(points, us, key=lambda point: point.us)
    if right in (0, len(points)):
        end = points[min(right, len(points) - 1)]
        return end.joules * us / end.us
    low, high = points[right - 1], points[right]
    return low.joules + (high.joules - low.joules) * (us - low.us) / (high.us - low.us)


@dataclass(frozen=True)
class GraphEnergy:
    """Energy of all that a graph runs."""

    joules: float
    """Energy of its kernels, each by itself."""
    kernels_us: float
    """Sum of their times."""

    def within(self, power: PowerCosts, us: float) -> float:
        """Energy of the graph if it takes `us`: kernels that run at once share what an idle device draws, and while
        nothing runs it draws that."""
        return self.joules + power.idle_watts * (us - self.kernels_us) * 1e-6


def steady_us(power: PowerCosts | None, energy: GraphEnergy | None, us: float) -> float:
    """Time of a graph in steady state, one run after the other: its energy over the power limit if it would draw more
    than that in `us`, its time by itself; `us` where the profile has no energies."""
    if power is None or energy is None:
        return us
    return max(us, energy.within(power, us) / power.limit_watts * 1e6)
