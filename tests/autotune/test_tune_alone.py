"""Ranks that compile again alone, and groups whose ranks have graphs of their own, while kernels are timed."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.autotune.test_tune import FakeClock, times_of
from tests.graphs import forms
from tests.graphs.executing import executing
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.pipeline.test_agree import RULE, inputs, run_mesh, run_recompile_of_a_known_plan
from tests.ranks import run_ranks
from weaveopt.autotune import tune
from weaveopt.autotune.kernel_timing import time_kernels
from weaveopt.config import Config
from weaveopt.records.report import GraphReport


def _config(folder: str) -> Config:
    """All defaults but the budget, which is 0 on CPUs: waits as long as those that users have."""
    return Config(force=(RULE,), tune_budget_s=5.0, tune_cache=folder)


def _alone(rank: int, folder: str) -> tuple[list[bool], int, float]:
    tune.time_kernels, began = (clock := FakeClock({})), time.monotonic()
    try:
        return run_recompile_of_a_known_plan(rank, _config(folder)), clock.num_calls, time.monotonic() - began
    finally:
        tune.time_kernels = time_kernels


def test_a_rank_that_compiles_again_alone_waits_for_nobody(tmp_path: Path) -> None:
    """Its input has other strides, so a kernel of its graph was never timed: what was agreed on before counts."""
    (first, timed, _), (second, timed_too, took_s) = run_ranks(_alone, 2, str(tmp_path))
    assert first == [True] and second == [True, True]
    assert timed == timed_too == 1 and took_s < 40.0, "60 s is how long ranks wait for each other"


def _mesh(rank: int, folder: str) -> tuple[list[bool], list[float], int]:
    tune.time_kernels, real = (clock := FakeClock({})), tune._against
    tune._against = lambda *_: None  # four ranks share cores here
    try:
        graphs, took = run_mesh(rank, _config(folder))
    finally:
        tune.time_kernels, tune._against = time_kernels, real
    return [True in graph.rewritten for graph in graphs], took, clock.num_calls


def test_data_parallel_ranks_do_not_wait_for_each_others_times(tmp_path: Path) -> None:
    for rewritten, took, timed in run_ranks(_mesh, 4, str(tmp_path), timeout_s=200):
        assert all(rewritten) and len(rewritten) in (2, 4) and timed >= 1
        assert max(took) < 40.0, took


def _two_groups(rank: int, folder: str) -> tuple[list[bool], dict[str, float]]:
    """Reductions over the rows and the columns of a mesh; every rank finds all kernels as slow as its number says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    groups = [mesh[name].get_group() for name in ("rows", "columns")]
    w = forms.make_weights(torch.float32)

    def block(x: Tensor, total: Tensor) -> Tensor:
        for group in groups:
            total = total + functional_collectives.all_reduce(x @ w.product, "sum", group)
            x = forms.rms(total, w.norm)[..., : forms.INNER]
        return x

    tune.time_kernels, real = FakeClock({forms.HIDDEN: 100.0 * (rank + 1)}), tune._against
    tune._against = lambda *_: None  # four ranks share cores here
    reports: list[GraphReport] = []
    try:
        compiled = torch.compile(block, backend=executing(_config(folder), reports, tunes=True), dynamic=False)
        with torch.no_grad():
            assert_close(compiled(*inputs(rank)), block(*inputs(rank)), LIBRARY)
    finally:
        tune.time_kernels, tune._against = time_kernels, real
    (report,) = reports
    return [decision.rewritten for decision in report.decisions], times_of(report)


def test_ranks_that_share_no_group_use_the_same_times(tmp_path: Path) -> None:
    first, *others = run_ranks(_two_groups, 4, str(tmp_path), timeout_s=200)
    assert all(other == first for other in others) and first[0] == [True, True]
    assert 400.0 in first[1].values(), "the longest time is the last rank's"
