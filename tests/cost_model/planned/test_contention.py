"""Ranks that pull from one source at once: Table 2 of the DWDP paper, digit by digit, and a simulation."""

from __future__ import annotations

import random
from decimal import Decimal
from itertools import product as combinations

import pytest

from weaveopt.cost_model.planned.contention import (
    contention_at_least,
    contention_probabilities,
    pull_slowdown,
    slowed_slices,
)

TABLE_2 = {
    3: "50.00 50.00",
    4: "44.44 44.44 11.11",
    6: "40.96 40.96 15.36 2.56 0.16",
    8: "39.66 39.66 16.52 3.67 0.46 0.03 0.00085",
    12: "38.55 38.55 17.35 4.63 0.81 0.097 0.0081 0.00046 0.000017 3.86E-7 3.86E-9",
    16: "38.06 38.06 17.67 5.05 0.99 0.14 0.015 0.0012 0.000077 3.69E-6 1.32E-7 3.42E-9 6.11E-11 6.71E-13 3.43E-15",
}
"""DWDP Table 2: percentages by number of ranks, as printed."""


@pytest.mark.parametrize("ranks", TABLE_2)
def test_table_2(ranks: int) -> None:
    """Every entry, rounded to the digits that are printed."""
    printed = [Decimal(entry) for entry in TABLE_2[ranks].split()]
    found = contention_probabilities(ranks)
    assert len(found) == len(printed)
    for probability, entry in zip(found, printed, strict=True):
        unit = Decimal(1).scaleb(int(entry.as_tuple().exponent))
        assert (Decimal(probability) * 100).quantize(unit) == entry


@pytest.mark.parametrize("ranks", [2, *TABLE_2, 72])
def test_probabilities_add_up(ranks: int) -> None:
    found = contention_probabilities(ranks)
    assert sum(found) == pytest.approx(1.0)
    assert contention_at_least(ranks, 1) == pytest.approx(1.0)
    assert contention_at_least(ranks, ranks) == 0.0


def test_two_ranks_never_meet() -> None:
    assert contention_probabilities(2) == (1.0,)
    assert contention_probabilities(1) == ()
    for ranks in (1, 2):
        assert pull_slowdown(ranks) == pull_slowdown(ranks, num_in_flight=2) == 1.0


@pytest.mark.parametrize("ranks", TABLE_2)
def test_serial_slowdown(ranks: int) -> None:
    """§4.3.1: `C τ` a pull, so `E[C] = 1 + (N - 2) / (N - 1)`; with Table 2's own digits, within their rounding."""
    assert pull_slowdown(ranks) == pytest.approx(1 + (ranks - 2) / (ranks - 1))
    printed = [float(entry) / 100 for entry in TABLE_2[ranks].split()]
    assert pull_slowdown(ranks) == pytest.approx(
        sum(degree * share for degree, share in enumerate(printed, 1)), abs=5e-4
    )


@pytest.mark.parametrize("ranks", TABLE_2)
@pytest.mark.parametrize("num_in_flight", [2, 3])
def test_sliced_slowdown_by_enumeration(ranks: int, num_in_flight: int) -> None:
    """§4.3.2: slower "only when both in-flight slices simultaneously encounter contention degree at least 3"."""
    degrees = list(enumerate(contention_probabilities(ranks), 1))
    expected, slowed = 0.0, 0.0
    for drawn in combinations(degrees, repeat=num_in_flight):
        share = 1.0
        for _, probability in drawn:
            share *= probability
        least = min(degree for degree, _ in drawn)
        expected += share * max(1.0, least / num_in_flight)
        slowed += share * (least > num_in_flight)
    assert pull_slowdown(ranks, num_in_flight) == pytest.approx(expected)
    assert slowed_slices(ranks, num_in_flight) == pytest.approx(slowed)


def test_slices_of_four_ranks() -> None:
    """Table 2: C = 3 has 11.11 %, so both slices meet it with 1.23 %."""
    assert slowed_slices(4) == pytest.approx(0.1111**2, rel=1e-3)


@pytest.mark.parametrize("ranks", [3, 4, 6, 8, 12, 16, 72])
def test_slicing_helps_and_larger_groups_contend_more(ranks: int) -> None:
    """§4.3.1: "larger DWDP groups naturally face a higher chance of many-to-one communication contention"."""
    slowdowns = [pull_slowdown(ranks, in_flight) for in_flight in (1, 2, 4)]
    assert slowdowns == sorted(slowdowns, reverse=True)
    assert slowdowns[-1] >= 1.0 and slowdowns[0] < 2.0
    assert pull_slowdown(ranks) < pull_slowdown(ranks + 1)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_random_pulls(ranks: int) -> None:
    """Ranks that each choose a peer at random, counted; rank 0 is the tagged one."""
    generator = random.Random(ranks)
    rounds = 20000
    seen = [0] * ranks
    for _ in range(rounds):
        chosen = [generator.choice([peer for peer in range(ranks) if peer != rank]) for rank in range(ranks)]
        source = chosen[0]
        seen[sum(each == source for each in chosen)] += 1
    for degree, probability in enumerate(contention_probabilities(ranks), 1):
        assert seen[degree] / rounds == pytest.approx(probability, abs=0.015)
