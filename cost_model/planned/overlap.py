"""Two kernels on two streams: how much each slows the other, and when both are done.

A slowdown is a factor on a kernel's own time: 1 where it is undisturbed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """Shares of a device, 0 to 1, that a kernel takes when it runs alone."""

    units: float = 0.0
    """Processors."""
    memory: float = 0.0
    """Memory bandwidth."""
    link: float = 0.0
    """Bandwidth to other ranks."""


def shared_slowdown(mine: Demand, other: Demand) -> float:
    """Of a kernel that shares with another in proportion to what they ask for.

    A resource of which both together ask a share `s > 1` is `s` times slower for each; the scarcest decides.
    """
    asked = (mine.units + other.units, mine.memory + other.memory, mine.link + other.link)
    return max(1.0, *asked)


def reserved_slowdown(taken: float) -> float:
    """Of a kernel that needs all of a resource of which another takes the share `taken` first: `1 / (1 - taken)`.

    So a GEMM that leaves 8 of 132 SMs to communication (TokenWeave §4.3), or a kernel bound by memory beside
    copies that take 1.8 of 8 TB/s (DWDP §A.1: its rate falls by 22.5 %).
    """
    assert 0.0 <= taken < 1.0, f"a share of a resource that leaves some: {taken}"
    return 1.0 / (1.0 - taken)


def power_slowdown(first: float, second: float, idle: float) -> float:
    """Of kernels that together draw more than the limit: `first + second - idle`, 1 being the limit (DWDP §A.2).

    Each share includes the `idle` draw, which counts once; the clock falls as the draw exceeds the limit.
    """
    return max(1.0, first + second - idle)


@dataclass(frozen=True)
class Together:
    """When two kernels that start together are done, and what running them at once saves."""

    first_us: float
    second_us: float
    saved_us: float
    """Against one after the other, undisturbed; below 0 where contention costs more than overlap brings."""

    @property
    def us(self) -> float:
        return max(self.first_us, self.second_us)


def together(first_us: float, second_us: float, first_slowdown: float = 1.0, second_slowdown: float = 1.0) -> Together:
    """Two kernels that take `first_us` and `second_us` alone, started at once.

    While both run, each is slower by its factor; when the shorter is done, the other goes on at full speed. A kernel
    of no length disturbs nobody.
    """
    first_end, second_end = first_us * first_slowdown, second_us * second_slowdown
    if first_end <= second_end:
        second_end = first_end + second_us - first_end / second_slowdown
    else:
        first_end = second_end + first_us - second_end / first_slowdown
    return Together(first_end, second_end, first_us + second_us - max(first_end, second_end))
