"""Times of local kernels that spread widely on some rank: the profile's price stands, on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.autotune.test_tune import BASE, TOY, WIDTH, FakeClock, choice, compiled_chain
from tests.ranks import run_ranks
from weaveopt.records.candidate import LEAVE


def _unsteady(rank: int, folder: str) -> list[tuple[str, str, int]]:
    found = []
    for spread in (0.02, 3.0):
        clock = FakeClock({WIDTH: 90000.0}, spread=spread if rank else 0.02)
        for _ in range(2):  # the second one reads what the first one stored
            report = compiled_chain(clock, replace(BASE, tune_cache=f"{folder}/{spread}"))
            found.append((choice(report), report.tuned, len(report.kernels)))
        assert clock.num_calls == 1
    return found


def test_times_that_spread_widely_on_one_rank_decide_nothing(tmp_path: Path) -> None:
    """The toy is timed as slow. A time that says little is worth no more than the profile's price."""
    first, second = run_ranks(_unsteady, 2, str(tmp_path))
    assert [(chosen, kernels) for chosen, _, kernels in first] == [(chosen, kernels) for chosen, _, kernels in second]
    (steady, line, kernels), again, (unsteady, other_line, none), other_again = first
    assert steady == again[0] == LEAVE and kernels == again[2] > 0 and "spread" not in line
    assert unsteady == other_again[0] == TOY and none == other_again[2] == 0
    assert f"{kernels} left to the profile: times that spread so wide are less sure than it" in other_line
