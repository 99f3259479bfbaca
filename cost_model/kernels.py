"""Time of one rank's own kernels that are bound by memory."""

from __future__ import annotations

from math import log

from weaveopt.cost_model.curve import interpolate_us
from weaveopt.cost_model.machine import Machine


def memory_us(machine: Machine, num_bytes: float) -> float:
    """A kernel that reads and writes `num_bytes` in all, its launch included; 0 for no bytes.

    The measured curve where the profile has one, else `max(floor_us, num_bytes / bytes_per_s)`.
    """
    if num_bytes <= 0:
        return 0.0
    memory = machine.memory
    if memory.points:
        return interpolate_us(memory.points, num_bytes)
    return max(memory.floor_us, num_bytes / memory.bytes_per_s * 1e6)


def norm_us(machine: Machine, num_bytes: float, row: int) -> float:
    """`memory_us` of a kernel that reduces rows of `row` elements (add, norm), by its own curve where there is one."""
    norms = machine.memory.norms
    if num_bytes <= 0 or not norms:
        return memory_us(machine, num_bytes)
    nearest = min(norms, key=lambda curve: (abs(log(curve.row / row)), curve.row))
    return interpolate_us(nearest.points, num_bytes)


def kernel_us(machine: Machine, num_bytes: float, reduced_row: int = 1) -> float:
    """A kernel bound by memory, in microseconds: `norm_us` where it reduces rows, else `memory_us`.

    `reduced_row`: elements of each row that it reduces to one; 1 or less where it reduces none.
    """
    return norm_us(machine, num_bytes, reduced_row) if reduced_row > 1 else memory_us(machine, num_bytes)


def traffic_us(machine: Machine, num_bytes: float) -> float:
    """`num_bytes` more read or written inside a kernel that runs anyway: no launch, no floor."""
    return num_bytes / machine.memory.bytes_per_s * 1e6
