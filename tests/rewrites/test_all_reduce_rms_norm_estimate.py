"""Estimates of a site, fused and unfused: known figures, and what must hold for any machine."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product as combinations

import pytest

from tests.graphs.nonempty import some
from weaveopt import cost_model
from weaveopt.cost_model import Gemm, Machine
from weaveopt.ops.reduction.prices.estimate import estimate_fused, estimate_unfused
from weaveopt.ops.reduction.prices.table import one_shot_max_tokens
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm
from weaveopt.records.candidate import Estimate, Fabric, error_between_us

HIDDEN = 8192
MACHINES = {name: cost_model.load(name) for name in cost_model.names()}
ALGORITHMS = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)


def _work(tokens: int, world: int = 4, hosts: int = 1) -> Workload:
    return Workload(tokens, tokens, HIDDEN, "bfloat16", world, hosts, Gemm(tokens, 7168, HIDDEN))


def _terms(estimate: Estimate) -> dict[str, float]:
    return {term.name: term.us for term in estimate.terms}


@pytest.mark.parametrize(("tokens", "printed_us"), [(64, 17.70), (1024, 75.71), (8192, 502.24), (32768, 1960.90)])
def test_tokenweave_table_1(tokens: int, printed_us: float) -> None:
    """The fused kernel's terms add up to the printed time on eight GPUs."""
    work = replace(_work(tokens, world=8), gemm=Gemm(tokens, 0, HIDDEN))
    found = estimate_fused(MACHINES["h100x8"], work, Fabric.MULTIMEM, Algorithm.TWO_SHOT)
    assert found.us == pytest.approx(printed_us)


@pytest.mark.parametrize("name", MACHINES)
def test_positive_and_finite_everywhere(name: str) -> None:
    machine = MACHINES[name]
    grid = combinations((1, 3, 64, 1000, 32768), (64, 4096), ("bfloat16", "float16", "float32"), (2, 3, 8, 16), (1, 2))
    for tokens, hidden, dtype, world, hosts in some(grid):
        base = Workload(tokens, tokens, hidden, dtype, world, hosts, Gemm(tokens, 1024, hidden))
        for work in (base, replace(base, gemm=None, num_partials=2, num_norms=2, has_residual=False)):
            estimates = [estimate_unfused(machine, work)]
            for fabric in machine.fabrics:
                for algorithm in ALGORITHMS:
                    estimates.append(estimate_fused(machine, work, fabric, algorithm))
            for estimate in estimates:
                assert all(math.isfinite(term.us) and term.us > 0 for term in some(estimate.terms)), (work, estimate)
                assert estimate.relative_error > 0 and math.isfinite(estimate.relative_error)


def test_no_tokens_cost_nothing() -> None:
    assert estimate_unfused(MACHINES["h200x4"], _work(0)).us == 0
    fused = estimate_fused(MACHINES["h200x4"], _work(0), Fabric.PEER, Algorithm.TWO_SHOT)
    assert fused.us == 0


def test_a_gemm_writes_into_the_arena_or_is_copied() -> None:
    machine, work = MACHINES["h100x8"], _work(512)
    direct = _terms(estimate_fused(machine, work, Fabric.MULTIMEM, Algorithm.TWO_SHOT))
    copied = _terms(estimate_fused(machine, replace(work, gemm=None), Fabric.MULTIMEM, Algorithm.TWO_SHOT))
    assert "copy" not in direct
    assert copied["copy"] == cost_model.memory_us(machine, 2 * work.message_bytes)
    assert "gemm" not in copied


@pytest.mark.parametrize("gemm", [Gemm(512, 7168, HIDDEN), None])
def test_peer_copies_nothing_and_adds_with_a_kernel(gemm: Gemm | None) -> None:
    """Its kernel sends rows from wherever they are; the results of two GEMMs are added by a kernel of the
    graph's own."""
    machine, work = MACHINES["h200x4"], replace(_work(512), gemm=gemm, num_partials=2)
    terms = _terms(estimate_fused(machine, work, Fabric.PEER, Algorithm.TWO_SHOT))
    assert "copy" not in terms
    assert terms["add"] == cost_model.memory_us(machine, 3 * work.message_bytes)


