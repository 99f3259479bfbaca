"""Time of one rank's own kernels that are bound by memory."""

from __future__ import annotations

from math import hypot, log

from weaveopt.cost_model.curve import interpolate_us, points_error, read_points
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.uncertainty import away_error, read


def memory_us(machine: Machine, num_bytes: float) -> float:
    """A kernel that reads and writes `num_bytes` in all, its launch included; 0 for no bytes.

    The measured curve where the profile has one, else `max(floor_us, num_bytes / bytes_per_s)`.
    """
    if num_bytes <= 0:
        return 0.0
    memory = machine.memory
    if memory.points:
        return read_points(machine, memory.origin, memory.points, num_bytes)
    us = max(memory.floor_us, num_bytes / memory.bytes_per_s * 1e6)
    return read(machine, memory.origin, us, ("memory", num_bytes))


def norm_us(machine: Machine, num_bytes: float, row: int) -> float:
    """`memory_us` of a kernel that reduces rows of `row` elements (add, norm), by its own curve where there is one."""
    norms = machine.memory.norms
    if num_bytes <= 0 or not norms:
        return memory_us(machine, num_bytes)
    nearest = min(norms, key=lambda curve: (abs(log(curve.row / row)), curve.row))
    reading = (machine.memory.origin, nearest.row, row, num_bytes)

    def away() -> float:
        by_row = sorted(norms, key=lambda curve: curve.row)
        times = [log(interpolate_us(curve.points, num_bytes)) for curve in by_row]
        of_row = 0.0 if nearest.row == row else away_error([float(curve.row) for curve in by_row], times, row)
        return hypot(of_row, points_error(nearest.points, num_bytes))

    return read(machine, machine.memory.origin, interpolate_us(nearest.points, num_bytes), reading, away)


def kernel_us(machine: Machine, num_bytes: float, reduced_row: int = 1) -> float:
    """A kernel bound by memory, in microseconds: `norm_us` where it reduces rows, else `memory_us`.

    `reduced_row`: elements of each row that it reduces to one; 1 or less where it reduces none.
    """
    return norm_us(machine, num_bytes, reduced_row) if reduced_row > 1 else memory_us(machine, num_bytes)


def traffic_us(machine: Machine, num_bytes: float) -> float:
    """`num_bytes` more read or written inside a kernel that runs anyway: no launch, no floor."""
    return read(machine, machine.memory.origin, num_bytes / machine.memory.bytes_per_s * 1e6, "memory.bytes_per_s")
