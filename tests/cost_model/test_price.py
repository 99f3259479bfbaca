"""Prices: arithmetic that carries what readings are off by."""

from __future__ import annotations

import math
import pickle

import pytest

from weaveopt.records.candidate import Estimate, Measured, Term, error_between_us
from weaveopt.records.price import Price, PriceSource, added, error_us_of, hypotenuse, source_of

MEASURED, INTERPOLATED, ESTIMATED = PriceSource.MEASURED, PriceSource.INTERPOLATED, PriceSource.ESTIMATED


def reading(us: float, name: str, error: float = 0.1, source: PriceSource = MEASURED) -> Price:
    return Price.read(us, name, error, source)


def test_independent_readings_add_as_squares_and_one_reading_adds_to_itself() -> None:
    a, b = reading(30.0, "a"), reading(40.0, "b")
    assert (a + b, (a + b).error_us) == (70.0, pytest.approx(5.0))
    assert (a + a).error_us == pytest.approx(6.0) and (2 * a).error_us == pytest.approx(6.0)
    assert (a - a).error_us == 0.0 and ((a + b) - a).error_us == pytest.approx(4.0)
    assert (a / 2 - 1.0, (a / 2).error_us) == (14.0, pytest.approx(1.5))
    assert (1.0 - a, (1.0 - a).error_us, (-a).error_us) == (-29.0, pytest.approx(3.0), pytest.approx(3.0))
    assert sum([a, b, a]) == 100.0 and error_us_of(sum([a, b, a])) == pytest.approx(math.hypot(6.0, 4.0))
    assert added([a, b, a, 1.0]) == 101.0 and added([a, b, a, 1.0]).error_us == pytest.approx(math.hypot(6.0, 4.0))
    assert max(a, b) is b and error_us_of(5.0) == 0.0 and source_of(5.0) is ESTIMATED


def test_a_sum_is_as_sure_as_its_least_sure_part() -> None:
    a, b = reading(1.0, "a"), reading(1.0, "b", source=INTERPOLATED)
    assert (a + b).source is INTERPOLATED and (a + b + reading(1.0, "c", source=ESTIMATED)).source is ESTIMATED
    assert (a + 0.0).source is MEASURED and added([]).source is PriceSource.TIMED
    assert a.with_error("more", lambda: 0.2, INTERPOLATED).source is INTERPOLATED
    assert a.with_error("more", lambda: 0.0, INTERPOLATED).source is MEASURED
    assert a.with_error("more", lambda: 0.2, INTERPOLATED).error_us == pytest.approx(math.hypot(0.1, 0.2))


def test_the_hypotenuse_counts_each_side_by_its_share() -> None:
    a, b = reading(3.0, "a"), reading(4.0, "b")
    assert hypotenuse(a, b) == 5.0
    assert error_us_of(hypotenuse(a, b)) == pytest.approx(math.hypot(0.3 * 3 / 5, 0.4 * 4 / 5))
    assert hypotenuse(0.0, 0.0) == 0.0 and type(hypotenuse(3.0, 4.0)) is float
    step = 1e-6
    for power in (2.0, 2.3, 4.0):
        slopes = [
            (hypotenuse(3.0 + step * (i == 0), 4.0 + step * i, power) - hypotenuse(3.0, 4.0, power)) / step
            for i in range(2)
        ]
        wanted = math.hypot(0.3 * slopes[0], 0.4 * slopes[1])
        assert error_us_of(hypotenuse(a, b, power)) == pytest.approx(wanted, rel=1e-4), power


def test_errors_are_asked_for_once_and_only_where_they_are_needed() -> None:
    asked = []

    def known() -> object:
        asked.append(1)
        return reading(1.0, "a").uncertainty

    price = Price(1.0, known)  # type: ignore[arg-type]
    total = price + price * 2 - 0.5
    assert total == 2.5 and not asked
    assert total.error_us == pytest.approx(0.3) and total.error_us and len(asked) == 1


def test_prices_travel_between_processes() -> None:
    price = reading(3.0, "a") + reading(4.0, "b")
    again = pickle.loads(pickle.dumps(price))
    assert again == price and again.errors == price.errors and again.source is price.source


def test_what_two_estimates_share_cancels_in_their_difference() -> None:
    gemm, exchange, fused = reading(300.0, "gemm"), reading(100.0, "nccl"), reading(60.0, "fused")
    before = Estimate((Term("gemm", gemm), Term("all_reduce", exchange)))
    after = Estimate((Term("gemm", gemm), Term("reduce", fused)))
    assert before.error_us == pytest.approx(math.hypot(30.0, 10.0))
    assert error_between_us(before, after) == pytest.approx(math.hypot(10.0, 6.0))
    assert error_between_us(before, before) == 0.0
    tiles = Estimate((Term("tiles", reading(340.0, "tiles", 0.02)),))
    assert error_between_us(before, tiles) > 30.0, "its GEMM is not the library's"
    timed = Estimate(after.terms, Measured(350.0, 0.02))
    assert error_between_us(before, timed) == pytest.approx(math.hypot(before.error_us, 7.0))
    assert before.plus(after).terms[0].error_us == pytest.approx(60.0)
