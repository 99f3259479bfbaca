"""Ranks that die, stop, differ or are short of something: the right result or one clear error on every rank, in bounded
time, and nothing remains. `docs/faults.md` is the table of what they said.

Another part of the combinations: FAULT_SEED=7000 FAULT_COMBINATIONS=500. One of them, with what every rank says:
`python -m tests.faults.run --random 1 --seed SEED`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.faults.case import Case, Moment, Outcome
from tests.faults.chosen import every_fault, random_case
from tests.faults.faults import FAULTS
from tests.faults.judge import complaints
from tests.faults.pool import Pool
from tests.faults.table import PAGE, rows_start
from tests.ranks.simulated import TEST_ALL

DEFAULT_SEED = 2000
FIRST_SEED = int(os.environ.get("FAULT_SEED", str(DEFAULT_SEED)))
NUM_COMBINATIONS = int(os.environ.get("FAULT_COMBINATIONS", "80" if TEST_ALL else "40"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    left = pool.close()
    assert not left, f"temporary files are left: {left}"


@pytest.fixture(scope="module")
def outcomes(pool: Pool) -> list[tuple[Case, Outcome]]:
    """Outcomes of every fault at each of its moments; several cases run at a time."""
    return list(pool.run(list(every_fault())))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault: str, outcomes: list[tuple[Case, Outcome]]) -> None:
    found = [(case, outcome) for case, outcome in outcomes if case.fault == fault]
    moments = {case.moment for case, _ in found}
    assert moments == {*FAULTS[fault].moments} - {Moment.ANY}, "a moment is not tested"
    wrong = [f"{case.name}:\n  {text}" for case, outcome in found for text in complaints(case, outcome)]
    assert not wrong, "\n".join(wrong)


def test_random_combinations(pool: Pool) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + NUM_COMBINATIONS)
    seed_of = {random_case(seed): seed for seed in seeds}
    print(f"seeds {seeds.start} to {seeds.stop - 1}")
    wrong = [
        f"seed {seed_of[case]}: {case.name}:\n  {text}"
        for case, outcome in pool.run([random_case(seed) for seed in seeds])
        for text in complaints(case, outcome)
    ]
    assert not wrong, "\n".join(wrong)


def test_random_combinations_reach_every_fault_and_moment() -> None:
    cases = [random_case(seed) for seed in range(DEFAULT_SEED, DEFAULT_SEED + 200)]
    assert {case.fault for case in cases} == set(FAULTS)
    assert {case.moment for case in cases} == set(Moment)
    assert {case.world for case in cases} == {2, 3, 4}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_documented(fault: str) -> None:
    lines = PAGE.read_text().splitlines()
    found = [line for line in lines if line.startswith(rows_start(fault))]
    assert found and FAULTS[fault].how in found[0], f"python -m tests.faults.table writes the rows of {fault!r}"
