"""Kernels that hold a GEMM and its exchange, read from curves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.machine import Curve, Point
from weaveopt.cost_model.overlapped import Message, OperationCurves, Unmeasured, fastest, overlapped_us

EXACT = replace(cost_model.load("h200x4"), relative_error=0.0)
KERNEL_US, MEASURED_BYTES, ROW, DEPTH = 50.0, 1 << 24, 8192, 4096
GEMM_US = 80.0
"""Time of the library's GEMM alone, above what the curve says."""


def kernels(row: int) -> OperationCurves[str]:
    points = (
        Point(MEASURED_BYTES >> 2, KERNEL_US / 4),
        Point(MEASURED_BYTES, KERNEL_US),
        Point(1 << 28, KERNEL_US * 16),
    )
    curve = Curve("fused", "op", "cut", 2, points, row, 1 << 20, 1 << 30)
    return OperationCurves("toy", 2, "k", {"cut": {2048: (curve,), 8192: (replace(curve),)}})


def us_of(message: Message, measured_row: int = ROW) -> float:
    found = fastest(kernels(measured_row), EXACT, message, DEPTH, lambda *_: 0, GEMM_US)
    assert not isinstance(found, Unmeasured), found
    return found[1]


def test_longer_rows_than_measured_take_no_less_than_the_librarys_gemm() -> None:
    tokens = MEASURED_BYTES // (2 * ROW)
    assert us_of(Message(tokens, ROW, 2)) == pytest.approx(KERNEL_US)
    assert us_of(Message(2 * tokens, ROW // 2, 2)) == pytest.approx(KERNEL_US)
    assert us_of(Message(tokens // 2, 2 * ROW, 2)) == GEMM_US
    assert us_of(Message(2 * tokens, 2 * ROW, 2)) > GEMM_US, "four times as much: the curve is above the GEMM"


def test_curves_that_do_not_tell_their_rows_count_for_all() -> None:
    assert us_of(Message(MEASURED_BYTES // (4 * ROW), 2 * ROW, 2), measured_row=0) == pytest.approx(KERNEL_US)


def test_as_many_waves_of_a_larger_gemm_take_no_longer() -> None:
    """More columns than were measured may still be as many waves of tiles, or begin the next one."""
    small, large = 4096, 8192
    points = (Point(MEASURED_BYTES, KERNEL_US), Point(2 * MEASURED_BYTES, 2 * KERNEL_US))
    curve = Curve("fused", "op", "cut", 2, points, ROW, 1 << 20, 1 << 30)
    longer = replace(curve, points=tuple(replace(point, us=2 * point.us) for point in points))
    message = Message(MEASURED_BYTES // (2 * ROW), ROW, 2)
    waves = {small: 2, 5120: 2, 6144: 3, large: 4}

    def at(columns: int) -> float | None:
        return overlapped_us(
            EXACT, {small: (curve,), large: (longer,)}, message, columns, lambda *sizes: waves[sizes[2]]
        )

    assert at(small) == at(5120) == pytest.approx(KERNEL_US)
    assert at(6144) == pytest.approx(1.5 * KERNEL_US) and at(large) == pytest.approx(2 * KERNEL_US)