def test_two_partials_reduce_once() -> None:
    machine, work = MACHINES["h200x4"], replace(_work(4096), num_partials=2)
    unfused = _terms(estimate_unfused(machine, work))
    once_us = cost_model.all_reduce_us(machine, Fabric.LIBRARY, Algorithm.LIBRARY, work.message_bytes, 4)
    assert unfused["all_reduce"] == pytest.approx(2 * once_us)
    one, two = (_terms(estimate_fused(machine, each, Fabric.PEER, Algorithm.TWO_SHOT)) for each in (_work(4096), work))
    assert two.pop("add") > 0
    assert two == one


def test_second_norm_is_a_kernel_more_only_unfused() -> None:
    machine, work = MACHINES["h200x4"], replace(_work(4096), num_norms=2)
    assert "norm" in _terms(estimate_unfused(machine, work))
    assert "norm" not in _terms(estimate_unfused(machine, _work(4096)))


def test_whole_sum_is_handed_out_too() -> None:
    machine, work = MACHINES["h200x4"], _work(4096)
    sharded = estimate_fused(machine, work, Fabric.PEER, Algorithm.TWO_SHOT)
    whole = estimate_fused(machine, work, Fabric.PEER, Algorithm.TWO_SHOT, sum_sharded=False)
    assert whole.us > sharded.us
    assert _terms(whole)["gather"] == pytest.approx(whole.us - sharded.us)
    unread = replace(work, sum_is_used=False)
    assert "gather" not in _terms(estimate_fused(machine, unread, Fabric.PEER, Algorithm.TWO_SHOT, sum_sharded=False))


def test_the_error_of_the_gemm_cancels() -> None:
    """The GEMM is the same before and after: only what a rewrite changes makes its saving uncertain."""
    machine, work = MACHINES["h200x4"], _work(4000)
    before, after = (each(machine, work) for each in (estimate_unfused, _two_shot))
    gemm = next(term for term in before.terms if term.name == "gemm")
    assert gemm.error_us > 0 and gemm.error_us < before.error_us
    rests = [Estimate(tuple(term for term in each.terms if term.name != "gemm")) for each in (before, after)]
    assert error_between_us(before, after) == pytest.approx(error_between_us(*rests))
    assert error_between_us(before, after) == pytest.approx(math.hypot(*(each.error_us for each in rests)), rel=0.2)


def _two_shot(machine: Machine, work: Workload) -> Estimate:
    return estimate_fused(machine, work, Fabric.PEER, Algorithm.TWO_SHOT)


@pytest.mark.parametrize("name", [name for name in MACHINES if name != "gh200-infiniband"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_threshold_is_the_crossing(name: str, world: int) -> None:
    machine = MACHINES[name]
    for fabric in some(machine.fabrics):
        threshold = one_shot_max_tokens(machine, fabric, HIDDEN, "bfloat16", world, 1)
        if fabric is Fabric.LIBRARY:
            assert threshold == 0
            continue

        def wins(tokens: int, fabric: Fabric = fabric) -> bool:
            work = Workload(tokens, tokens, HIDDEN, "bfloat16", world)
            one, two = (estimate_fused(machine, work, fabric, each).us for each in ALGORITHMS)
            return one <= two

        assert threshold == 0 or wins(threshold)
        assert not wins(threshold + 1)


def test_threshold_follows_bytes() -> None:
    machine = MACHINES["h100x8"]
    wide = one_shot_max_tokens(machine, Fabric.PEER, 8192, "bfloat16", 4, 1)
    narrow = one_shot_max_tokens(machine, Fabric.PEER, 4096, "bfloat16", 4, 1)
    assert wide > 1 and abs(narrow - 2 * wide) <= 1


def test_oversubscribed_cores_slow_a_rank() -> None:
    machine = MACHINES["cpu"]
    cores = machine.ranks_per_host
    fits, shared = (_terms(estimate_unfused(machine, _work(64, world)))["gemm"] for world in (cores, 2 * cores))
    assert shared == pytest.approx(2 * fits)
