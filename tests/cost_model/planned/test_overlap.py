"""Two streams: by hand, against a simulation in small steps, and figures of the papers."""

from __future__ import annotations

import random

import pytest

from weaveopt.cost_model.planned.overlap import Demand, power_slowdown, reserved_slowdown, shared_slowdown, together


def test_shorter_then_longer_alone() -> None:
    """10 µs at half speed end at 20; of 30 µs at two thirds, 13.3 are done by then, and 16.7 follow alone."""
    found = together(10.0, 30.0, first_slowdown=2.0, second_slowdown=1.5)
    assert found.first_us == pytest.approx(20.0)
    assert found.second_us == pytest.approx(20.0 + 30.0 - 20.0 / 1.5)
    assert found.us == found.second_us
    assert found.saved_us == pytest.approx(40.0 - found.us)


def test_undisturbed_streams_take_the_longer() -> None:
    found = together(10.0, 30.0)
    assert (found.first_us, found.second_us, found.saved_us) == (10.0, 30.0, 10.0)


def test_a_kernel_of_no_length_disturbs_nobody() -> None:
    assert together(0.0, 30.0, 3.0, 3.0).us == 30.0
    assert together(30.0, 0.0, 3.0, 3.0).us == 30.0
    assert together(0.0, 0.0).us == 0.0


def test_halves_of_everything_save_nothing() -> None:
    assert together(10.0, 10.0, 2.0, 2.0).saved_us == pytest.approx(0.0)
    assert together(10.0, 30.0, 2.0, 2.0).saved_us == pytest.approx(0.0)
    assert together(10.0, 10.0, 3.0, 3.0).saved_us < 0


def _simulated(first_us: float, second_us: float, slowdowns: tuple[float, float]) -> tuple[float, float]:
    left, ends, step, now = [first_us, second_us], [0.0, 0.0], 0.001, 0.0
    while max(left) > 0:
        both = min(left) > 0
        now += step
        for stream in (0, 1):
            if left[stream] > 0:
                left[stream] -= step / slowdowns[stream] if both else step
                ends[stream] = now
    return ends[0], ends[1]


def test_as_simulated() -> None:
    generator = random.Random(3)
    for _ in range(20):
        first, second = generator.uniform(0.5, 5), generator.uniform(0.5, 5)
        slowdowns = generator.uniform(1, 3), generator.uniform(1, 3)
        found = together(first, second, *slowdowns)
        assert (found.first_us, found.second_us) == pytest.approx(_simulated(first, second, slowdowns), abs=0.01)


def test_order_does_not_matter() -> None:
    there, back = together(7.0, 4.0, 1.2, 1.9), together(4.0, 7.0, 1.9, 1.2)
    assert (there.first_us, there.second_us) == pytest.approx((back.second_us, back.first_us))


def test_resources_that_suffice_slow_nothing() -> None:
    gemm, copies = Demand(units=0.9, memory=0.4), Demand(units=0.06, memory=0.225, link=1.0)
    assert shared_slowdown(gemm, copies) == 1.0
    assert shared_slowdown(gemm, Demand(units=0.3)) == pytest.approx(1.2)


def test_the_scarcest_resource_decides() -> None:
    first, second = Demand(units=0.6, memory=0.9), Demand(units=0.6, memory=0.6, link=0.1)
    assert shared_slowdown(first, second) == pytest.approx(1.5)
    assert shared_slowdown(second, first) == pytest.approx(1.5)


def test_memory_taken_by_copies() -> None:
    """DWDP §A.1: NVLink takes 1.8 of 8 TB/s, 22.5 %, so a memory-bound kernel's rate falls by as much at worst.

    Table 1's category of such kernels, 241.69 to 284.32 µs (17.6 % longer), lies within that.
    """
    worst = reserved_slowdown(1.8 / 8)
    assert 1 - 1 / worst == pytest.approx(0.225)
    slowed_us = together(241.69, 1e9, first_slowdown=worst).first_us
    assert 241.69 < 284.32 <= slowed_us


def test_power_beyond_the_limit() -> None:
    """DWDP §A.2: 96.7 % + 30.5 % - 12.9 % = 114.4 % of the limit; attention took 1.19 times as long."""
    slowdown = power_slowdown(0.967, 0.305, 0.129)
    assert slowdown == pytest.approx(1.143, abs=1e-3)  # printed: 114.4 %
    assert slowdown == pytest.approx(320.56 / 269.67, rel=0.05)
    assert power_slowdown(0.6, 0.3, 0.129) == 1.0


def test_few_processors_for_communication() -> None:
    """TokenWeave §4.3: 2 to 8 of 132 SMs; a GEMM loses 6.5 % to eight of them."""
    assert reserved_slowdown(8 / 132) == pytest.approx(132 / 124)
    assert reserved_slowdown(0.0) == 1.0


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"1\.0"):
        reserved_slowdown(1.0)
