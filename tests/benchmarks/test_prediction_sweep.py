"""Sites at which only leaving and the choice are measured: which these are, what is measured again, what counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import torch

from benchmarks import accuracy, results_table
from benchmarks.record import Row
from benchmarks.workloads import prediction_sweep
from benchmarks.workloads.prediction import Trial
from benchmarks.workloads.prediction_model import predict_again, swept_row
from benchmarks.workloads.prediction_sweep import AGAIN, CPU, GPU, Span, draw, is_doubtful, plan, settle
from tests.ranks import run_ranks
from weaveopt import cost_model
from weaveopt.measure.clock import Sample
from weaveopt.measure.ranks import subgroup
from weaveopt.records.candidate import LEAVE

H200 = cost_model.load("h200x4")
NEVER_SURE = replace(H200, relative_error=9.0)
"""A machine whose model is so far off that no saving is beyond its error."""


def test_sites_are_wide_and_the_same_in_every_run() -> None:
    sites = draw(GPU, 260, 2)
    assert sites == draw(GPU, 260, 2) != draw(GPU, 260, 4)
    assert len(set(sites)) == 260 and sites == sorted(sites)
    assert {hidden for hidden, _ in sites} == set(GPU.hiddens)
    tokens = [tokens for _, tokens in sites]
    assert min(tokens) == 1 and 12000 < max(tokens) <= 16384
    assert 80 < sum(count % 2 for count in tokens) < 180, "odd numbers too"
    # Evenly in the logarithm: as many from 1 to 127 as from 128 on.
    assert 100 < sum(count < 128 for count in tokens) < 160
    assert max(count for _, count in draw(CPU, 100, 2)) <= CPU.most_tokens


def timed(*times_us: float, spread: float = 0.01) -> tuple[Callable[[float], Sample], list[float]]:
    asked: list[float] = []
    found = cycle(times_us)

    def time(expected_us: float) -> Sample:
        asked.append(expected_us)
        return Sample(next(found), spread)

    return time, asked


def test_doubts_are_settled_by_more_measurements() -> None:
    assert not is_doubtful(Sample(110.0, 0.01), Sample(100.0, 0.01))
    assert is_doubtful(Sample(101.0, 0.0), Sample(100.0, 0.0)), "however calm"
    assert is_doubtful(Sample(110.0, 0.2), Sample(100.0, 0.2)), "within their noise"
    assert is_doubtful(Sample(50.0, 0.01), Sample(100.0, 0.01)), "slower"
    leave, asked = timed(120.0)
    choice, _ = timed(100.0)
    assert settle(leave, choice, 110.0, 90.0) == prediction_sweep.Settled(120.0, 100.0, 1)
    assert asked == [110.0]
    # One outlier does not decide, in neither direction.
    leave, _ = timed(120.0)
    choice, asked = timed(400.0, *[100.0] * AGAIN)
    assert settle(leave, choice, 110.0, 90.0) == prediction_sweep.Settled(120.0, 100.0, 1 + AGAIN)
    assert asked == [90.0] * (1 + AGAIN)
    leave, choice = timed(100.0)[0], timed(99.0, *[105.0] * AGAIN)[0]
    assert settle(leave, choice, 100.0, 100.0).us == 105.0


def row_of(us: dict[str, float], machine: cost_model.Machine = H200) -> Row:
    return swept_row(machine, {"ranks": 2, "hidden": 8192, "tokens": 1000}, us, 1)


def test_rows_hold_the_choice_and_leaving() -> None:
    sites = draw(GPU, 20, 2)
    planned = plan(H200, 2, 20, GPU)
    assert [(each.case["hidden"], each.case["tokens"]) for each in planned] == sites
    for each, (hidden, tokens) in zip(planned, sites, strict=True):
        assert each.fused is not None and each.us < each.leave_us
        assert (each.fused.hidden, each.fused.tokens, each.fused.row.max_tokens) == (hidden, tokens, tokens)
    assert all(each.fused is None and each.name == LEAVE for each in plan(NEVER_SURE, 2, 20, GPU))
    name = str(row_of({LEAVE: 100.0}).parameters["chosen"])
    assert name != LEAVE
    row = row_of({LEAVE: 100.0, name: 80.0})
    assert row.parameters == {"chosen": name, accuracy.SWEPT: 1, "of_leaving": 1.25} and row.weave_us == 80.0
    left = row_of({LEAVE: 100.0}, NEVER_SURE)
    assert left.parameters == {"chosen": LEAVE, accuracy.SWEPT: 1, "of_leaving": 1.0}


def test_another_choice_that_was_not_measured_is_not_counted() -> None:
    left = row_of({LEAVE: 100.0}, NEVER_SURE)
    [again] = predict_again(H200, [left])
    assert again.parameters["chosen"] != LEAVE and "of_leaving" not in again.parameters
    assert predict_again(NEVER_SURE, [again]) == [left], "what was measured is still there"
    name = str(again.parameters["chosen"])
    [leaves] = predict_again(NEVER_SURE, [row_of({LEAVE: 100.0, name: 120.0})])
    assert leaves.parameters["of_leaving"] == 1.0 and leaves.weave_us == 100.0
    found = accuracy.choices([left, again, leaves])
    assert found.best is None and found.leaving is not None
    assert (found.leaving.sites, found.leaving.unknown) == (2, 1)
    assert "1 more are not counted" in accuracy.sentence(found)
    assert accuracy.choices([again]).leaving is None and accuracy.sentence(accuracy.choices([])) == ""


def test_swept_sites_count_against_leaving_only() -> None:
    every = {"chosen": "two_shot bulk 64", "of_best": 0.9, "of_leaving": 1.3}
    exhaustive = replace(row_of({LEAVE: 130.0}), parameters=every)
    name = str(row_of({LEAVE: 1.0}).parameters["chosen"])
    swept = [row_of({LEAVE: us, name: 100.0}) for us in (98.9, 99.0, 150.0)]
    found = accuracy.choices([exhaustive, *swept])
    assert found.best == accuracy.Best(1, 0.9, 0.9)
    assert found.leaving == accuracy.Leaving(4, 0.989, "2 x 1000 x 8192", 1, 0)
    text = results_table.accuracy_table((exhaustive, *swept))
    assert "1 sites, all candidates measured: the choice has 90.0%" in text
    assert "4 sites against leaving them alone: 0.99x at least (2 x 1000 x 8192), 1 below 0.99x." in text


SPAN = Span(64, (1024,))


def sweep_of(rank: int) -> tuple[list[Row], list[int]]:
    torch.set_grad_enabled(False)
    device, machine = torch.device("cpu"), cost_model.load("cpu")
    trial = Trial(device, machine, quick=True, num_swept=2)
    ranks = subgroup(2, device)
    trial.span = SPAN
    trial.reserve(ranks, [])
    trial.sweep(ranks)
    # One graph for any number of tokens, and one for a single token.
    unfused, graphs = prediction_sweep.Unfused(ranks, 1024), []
    torch._dynamo.utils.counters.clear()
    for tokens in (3, 700, 64, 1, 5):
        unfused.launch(tokens)(0)
        graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return trial.rows, graphs


def test_a_sweep_on_cpu_ranks() -> None:
    (rows, graphs), (others, _) = run_ranks(sweep_of, 2)
    assert rows == others, "all ranks hold the same rows"
    assert graphs == [0, 0, 0, 1, 1]
    assert [(row.case["hidden"], row.case["tokens"]) for row in rows] == draw(SPAN, 2, 2)
    assert all(row.case["kind"] == accuracy.CHOICE and row.weave_us > 0 for row in rows)
    assert all(row.parameters[accuracy.SWEPT] in (1, 1 + AGAIN) for row in rows)
    found = accuracy.choices(rows)
    assert found.best is None and found.leaving is not None and found.leaving.sites == 2
