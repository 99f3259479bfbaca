"""Errors of readings, and whether they tell how far predictions are off."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks import results_table
from benchmarks.record import RESULTS
from benchmarks.workloads.prediction_model import predicted_us
from tests.graphs.nonempty import some
from weaveopt import cost_model
from weaveopt.cost_model.collectives import LIBRARY, all_reduce_us
from weaveopt.cost_model.curve import at_row, points_error, read_points
from weaveopt.cost_model.gemm import Gemm, gemm_error, gemm_us
from weaveopt.cost_model.machine import Curve, Point
from weaveopt.cost_model.uncertainty import away_error
from weaveopt.records.candidate import Fabric
from weaveopt.records.price import PriceSource, error_us_of, source_of

H200, H100X8 = cost_model.load("h200x4"), cost_model.load("h100x8")
STRAIGHT = tuple(Point(1 << size, float(1 << size)) for size in range(10, 18))
KNEE = tuple(Point(1 << size, max(float(1 << 13), float(1 << size))) for size in range(10, 18))


def test_points_that_predict_each_other_leave_no_error() -> None:
    assert points_error(STRAIGHT, 3000) == pytest.approx(0.0, abs=1e-9)
    assert points_error(STRAIGHT, 1 << 12) == 0.0
    assert points_error(STRAIGHT, 1 << 19) == pytest.approx(0.0, abs=1e-9)


def test_the_error_is_largest_in_the_middle_of_a_gap_beside_a_knee() -> None:
    low, middle, high = (points_error(KNEE, int((1 << 13) * 2**share)) for share in (0.1, 0.5, 0.9))
    assert 0 < low < middle > high > 0
    # What the neighbours of the knee miss: half of an octave, by that point alone.
    assert middle == pytest.approx(math.log(2) / 2 / math.sqrt(2), rel=1e-3)
    assert points_error(KNEE, int((1 << 15) * 2**0.5)) == pytest.approx(0.0, abs=1e-9), "far from it all is straight"


def test_beyond_the_ends_it_grows_with_the_distance() -> None:
    steep = (Point(1, 1.0), Point(2, 2.0), Point(4, 8.0))
    near, far = points_error(steep, 8), points_error(steep, 16)
    assert far == pytest.approx(2 * near) and near > 0.1
    flat = (Point(1024, 10.0), Point(2048, 11.0), Point(4096, 12.0))
    assert points_error(flat, 512) == points_error(flat, 16) == pytest.approx(math.log(1.1))


def test_few_points_say_little() -> None:
    assert away_error([8.0], [1.0], 8.0) == 0.0 and away_error([8.0], [1.0], 1e6) == 1.0
    assert away_error([1.0, 4.0], [0.0, 1.0], 2.0) == pytest.approx(0.5)
    assert away_error([], [], 1.0) == 0.0


def test_a_reading_at_a_point_is_measured_and_off_by_the_profiles_own_error() -> None:
    origin = H200.memory.origin
    at, between = read_points(H200, origin, KNEE, 1 << 13), read_points(H200, origin, KNEE, 12000)
    assert at.source is PriceSource.MEASURED and between.source is PriceSource.INTERPOLATED
    assert at.error_us == pytest.approx(at * H200.relative_error / math.sqrt(2))
    assert between.error_us / between > 0.2
    assert read_points(replace(H200, relative_error=0.0), origin, KNEE, 12000).error_us == 0.0


def test_gemms_between_sizes_are_less_sure_than_at_them() -> None:
    [costs] = [each for each in H200.gemms if each.dtype == "bfloat16"]
    assert gemm_error(costs, 1024, 4096, 4096) == 0.0
    rows, all_three = gemm_error(costs, 900, 4096, 4096), gemm_error(costs, 900, 4608, 4608)
    assert 0.005 < rows < all_three < 0.5
    assert gemm_error(costs, 1024, 4096, 4100) > 0.25, "no sample is of rows that 16 bytes do not divide"
    assert source_of(gemm_us(H200, Gemm(1024, 4096, 4096), "bfloat16")) is PriceSource.MEASURED
    assert source_of(gemm_us(H200, Gemm(900, 4096, 4096), "bfloat16")) is PriceSource.INTERPOLATED
    assert source_of(gemm_us(H100X8, Gemm(1024, 4096, 4096), "bfloat16")) is PriceSource.ESTIMATED


def test_other_numbers_of_ranks_are_less_sure_than_those_that_were_measured() -> None:
    errors = {
        world: error_us_of(us) / us
        for world in (2, 3, 4, 8)
        for us in [all_reduce_us(H200, Fabric.LIBRARY, LIBRARY, 1 << 24, world)]
    }
    assert errors[2] == pytest.approx(H200.relative_error / math.sqrt(2), rel=0.01) and errors[8] > 2 * errors[4]
    assert errors[3] > errors[2]


def test_other_lengths_of_rows_are_less_sure_than_those_that_were_measured() -> None:
    def curve(row: int, us: float) -> Curve:
        return Curve("fused", "op", "v", 2, tuple(Point(size, us * size / 1024) for size in (1024, 2048, 4096)), row)

    curves = (curve(1024, 10.0), curve(2048, 10.0), curve(4096, 14.0), curve(8192, 20.0))
    assert at_row(curves, 2048).row_error == 0.0 and at_row(curves, 3000).row_error > 0.05
    assert at_row(curves[:1], 4096).row_error == pytest.approx(1.0)


@pytest.mark.parametrize(("machine", "hosts"), [("h100x8", 2), ("a100x4-slingshot", 2), ("h200x8", 4)])
def test_messages_of_one_modelled_link_are_off_together(machine: str, hosts: int) -> None:
    """A slower link is slower for a whole message and for its halves: what an exchange is off by says nothing against
    splitting it. What each half pays again, its latency, is not sure."""
    profile, world = cost_model.load(machine), hosts * cost_model.load(machine).ranks_per_host
    whole, half = (all_reduce_us(profile, Fabric.LIBRARY, LIBRARY, size, world, hosts) for size in (1 << 26, 1 << 25))
    assert error_us_of(whole) > 0.1 * whole
    assert error_us_of(half * 2 - whole) < 0.01 * whole
    few, half_of_few = (all_reduce_us(profile, Fabric.LIBRARY, LIBRARY, size, world, hosts) for size in (1024, 512))
    assert error_us_of(half_of_few * 2 - few) > 0.05 * few


@pytest.mark.parametrize(("machine", "least", "most"), [("h200x4", 0.55, 0.9), ("cpu", 0.5, 1.0)])
def test_stored_measurements_are_as_far_off_as_the_errors_say(machine: str, least: float, most: float) -> None:
    """Held-out sizes: about two of three within one standard error, and the mean error of those that are said to be
    surer is smaller."""
    model = cost_model.load(machine)
    found = []
    for row in results_table.read(RESULTS / machine / "prediction.json").rows:
        # The fused kernels of h200x4 are others since they were measured.
        if row.case["kind"] not in ("choice", "layers", "fused", "leave"):
            us = predicted_us(model, row.case)
            if us is not None:
                found.append((abs(math.log(us / row.weave_us)), error_us_of(us) / us))
    within = fmean(off <= error for off, error in some(found))
    assert least <= within <= most, f"{within:.2f} of {len(found)}"
    ordered = sorted(found, key=lambda each: each[1])
    half = len(ordered) // 2
    surer, others = (fmean(off for off, _ in part) for part in (ordered[:half], ordered[half:]))
    assert surer < others, (surer, others)
