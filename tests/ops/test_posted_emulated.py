"""The posted kernel of all_reduce_norm: its own source, on emulated ranks that share memory of the host.

What ranks write to each other arrives late and in any order, in pieces of 8 bytes, but for releases; a load from
another rank's arena is an error, and so is a state that is kept in an arena.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulation.posted_emulated import MISTAKES, Case, difference, run


def expect_right(case: Case) -> None:
    made, wrong = run(case)
    assert not wrong, f"{case}: {wrong}"
    assert not difference(case, made), f"{case}: {difference(case, made)}"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_calls_in_a_row(world: int) -> None:
    for seed in range(2):
        expect_right(Case(world, (3, 7, 1, 8), seed=seed))


@pytest.mark.parametrize(
    "case",
    [
        Case(2, (1, 1, 1, 1)),
        Case(2, (9, 4), bf16=False, hidden=40),
        Case(2, (6, 5), sum_out="none"),
        Case(2, (6, 5), sum_out="whole"),
        Case(3, (7, 2), sum_out="whole", wide_out=True),
        Case(2, (5, 6), norm="none", sum_out="sharded"),
        Case(3, (5, 4), norm="none", sum_out="whole", residual=False),
        Case(2, (5, 3), norm="layer", residual=False),
        Case(2, (4, 3), post="rms", sum_out="whole"),
        Case(2, (13, 12), rows_a_unit=3, num_ctas=2),
        Case(3, (20, 7), rows_a_unit=2, num_ctas=1, vecs=2),
        Case(2, (4,), hidden=2048, num_ctas=1),
        Case(8, (9, 3), hidden=8, num_ctas=1),
    ],
    ids=str,
)
def test_shapes(case: Case) -> None:
    for seed in range(2):
        expect_right(replace(case, seed=seed))


def test_a_rank_at_another_site_is_told() -> None:
    _, wrong = run(Case(3, (4, 4), other_site=1))
    assert "differs from rank" in wrong, wrong


def test_a_rank_that_does_not_come_is_told() -> None:
    _, wrong = run(Case(3, (4, 4), absent_rank=2))
    assert "waits in vain for rank 2" in wrong, wrong


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str) -> None:
    """Each of these lines is needed: the tests fail without it."""
    found = 0
    for seed in range(12):
        case = Case(3, (7, 5, 6, 7), hidden=520, seed=seed, sum_out="whole")
        made, failed = run(case, mistake)
        found += bool(failed) or bool(difference(case, made))
        if found:
            break
    assert found, mistake
