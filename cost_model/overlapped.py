"""Time of a kernel that holds a GEMM and its exchange, as measured: by message bytes, at several sizes of the GEMM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from weaveopt.cost_model.curve import at_row, interpolate_us
from weaveopt.cost_model.depths import at_depth_us
from weaveopt.cost_model.machine import Curve, Point

Waves = Callable[[int, int, int], int]
"""How many tiles the busiest cluster computes one after the other, of (rows, elements of a row, depth); 0: unknown."""


@dataclass(frozen=True)
class Message:
    """The rows that are exchanged."""

    tokens: int
    row: int
    """Elements of each."""
    element_bytes: int

    @property
    def bytes(self) -> int:
        return self.tokens * self.row * self.element_bytes


def overlapped_us(
    by_depth: Mapping[int, tuple[Curve, ...]], message: Message, depth: int, waves: Waves
) -> float | None:
    """At `depth`, from curves of one kernel by depth: one for each length of rows. What is called depth is the size of
    the GEMM that rows do not tell: k where its results are exchanged, n where its input is.

    None where it was not measured at such a size.
    """
    found: dict[int, float] = {}
    for measured, curves in by_depth.items():
        if at_row(curves, message.row).covers(message.bytes):
            found[measured] = _at_size_us(curves, message, measured, waves)
    return at_depth_us(found, depth)


def _at_size_us(curves: tuple[Curve, ...], message: Message, depth: int, waves: Waves) -> float:
    """Read from curves of one depth, as it is and by what a wave of tiles takes; the longer of the two.

    Times were measured at sizes whose tiles fill whole waves. A few rows more may take a wave more.
    """
    size = message.bytes
    plain_us = interpolate_us(at_row(curves, message.row).points, size)
    # A profile need not tell of SMs, nor at which length of rows a time was measured.
    here = waves(message.tokens, message.row, depth)
    if here == 0 or not all(curve.row for curve in curves):
        return plain_us
    of_a_wave = []
    for curve in curves:
        row_bytes = curve.row * message.element_bytes
        tokens_of = ((point, max(round(point.bytes / row_bytes), 1)) for point in curve.points)
        points = tuple(Point(point.bytes, point.us / waves(tokens, curve.row, depth)) for point, tokens in tokens_of)
        of_a_wave.append(replace(curve, points=points))
    return max(plain_us, interpolate_us(at_row(of_a_wave, message.row).points, size) * here)
