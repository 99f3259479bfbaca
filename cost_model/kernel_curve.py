"""Times of a local kernel (attention, copies, grouped GEMMs) off its measured curve."""

from __future__ import annotations

from weaveopt.cost_model.curve import interpolate_us
from weaveopt.cost_model.machine import KernelCurve, Point


def kernel_curve_us(curve: KernelCurve, size: float) -> float:
    """Time of `size` (in what the curve counts), read as `interpolate_us` reads bytes."""
    return interpolate_us(tuple(Point(point.size, point.us) for point in curve.points), size)
