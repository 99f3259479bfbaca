"""The timeline of a graph: places and anchors by hand, exposed time, and sums bit by bit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.machine import Contention, ContentionRow, CopyContention
from weaveopt.pipeline.timeline import Placed, Timeline, in_program_order, timeline
from weaveopt.records.task import Stream, Task

COMMUNICATION, COPIES = Stream.COMMUNICATION, Stream.COPIES
ORDER = {name: index for index, name in enumerate("abcdefgh")}
NOBODY = cost_model.load("h100x8")
FREE = replace(NOBODY, contention=Contention("contention", (ContentionRow(8, 1.0, 1.0),), 8, CopyContention(1.0, 1.0)))
"""A machine on which nothing slows anything down, and that this was measured of."""


def made(*places: Placed, machine: cost_model.Machine = FREE) -> Timeline:
    return timeline(places, ORDER, machine)


def kernel(at: str, us: float) -> Placed:
    return Placed(ORDER[at], (Task(us),))


def exchange(at: str, us: float, ends_before: str) -> Placed:
    return Placed(ORDER[at], (Task(us, COMMUNICATION, ctas=8, ends_before=ends_before),))


def test_a_collective_runs_until_its_first_reader() -> None:
    """b is enqueued at 10 and takes until 17; c and d run meanwhile, until 16; e waits for it."""
    found = made(kernel("a", 10.0), exchange("b", 7.0, "e"), kernel("c", 2.0), kernel("d", 4.0), kernel("e", 1.0))
    assert found.us == 18.0 and found.exposed_us == pytest.approx(1.0)
    at_once = made(kernel("a", 10.0), exchange("b", 7.0, "c"), kernel("c", 2.0))
    assert at_once.us == 19.0 and at_once.exposed_us == pytest.approx(7.0)


def test_tasks_of_one_blocking_call_overlap_with_each_other_alone() -> None:
    chunks = (Task(4.0), Task(3.0, COMMUNICATION, (0,), ctas=8), Task(4.0), Task(3.0, COMMUNICATION, (2,), ctas=8))
    found = made(kernel("a", 1.0), Placed(ORDER["b"], chunks), kernel("c", 5.0))
    assert found.us == 1.0 + 11.0 + 5.0, "what follows waits for the last exchange"


def test_work_begins_ahead_of_its_site() -> None:
    fetch = Task(9.0, COPIES, begins_after="b")
    site = Placed(ORDER["e"], (Task(0.5), fetch, Task(2.0, waits_for=(0, 1))))
    found = made(kernel("a", 1.0), kernel("b", 3.0), kernel("c", 6.0), kernel("d", 5.0), site, kernel("f", 1.0))
    assert found.us == 1.0 + 3.0 + 6.0 + 5.0 + 0.5 + 2.0 + 1.0 and found.exposed_us == 0.0
    begun = found.schedule.intervals[found.tasks.index(next(t for t in found.tasks if t.stream is COPIES))]
    assert (begun.start_us, begun.end_us) == (4.0, 13.0)
    late = made(kernel("a", 1.0), kernel("b", 3.0), site)
    assert late.us == 1.0 + 3.0 + 9.0 + 2.0 and late.exposed_us == pytest.approx(8.5)


def test_two_halves_hide_each_others_exchanges() -> None:
    halves = (
        kernel("a", 5.0), exchange("b", 4.0, "e"), kernel("c", 5.0), exchange("d", 4.0, "f"), kernel("e", 5.0),
        kernel("f", 5.0),
    )  # fmt: skip
    assert made(*halves).us == 20.0 and made(*halves).exposed_us == 0.0
    unknown = made(*halves, machine=NOBODY)
    assert unknown.schedule.not_measured and (unknown.us, unknown.upper.us) == (20.0, 28.0)


@pytest.mark.parametrize("seed", range(20))
def test_without_overlap_it_is_the_sum_bit_by_bit(seed: int) -> None:
    numbers = Random(seed)
    places, total = [], 0.0
    for name in "abcdefg":
        us = numbers.uniform(0.01, 1e4)
        total += us
        following = "abcdefgh"[ORDER[name] + 1]
        places.append(kernel(name, us) if numbers.random() < 0.6 else exchange(name, us, following))
    for machine in (FREE, NOBODY):
        found = made(*places, machine=machine)
        assert found.us == found.upper.us == total and not found.schedule.not_measured


def test_places_may_come_in_any_order() -> None:
    places = [kernel("a", 1.0), exchange("b", 2.0, "d"), kernel("c", 3.0), kernel("d", 4.0)]
    wanted = tuple(in_program_order(places, ORDER))
    assert wanted == tuple(in_program_order(places[::-1], ORDER))
    assert [task.waits_for for task in wanted] == [(), (0,), (), (1,)]
