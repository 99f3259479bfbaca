"""The kernels that dispatch rows to their experts and combine the results: their own source, on emulated ranks.

What ranks write to each other arrives late and in any order, in pieces of 8 bytes, and calls follow one another. A
release arrives after what it orders, and nothing else does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.emulation.sharded_emulated import MISTAKES, Case, run


def expect_right(case: Case) -> None:
    made, wrong = run(case)
    assert not wrong, f"{case}: {wrong}"
    for at, (got, want) in enumerate(zip(made.out, made.wanted, strict=True)):
        assert torch.equal(got, want), f"{case}: call {at // case.world}, rank {at % case.world}"
    assert made.counted == made.moved, case


def even(world: int, *tokens: int) -> tuple[tuple[int, ...], ...]:
    return tuple((count,) * world for count in tokens)


@pytest.mark.parametrize("routing", ["uniform", "last rank", "first expert", "some foreign", "all foreign"])
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_calls_in_a_row(world: int, routing: str) -> None:
    for seed in range(2):
        expect_right(Case(even(world, 3, 7, 1, 7), routing=routing, seed=seed))


@pytest.mark.parametrize(
    "case",
    [
        Case(even(2, 5, 2, 9), choices=1, num_experts=1, hidden=8),
        Case(even(4, 3, 3), choices=35, num_experts=2, hidden=16),
        Case(even(2, 3, 1, 2), choices=6, hidden=1000, parts=4),
        Case(even(3, 9, 4), hidden=264, num_ctas=1, cta_threads=128, parts=2),
        Case(even(2, *[2, 3] * 8), hidden=64),
        Case(((0, 5), (3, 0), (0, 0), (4, 4)), slot_tokens=(5, 5, 5, 5), routing="last rank"),
        Case(((1, 6, 0), (2, 2, 6)), slot_tokens=(6, 6)),
        # Room for the rank that has most, as ranks with batches of their own have it: some push into a larger slot
        # than in the call before, some into a smaller one, and where it is 0 no kernel would run at all.
        Case(((1, 6, 0), (9, 2, 2), (0, 0, 1), (3, 0, 7)), hidden=40, routing="last rank"),
        Case(((8, 1), (0, 1), (2, 5), (0, 0), (1, 0)), choices=3, num_ctas=3),
    ],
    ids=lambda case: f"{case.tokens[0]} of {case.hidden}, {case.choices} choices",
)
def test_shapes(case: Case) -> None:
    for seed in range(3):
        expect_right(replace(case, seed=seed))


def test_a_rank_at_another_site_is_told() -> None:
    _, wrong = run(Case(even(3, 2, 2), other_site=1))
    assert "differs from rank" in wrong, wrong


def test_a_rank_that_does_not_come_is_told() -> None:
    _, wrong = run(Case(even(3, 2, 2), absent_rank=2))
    assert "waits in vain for rank 2" in wrong, wrong


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str) -> None:
    """Each of these lines is needed: the tests fail without it."""
    found = 0
    for seed in range(12):
        made, failed = run(Case(even(3, 6, 5, 6), hidden=520, seed=seed, num_ctas=3), mistake)
        found += bool(failed) or any(not torch.equal(*each) for each in zip(made.out, made.wanted, strict=True))
    assert found, mistake
