"""Times of a local kernel (attention, copies, grouped GEMMs) off its measured curve."""

from __future__ import annotations

from weaveopt.cost_model.curve import read_points
from weaveopt.cost_model.machine import KernelCurve, Machine, Point
from weaveopt.records.price import Price


def kernel_curve_us(machine: Machine, curve: KernelCurve, size: float) -> Price:
    """Time of `size` (in what the curve counts), read as `read_points` reads bytes."""
    return read_points(machine, curve.origin, tuple(Point(point.size, point.us) for point in curve.points), size)
