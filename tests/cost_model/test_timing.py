"""Which candidates are worth timing, and for which token counts a time stands."""

from __future__ import annotations

from weaveopt.cost_model.timing import LEAST_ERROR, MOST_TIMED, Runner, error_of, nearest, shortlist


def test_the_best_of_every_system_runs_however_dear_it_is_said() -> None:
    runners = [Runner("shm", 10.0), Runner("tcp", 1e6), Runner("shm", 12.0), Runner("shm", 11.0, error_us=1.5)]
    assert shortlist(runners) == (0, 3, 1), "shm at 12 us is beyond the error of the best"
    assert shortlist([]) == ()


def test_what_the_model_cannot_tell_apart_runs_up_to_a_handful() -> None:
    close = [Runner("peer", 10.0 + index / 10, 1.0) for index in reversed(range(9))]
    assert shortlist(close) == (8, 7, 6, 5)
    others = [Runner(f"system {index}", 100.0 + index) for index in range(3)]
    taken = shortlist([*close, *others])
    assert len(taken) == MOST_TIMED and taken == (8, 9, 10, 11), "systems come before forms of one"


def test_the_nearest_count_stands_for_others_within_a_factor() -> None:
    assert nearest((8, 64, 512), 100) == 64
    assert nearest((8, 64, 512), 128) == 64 and nearest((8, 64, 512), 129) is None
    assert nearest((50, 200), 100) == 50, "of two equally near the smaller one, on all ranks"


def test_a_median_varies_by_less_than_what_it_is_the_median_of() -> None:
    assert error_of(0.0) == LEAST_ERROR < error_of(0.4) < 0.4
