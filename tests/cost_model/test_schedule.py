"""Tasks on streams: known schedules, and random ones against a clock that ticks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from weaveopt import cost_model
from weaveopt.cost_model import Interval, Schedule, library_ctas, measured_contention, schedule
from weaveopt.cost_model.machine import Contention, ContentionRow
from weaveopt.cost_model.schedule import contention_row
from weaveopt.records.task import Stream, Task

COMPUTE, COMMUNICATION, COPIES = Stream.COMPUTE, Stream.COMMUNICATION, Stream.COPIES


def schedule_streams(tasks: list[Task], compute: float = 1.0, communication: float = 1.0) -> Schedule:
    """Schedule in which every two streams have these factors, copies that of communication."""
    factors = {COMPUTE: compute, COMMUNICATION: communication, COPIES: communication}
    return schedule(tasks, lambda a, b: (factors[a.stream], factors[b.stream]))


def ends(found: Schedule) -> list[float]:
    return [each.end_us for each in found.intervals]


def test_nothing_takes_no_time() -> None:
    assert schedule_streams([]) == Schedule(())
    assert schedule_streams([]).us == 0.0
    assert schedule_streams([Task(0.0), Task(0.0, COMMUNICATION, (0,))]).us == 0.0


def test_streams_overlap_and_slow_each_other_down_while_both_are_busy() -> None:
    tasks = [Task(10.0), Task(30.0, COMMUNICATION)]
    assert schedule_streams(tasks) == Schedule((Interval(0.0, 10.0), Interval(0.0, 30.0)))
    # Until 20 both run, the second at two thirds of its speed; its other 16.67 us run alone.
    assert ends(schedule_streams(tasks, 2.0, 1.5)) == pytest.approx([20.0, 20.0 + 30.0 - 20.0 / 1.5])


def test_a_task_waits_for_those_before_it_on_its_stream_and_for_those_it_reads() -> None:
    tasks = [Task(5.0), Task(7.0, COMMUNICATION, (0,)), Task(4.0), Task(1.0, waits_for=(1,)), Task(2.0, COMMUNICATION)]
    assert [(each.start_us, each.end_us) for each in schedule_streams(tasks).intervals] == [
        (0.0, 5.0), (5.0, 12.0), (5.0, 9.0), (12.0, 13.0), (12.0, 14.0),
    ]  # fmt: skip


def test_a_task_of_no_length_disturbs_nobody() -> None:
    tasks = [Task(10.0), Task(3.3), Task(0.0, COMMUNICATION), Task(0.0, COMMUNICATION, (0,))]
    assert schedule_streams(tasks, 2.0, 2.0).us == 10.0 + 3.3


@pytest.mark.parametrize("seed", range(40))
def test_without_overlap_the_makespan_is_the_sum_bit_by_bit(seed: int) -> None:
    numbers = Random(seed)
    tasks = [
        Task(numbers.choice((0.0, numbers.uniform(0.01, 1e4))), numbers.choice(list(Stream)), (i - 1,) if i else ())
        for i in range(60)
    ]
    total = 0.0
    for task in tasks:
        total += task.us
    found = schedule_streams(tasks, 1.3, 1.7)
    assert found.us == total
    assert all(a.end_us == b.start_us for a, b in zip(found.intervals, found.intervals[1:], strict=False))
    one_stream = [replace(task, stream=COMPUTE, waits_for=()) for task in tasks]
    assert schedule_streams(one_stream, 1.3, 1.7).us == total


def ticked(tasks: list[Task], factors: dict[Stream, float], tick_us: float) -> list[float]:
    """Ends by brute force: in every tick each stream's head gets on by a tick, or by less while others are busy."""
    left = [task.us for task in tasks]
    done_at: list[float | None] = [None if task.us > 0 else -1.0 for task in tasks]
    ticks = 0
    while None in done_at:
        heads = {}
        for stream in Stream:
            queue = [i for i, task in enumerate(tasks) if task.stream is stream and done_at[i] is None]
            if queue and all(done_at[other] is not None for other in tasks[queue[0]].waits_for):
                heads[stream] = queue[0]
        ticks += 1
        for stream, head in heads.items():
            left[head] -= tick_us / factors[stream] ** (len(heads) - 1)
            if left[head] <= 0:
                done_at[head] = ticks * tick_us
    return [0.0 if end is None else end for end in done_at]


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_are_those_of_a_ticking_clock(seed: int) -> None:
    numbers, tick_us = Random(seed), 1e-3
    count = numbers.randint(2, 12)
    tasks = [
        Task(
            numbers.uniform(0.2, 3.0),
            numbers.choice(list(Stream)),
            tuple(sorted(numbers.sample(range(i), min(i, numbers.choice((0, 0, 1, 2)))))),
        )
        for i in range(count)
    ]
    factors = {COMPUTE: numbers.uniform(1, 2), COMMUNICATION: numbers.uniform(1, 2)}
    factors[COPIES] = factors[COMMUNICATION]
    found = schedule_streams(tasks, factors[COMPUTE], factors[COMMUNICATION])
    assert ends(found) == pytest.approx(ticked(tasks, factors, tick_us), abs=2 * count * tick_us)
    for stream in Stream:
        own = [each for each, task in zip(found.intervals, tasks, strict=True) if task.stream is stream]
        assert all(a.end_us <= b.start_us for a, b in itertools.pairwise(own))
    for each, task in zip(found.intervals, tasks, strict=True):
        assert all(found.intervals[other].end_us <= each.start_us for other in task.waits_for)
        assert task.us - 1e-9 <= each.end_us - each.start_us <= task.us * max(factors.values()) ** 2 + 1e-9
    assert schedule_streams(tasks).us <= found.us + 1e-9


