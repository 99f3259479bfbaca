"""The selection is the exhaustive best one, ties included, whatever depends on what; long chains take no time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from fractions import Fraction

import pytest

from weaveopt.solver.selection import EXCLUDED, JointCost, select

Costs = list[list[float]]


def exhaustive(costs: Costs, interactions: Sequence[JointCost]) -> tuple[int, ...]:
    """Best selection by trying all in exact arithmetic: least cost, fewest changes, earliest choices."""

    def key(choices: tuple[int, ...]) -> tuple[Fraction, int, tuple[int, ...]] | None:
        terms = [each.us(choices) for each in interactions]
        if EXCLUDED in terms:
            return None
        own = [row[choice] for row, choice in zip(costs, choices, strict=True)]
        changed = sum(choice != len(row) - 1 for row, choice in zip(costs, choices, strict=True))
        return sum(map(Fraction, [*own, *terms]), Fraction(0)), changed, choices

    keys = [key(choices) for choices in itertools.product(*(range(len(row)) for row in costs))]
    return min(each for each in keys if each is not None)[2]


def random_case(rng: random.Random, tied: bool) -> tuple[Costs, list[JointCost]]:
    """Up to seven sites; chains, trees, circles and tangles; pairs, triples, exclusions; `tied`: few distinct costs."""

    def us() -> float:
        return float(rng.randint(-2, 2)) if tied else rng.uniform(-9.0, 5.0) * 10 ** rng.randint(-9, 3)

    costs = [[*(us() for _ in range(rng.randint(0, 3))), 0.0] for _ in range(rng.randint(1, 7))]
    interactions = []
    for _ in range(rng.randint(0, 9)):
        sites = rng.sample(range(len(costs)), min(len(costs), rng.choice((1, 2, 2, 2, 3))))
        combinations = list(itertools.product(*(range(len(costs[site])) for site in sites)))
        # Nothing excludes leaving all sites as they are.
        changing = [
            c for c in combinations if any(choice < len(costs[s]) - 1 for s, choice in zip(sites, c, strict=True))
        ]
        terms = {c: rng.choice((us(), EXCLUDED)) for c in rng.sample(changing, rng.randint(0, len(changing)))}
        interactions.append(JointCost(tuple(sites), terms))
    return costs, interactions


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(250))
def test_it_is_the_exhaustive_best(seed: int, tied: bool) -> None:
    costs, interactions = random_case(random.Random(seed), tied)
    assert select(costs, interactions) == exhaustive(costs, interactions)


def test_no_site_and_sites_without_a_choice() -> None:
    assert select([]) == ()
    assert select([[0.0], [-1.0, 0.0], [0.0]]) == (0, 0, 0)


def test_rounding_breaks_no_tie() -> None:
    """In floating point 0.1 + 0.2 + 0.3 depends on the order; 2**-60 is lost in a sum with 1. Here neither happens."""
    costs = [[-0.1, 0.0], [-0.2, 0.0], [-0.3, 0.0]]
    apart = JointCost((0, 1, 2), {(0, 0, 0): 0.3 + 0.2 + 0.1})
    assert select(costs, [apart]) == exhaustive(costs, [apart])
    assert select([[-1.0, 0.0], [-1.0 - 2**-52, 0.0]], [JointCost((0, 1), {(0, 0): EXCLUDED})]) == (1, 0)


def test_ties_go_to_fewer_changes_then_to_the_earlier_site_and_choice() -> None:
    assert select([[0.0, 0.0]]) == (1,), "what saves nothing is left"
    assert select([[-1.0, -1.0, 0.0]]) == (0,)
    pair = JointCost((0, 1), {(0, 0): EXCLUDED})
    assert select([[-1.0, 0.0], [-1.0, 0.0]], [pair]) == (0, 1)
    one_or_two = [JointCost((0, 1), {(0, 0): EXCLUDED}), JointCost((1, 2), {(0, 0): EXCLUDED})]
    assert select([[-1.0, 0.0], [-2.0, 0.0], [-1.0, 0.0]], one_or_two) == (1, 0, 1)


def test_neighbours_may_pay_for_each_other() -> None:
    """A choice that costs by itself is taken where it spares its neighbours more."""
    spared = [JointCost((0, 1), {(0, 0): -5.0}), JointCost((1, 2), {(0, 0): -5.0})]
    assert select([[1.0, 0.0], [3.0, 0.0], [1.0, 0.0]], spared) == (0, 0, 0)
    assert select([[1.0, 0.0], [8.5, 0.0], [1.0, 0.0]], spared) == (1, 1, 1)


def test_long_chains_and_wide_tangles_take_no_time() -> None:
    """A ladder of 400 sites (two rules that exclude each other at 200 places of a chain), and 30 rivals."""
    rng = random.Random(0)
    costs = [[rng.uniform(-2, 1) for _ in range(4)] + [0.0] for _ in range(400)]
    every = list(itertools.product(range(4), range(4)))
    # Sites of one rule come first, then those of the other.
    ladder = [JointCost((i, i + 200), dict.fromkeys(every, EXCLUDED)) for i in range(200)]
    ladder += [JointCost((i, i + 1), {(c, c): -1.0 for c in range(4)}) for i in range(399) if i != 199]
    rivals = [JointCost(pair, dict.fromkeys(every, EXCLUDED)) for pair in itertools.combinations(range(30), 2)]
    start = time.perf_counter()
    choices = select(costs, ladder)
    (winner,) = (site for site, choice in enumerate(select(costs[:30], rivals)) if choice != 4)
    assert time.perf_counter() - start < 5.0
    assert all(choices[i] == 4 or choices[i + 200] == 4 for i in range(200)) and set(choices) != {4}
    assert min(costs[winner]) == min(min(row) for row in costs[:30])
