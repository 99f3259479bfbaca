"""Predictions of the shipped profiles for kernels that hold a GEMM and its exchange, against the result files."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest

from benchmarks.workloads.overlap_prediction import Size, sizes_of, summary
from weaveopt import cost_model


@cache
def sizes(machine: str) -> list[Size]:
    return list(sizes_of(cost_model.load(machine), machine))


@pytest.mark.parametrize(
    ("machine", "suite", "count", "error", "reached", "least"),
    [
        ("h100x2", "gemm_all_reduce", 20, 0.05, 0.99, 0.97),
        ("h100x2", "all_gather_gemm", 10, 0.07, 0.99, 0.97),
        ("h200x4", "gemm_all_reduce", 20, 0.07, 0.98, 0.87),
    ],
)
def test_predictions_are_near_and_the_choice_is_near_the_best(
    machine: str, suite: str, count: int, error: float, reached: float, least: float
) -> None:
    """The profile's GEMMs run at the clock that the power limit leaves, the benchmark's short chains above it."""
    found = [size for size in sizes(machine) if size.suite == suite]
    assert len(found) == count and all(len(size.measured_us) >= 3 for size in found)
    assert fmean(abs(size.errors[size.chosen]) for size in found) < error
    assert fmean(size.reached for size in found) > reached and min(size.reached for size in found) > least


def test_the_table_has_every_operation() -> None:
    text = summary(sizes("h100x2"))
    assert "gemm_all_reduce" in text and "all_gather_gemm" in text


def test_a_profile_without_the_kernels_has_nothing_to_compare() -> None:
    assert not list(sizes_of(cost_model.load("h100x8"), "h100x2"))