def test_what_cannot_be_is_refused() -> None:
    for tasks in ([Task(1.0, waits_for=(0,))], [Task(1.0), Task(1.0, waits_for=(2,))], [Task(-1.0)]):
        with pytest.raises(AssertionError):
            schedule_streams(tasks)
    with pytest.raises(AssertionError, match="contention"):
        schedule_streams([Task(1.0), Task(1.0, COMMUNICATION)], 0.5)


def test_contention_is_that_of_the_row_nearest_to_the_ctas() -> None:
    rows = (ContentionRow(8, 1.4, 1.2), ContentionRow(16, 1.6, 1.3), ContentionRow(32, 1.9, 1.4))
    machine = replace(cost_model.load("h200x4"), contention=Contention("contention", rows))
    assert contention_row(machine, 8) == rows[0]
    assert contention_row(machine, 11) == rows[0]
    assert contention_row(machine, 12) == rows[1], "12 is nearer to 16 than to 8, by ratio"
    assert contention_row(machine, 33) is None, "no GEMM was measured beside so many"
    assert contention_row(machine, 0) is None, "as many CTAs as fit leave a GEMM none"
    assert contention_row(replace(machine, contention=None), 8) is None
    tie = Contention("contention", (ContentionRow(12, 1.1, 1.2), ContentionRow(48, 1.3, 1.4)))
    assert contention_row(replace(machine, contention=tie), 24) == tie.rows[1]


def test_the_library_contends_as_its_ctas_do() -> None:
    measured, unmeasured = cost_model.load("h200x4"), cost_model.load("h100x8")
    assert measured.contention is not None
    assert (library_ctas(measured, 1), library_ctas(unmeasured, 1)) == (24, 0)
    by_ctas = {row.ctas: row for row in measured.contention.rows}
    exchange = Task(1.0, COMMUNICATION, ctas=library_ctas(measured, 1))
    found = measured_contention(measured)(Task(1.0), exchange)
    assert found == (by_ctas[32].gemm, by_ctas[32].communication)
    assert measured_contention(unmeasured)(Task(1.0), exchange) is None
    assert measured_contention(unmeasured)(Task(1.0), Task(1.0, COPIES)) is None


def test_cpu_ranks_contend_as_measured_between_hosts_alone() -> None:
    """Within a host the exchange is work of the cores that compute."""
    row = ContentionRow(1, 1.1, 1.2)
    machine = replace(cost_model.load("cpu"), contention=Contention("between", (row,), 1, between_hosts=True))
    between = measured_contention(machine)
    assert [library_ctas(machine, hosts) for hosts in (1, 2, 3)] == [0, 1, 1]
    assert between(Task(1.0), Task(1.0, COMMUNICATION, ctas=library_ctas(machine, 2))) == (1.1, 1.2)
    assert between(Task(1.0), Task(1.0, COMMUNICATION, ctas=library_ctas(machine, 1))) is None


def test_contention_that_nobody_measured_is_a_lower_and_an_upper_bound() -> None:
    tasks = [Task(5.0), Task(7.0, COMMUNICATION, (0,), ctas=8), Task(4.0), Task(1.0, waits_for=(1,))]
    nobody = measured_contention(replace(cost_model.load("h200x4"), contention=None))
    lower, upper = schedule(tasks, nobody), schedule(tasks, nobody, serial=True)
    assert (lower.us, upper.us) == (13.0, 17.0)
    assert lower.not_measured == {(COMPUTE, COMMUNICATION)} and upper.not_measured == frozenset()
    in_turn = [Task(5.0), Task(7.0, COMMUNICATION, (0,)), Task(4.0, waits_for=(1,))]
    assert schedule(in_turn, nobody).not_measured == frozenset(), "nothing runs at once here"


def test_three_streams_at_once() -> None:
    """A GEMM that both an exchange and a copy slow down: by 2 and by 1.5."""
    pairs = {(COMPUTE, COMMUNICATION): (2.0, 1.0), (COMPUTE, COPIES): (1.5, 1.0), (COMMUNICATION, COPIES): (1.0, 1.0)}
    tasks = [Task(10.0), Task(30.0, COMMUNICATION), Task(30.0, COPIES)]
    assert ends(schedule(tasks, lambda a, b: pairs[a.stream, b.stream])) == pytest.approx([30.0, 30.0, 30.0])
