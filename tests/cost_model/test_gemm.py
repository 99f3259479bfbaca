"""GEMMs: waves of tiles, K-loops that are split, and samples that correct what tiles cannot know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.gemm import Gemm, modelled_us
from weaveopt.cost_model.machine import GemmCosts, GemmTile, Samples

ONE_TILE = GemmCosts("bfloat16", "made up", 2.0, 4e12, 132, (GemmTile(128, 128, 7e14),), fill_us=1.0, last_wave=1.0)
WHOLE = replace(ONE_TILE, fill_us=0.0)
"""Without a cost of filling, no loop is split."""
BASE = cost_model.load("h100x8")


def us(costs: GemmCosts, m: int, n: int, k: int) -> float:
    return cost_model.gemm_us(replace(BASE, gemms=(costs,)), Gemm(m, k, n), "bfloat16")


def test_time_goes_by_whole_waves() -> None:
    # 12 x 11 tiles of 128 x 128 are one wave, one more column of tiles is another.
    one, more, two = (us(WHOLE, *sides, 8192) for sides in ((1536, 1408), (1536, 1409), (3072, 1408)))
    assert more == pytest.approx(two, rel=0.01) and two > 1.8 * one


def test_a_last_wave_of_few_tiles_takes_its_share() -> None:
    partly = replace(WHOLE, last_wave=0.5)
    one, more, two = (us(partly, *sides, 8192) for sides in ((1536, 1408), (1536, 1409), (3072, 1408)))
    # 12 tiles on 132 processors: half a wave, and half of an eleventh.
    assert (more - one) / (two - one) == pytest.approx(0.5 + 0.5 / 11, rel=0.01)


def test_short_loops_pay_the_fill_of_every_wave() -> None:
    free = replace(ONE_TILE, fill_us=1e-6)
    short, long = (us(ONE_TILE, 4096, 8192, k) / us(free, 4096, 8192, k) for k in (256, 8192))
    assert short > 1.2 and long < 1.05


def test_few_tiles_share_a_long_loop() -> None:
    split = us(ONE_TILE, 128, 1024, 16384)  # 8 tiles on 132 processors
    alone = 2.0 + 1.0 + 2 * 128 * 128 * 132 * 16384 / 7e14 * 1e6
    assert split < 0.5 * alone


def sampled(factor: float) -> GemmCosts:
    """`ONE_TILE` on a machine that takes `factor` of its time at one corner."""
    axes = ((128, 1024), (1024, 8192), (1024, 8192))
    corners = [(m, n, k) for n in axes[1] for k in axes[2] for m in axes[0]]
    plain = replace(ONE_TILE, samples=Samples(*axes, (1.0,) * 8))
    times = [modelled_us(plain, *corner) * (factor if corner == (1024, 8192, 8192) else 1.0) for corner in corners]
    return replace(plain, samples=Samples(*axes, tuple(times)))


def test_corners_are_hit_and_between_them_the_error_is_interpolated() -> None:
    costs = sampled(1.5)
    plain = replace(costs, samples=Samples((1,), (1,), (1,), (0.0,)))
    assert us(costs, 1024, 8192, 8192) == pytest.approx(1.5 * us(plain, 1024, 8192, 8192))
    assert us(costs, 128, 1024, 1024) == pytest.approx(us(plain, 128, 1024, 1024))
    # Half of the way along log m: half of the logarithm of 1.5.
    between = us(costs, 362, 8192, 8192) / us(plain, 362, 8192, 8192)
    assert between == pytest.approx(1.5**0.5, rel=0.01)
    # Beyond the grid its edge holds.
    assert us(costs, 4096, 8192, 8192) == pytest.approx(1.5 * us(plain, 4096, 8192, 8192))


def test_corners_that_were_not_measured_leave_their_share_to_the_others() -> None:
    costs = sampled(1.5)
    assert costs.samples is not None
    holes = tuple(0.0 if i % 2 == 0 else time for i, time in enumerate(costs.samples.us))  # every m of 128
    costs = replace(costs, samples=replace(costs.samples, us=holes))
    plain = replace(costs, samples=Samples((1,), (1,), (1,), (0.0,)))
    assert us(costs, 362, 8192, 8192) == pytest.approx(1.5 * us(plain, 362, 8192, 8192))
