"""From samples to constants: what a made-up machine would have measured gives that machine back."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from weaveopt.cost_model.gemm import Gemm, modelled_us
from weaveopt.cost_model.machine import GemmCosts, GemmTile, Point
from weaveopt.measure import fit
from weaveopt.measure.cases import gemm_fit
from weaveopt.measure.cases.attention.library import AttentionCase, attention_costs, steps_of
from weaveopt.measure.cases.experts.grouped_gemm import GroupedCase, grouped_slowdown
from weaveopt.measure.cases.gemm_fit import Grid
from weaveopt.measure.clock import Sample, calm, sample_of

GRID = Grid((1, 16, 64, 128, 256, 512, 1024, 4096), (1024, 4096, 8192), (1024, 4096, 8192))


def test_a_curve_never_falls_and_keeps_its_mean() -> None:
    rows = [(1, 5.0), (2, 4.0), (4, 6.0), (8, 5.5), (16, 9.0)]
    points = fit.never_falling(rows)
    assert [point.bytes for point in points] == [size for size, _ in rows]
    assert all(before.us <= after.us for before, after in pairwise(points))
    assert [point.us for point in points] == [4.5, 4.5, 5.75, 5.75, 9.0]


def test_a_line_through_points_of_a_line_is_that_line() -> None:
    assert fit.line([(x, 6.0 + 3.2 * x) for x in (1, 2, 8, 64)]) == pytest.approx((6.0, 3.2))
    # A large relative error of a small point weighs as much as one of a large point.
    _, slope = fit.line([(1, 10.0), (2, 20.0), (1000, 9000.0)])
    assert 8.5 < slope < 10


def test_gemms_of_a_made_up_machine_are_predicted_between_its_samples() -> None:
    made_up = GemmCosts(
        "bfloat16", "made up", 2.0, 4e12, 132, tuple(GemmTile(m, n, 7e14) for m, n in gemm_fit.TILES), fill_us=1.0,
        last_wave=0.6, samples=None,
    )  # fmt: skip
    times = {corner: Sample(modelled_us(made_up, *corner), 0.01) for corner in GRID.corners}
    fitted = gemm_fit.tiled_gemms("bfloat16", "made up", 132, GRID, times)
    assert fitted == gemm_fit.tiled_gemms("bfloat16", "made up", 132, GRID, times), "the same samples, the same profile"
    assert fitted.samples is not None and fitted.samples.at(2, 1, 0) == pytest.approx(
        times[64, 4096, 1024].us, abs=1e-3
    )
    # The walk came close: without the samples it is within a fifth.
    plain = replace(fitted, samples=None)
    errors = [abs(modelled_us(plain, *corner) / sample.us - 1) for corner, sample in times.items()]
    assert sum(errors) / len(errors) < 0.2, errors


def test_attention_of_a_made_up_machine() -> None:
    def us(case: AttentionCase) -> float:
        if case.queries == 1:
            return 4 * case.batch * case.heads * case.keys * 128 / 4e6
        return 6.0 + (1.5 if case.causal else 3.0) * steps_of(case, 132)

    cases = [AttentionCase(1, heads, n, n, causal) for heads in (8, 16) for n in (256, 1024, 4096) for causal in (0, 1)]
    cases += [AttentionCase(32, 16, 1, 2048)]
    found = attention_costs("made up", 132, {case: Sample(us(case), 0.0) for case in cases})
    assert (found.launch_us, found.step_us, found.causal_step_us) == pytest.approx((6.0, 3.0, 1.5), rel=1e-3)
    assert found.bytes_per_s == pytest.approx(4e12, rel=1e-3)


def test_tiles_of_queries_go_in_waves() -> None:
    assert steps_of(AttentionCase(1, 16, 1024, 1024), 132) == 8, "128 tiles: one wave, eight steps"
    assert steps_of(AttentionCase(1, 17, 1024, 1024), 132) == 16, "136 tiles: two waves"
    assert steps_of(AttentionCase(1, 1, 1, 129), 132) == 2


def test_spread_is_of_the_quartiles_and_noise_is_measured_again() -> None:
    assert sample_of([1.0, 2.0, 3.0, 4.0, 5.0]) == Sample(3.0, pytest.approx(1.0))
    assert sample_of([10.0, 10.0, 10.0, 10.0, 99.0]).us == 10.0
    numbers = Random(0)
    efforts = []

    def noisy(effort: float) -> list[float]:
        efforts.append(effort)
        return [10.0 + (numbers.random() * 8 if effort == 1.0 else 0.1 * numbers.random()) for _ in range(9)]

    assert calm(noisy).spread < 0.02 and efforts == [1.0, 2.0]
    efforts.clear()
    assert calm(lambda effort: efforts.append(effort) or [5.0, 5.0, 5.0, 5.1]).us == 5.0
    assert efforts == [1.0]


def test_the_error_of_reading_between_points_is_half_of_bridging_one() -> None:
    straight = tuple(Point(1 << i, 2.0**i) for i in range(8))
    assert fit.between_error([straight]) == pytest.approx(0.0, abs=1e-12)
    bent = (*straight[:4], replace(straight[4], us=20.0), *straight[5:])
    assert 0.05 < fit.between_error([bent]) < 0.2
    assert fit.between_error([straight[:2]]) == 0.0


def test_times_that_stand_out_of_a_curve_are_measured_again() -> None:
    straight = [(1 << i, Sample(2.0**i, 0.0)) for i in range(6)]
    assert fit.suspects(straight) == []
    # Above the next one; and far above both neighbours, though below the larger.
    assert fit.suspects([*straight[:2], (4, Sample(9.0, 0.0)), *straight[3:]]) == [2]
    assert fit.suspects([*straight[:2], (4, Sample(6.0, 0.0)), *straight[3:]]) == [2]
    asked = []

    def again(index: int) -> Sample:
        asked.append(index)
        return straight[index][1]

    assert fit.calmed([*straight[:2], (4, Sample(9.0, 0.0)), *straight[3:]], again) == straight
    assert asked == [2]
    assert fit.calmed(straight, again) == straight and asked == [2]


def test_one_slow_case_makes_no_grouped_gemm_slow() -> None:
    pairs = [(Sample(us, 0.0), Sample(100.0, 0.0)) for us in (110.0, 120.0, 130.0, 125.0, 900.0)]
    assert grouped_slowdown(pairs) == 1.25
    case = GroupedCase(8, 512, 4096, 7168)
    assert case.one == Gemm(64, 4096, 8 * 7168), "each expert gets some of so many"
