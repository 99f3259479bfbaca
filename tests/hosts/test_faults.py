"""Links that are cut, hosts that are late, killed or lost, and strangers at the door.

The right result or one clear error on every rank, in bounded time, and nothing left. `docs/faults.md` has the table of
what was said.

One of them, with what every rank says: `python -m tests.hosts.run host killed`.
"""

from __future__ import annotations

import pytest

from tests.emulation.emulated_hosts import Link, missing
from tests.hosts.faults import FAULTS
from tests.hosts.judge import Outcome, complaints, outcomes
from tests.hosts.table import BEGIN, PAGE, rows_start

AT_ONCE = 4


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    if why := missing(Link(), changing=True):
        pytest.skip(why)
    return list(outcomes(FAULTS, AT_ONCE))


def came_late(outcome: Outcome) -> bool:
    """True if strangers connected to fewer ranks than there are."""
    visits, _ = outcome.strangers
    return FAULTS[outcome.case.fault].stranger is not None and visits < outcome.case.world


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault: str, found: list[Outcome]) -> None:
    of_fault = [outcome for outcome in found if outcome.case.fault == fault]
    assert len(of_fault) == len(FAULTS[fault].shapes)
    shapes = [f"{outcome.case.hosts} hosts x {outcome.case.ranks_per_host}" for outcome in of_fault]
    if any(came_late(each) for each in of_fault):
        # On a busy host strangers find listeners that have served their turn: once more, with nothing else at a time.
        of_fault = list(outcomes((fault,), 1))
    wrong = [f"{shape}: {text}" for shape, each in zip(shapes, of_fault, strict=True) for text in complaints(each)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_documented(fault: str) -> None:
    lines = PAGE.read_text().partition(BEGIN)[2].splitlines()
    rows = [line for line in lines if line.startswith(rows_start(fault))]
    assert len(rows) == 1 and FAULTS[fault].how in rows[0], f"python -m tests.hosts.table writes the row of {fault!r}"
