"""Prices of the rule `shard_norm`, and the sites at which it is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.nn.functional import linear

from tests.graphs import forms
from tests.graphs.overlapped_gemms import HIDDEN, TOKENS, Reported, alone, fused
from tests.graphs.shard_norm_graphs import OTHER, H, K, block, gather_calls, inputs, on, scatter_calls, zeros
from tests.graphs.shard_norm_graphs import reported as on_cpus
from weaveopt import cost_model
from weaveopt.cost_model.machine import Curve
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.fabrics import topology
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER
from weaveopt.records.candidate import LEAVE, Fabric
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.shard_norm.candidates import RULE, Chain, candidates
from weaveopt.sites.reduction.matcher import ReductionFacts


def big(dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS) -> tuple[Tensor, ...]:
    sizes = ((1, tokens, 2048), (1, tokens, HIDDEN), (HIDDEN, 2048), (HIDDEN,), (3584, HIDDEN))
    return tuple(zeros(*each, dtype=dtype) for each in sizes)


TILES, PUSHED = TileConfig(256, 1, 4), TileConfig(256, 1)


def early(us: float) -> list[Curve]:
    """Kernels that hide their exchange, each of so many microseconds."""
    tiles = (fused(us, "gemm_reduce_scatter", REDUCE_SCATTER.name_of(TILES, k)) for k in (512, 8192))
    pushed = (fused(us, "all_gather_gemm", ALL_GATHER.name_of(PUSHED, n)) for n in (512, 8192))
    return [*tiles, *pushed]


def test_early_kernels_are_taken_where_they_are_measured_faster(reported: Reported) -> None:
    for us, taken in ((1.0, True), (1e5, False)):
        [decision] = reported(block, big(), *early(us)).decisions
        candidate = on(decision, Fabric.PEER)
        assert candidate.variant == "tiles, pushed"
        assert (decision.chosen.choice == RULE) is taken, us
        if taken:
            assert dict(candidate.parameters)["tiles"] == str(TILES)
            assert dict(candidate.parameters)["pushed"] == str(PUSHED)
            assert {"gemm", "exposed", "norm"} <= {term.name for term in candidate.estimate.terms}  # type: ignore[union-attr]


def test_late_kernels_serve_what_the_early_ones_do_not(reported: Reported, graphs: list[fx.Graph]) -> None:
    curves = [*early(0.5), alone(1.0, "reduce_scatter", "partials"), alone(1.0, "all_gather", "copies")]
    [decision] = reported(block, big(torch.float32), *curves, force=(RULE,)).decisions
    assert (decision.chosen.choice, decision.chosen.variant) == (RULE, "partials, copies")
    [scatter], [gather] = scatter_calls(graphs[-1]), gather_calls(graphs[-1])
    assert scatter.cut == gather.cut == ""


def test_a_bias_behind_the_norm_is_added_by_the_early_kernel(reported: Reported) -> None:
    def qwen2(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        total = residual + forms.all_reduce(linear(x, down))
        return (linear(forms.rms(total, norm), up, up[:, 0].contiguous()),)

    curves = [*early(0.5), alone(1.0, "all_gather", "copies")]
    [decision] = reported(qwen2, big(), *curves, force=(RULE,)).decisions
    assert (decision.chosen.choice, decision.chosen.variant) == (RULE, "tiles, pushed")


def test_gemms_behind_the_norm_are_counted_once() -> None:
    """With the same GEMMs and exchanges that cost nothing, a site saves the all-reduce and no GEMM."""
    [decision] = on_cpus(block, *inputs(1024), force=()).decisions
    candidate = on(decision, Fabric.SHM)
    assert candidate.estimate is not None and decision.baseline is not None
    terms = {term.name: term.us for term in candidate.estimate.terms}
    baseline = {term.name: term.us for term in decision.baseline.terms}
    host_us = cost_model.host_us(cost_model.load("cpu"))
    # One call in place of two behind the norm, and the first GEMM is part of a call.
    assert terms["gemm"] == pytest.approx(baseline["gemm"] - 3 * host_us)
    assert {"synchronize", "reduce_scatter", "all_gather", "norm", "host"} <= terms.keys()


@pytest.mark.parametrize("world", [2, 4])
def test_never_slower_by_price(world: int) -> None:
    for tokens in (world, 64, 1024, 8192):
        report = on_cpus(block, *inputs(max(tokens, 2)), force=(), world=world)
        [decision] = report.decisions
        assert decision.baseline is not None and decision.chosen.estimate is not None
        candidate = on(decision, Fabric.SHM)
        assert candidate.estimate is not None
        best = decision.chosen.estimate.us_with_margin
        assert decision.chosen.choice == LEAVE or best < decision.baseline.us
        assert candidate.estimate.us_with_margin >= best or decision.chosen.choice == LEAVE


def test_a_machine_without_curves_has_no_candidate() -> None:
    machine = cost_model.load("cpu")
    assert any(curve.op == "all_gather" for each in machine.fabric_costs for curve in each.curves)
    bare = replace(machine, fabric_costs=tuple(replace(each, curves=()) for each in machine.fabric_costs))
    facts = ReductionFacts("0", 2, 1, H, "bfloat16", gemm_depth=K, sum_is_read=True)
    known = Chain(facts, TokenCounts(16), (K,), (K,), "bfloat16", 1, False)
    for profile, codes in ((machine, set()), (bare, {"not_measured"})):
        [shm] = [each for each, _ in candidates(known, topology.fake(2), profile) if each.fabric is Fabric.SHM]
        assert {reason.code for reason in shm.rejections} == codes
        assert bool(candidates(known, topology.fake(2), profile, usable_only=True)) != bool(codes)


def test_rows_of_zeros_are_nothing_to_gain_by() -> None:
    """CPUs multiply two rows faster than one: one token filled up to two is no reason to choose the rule."""
    machine = cost_model.load("cpu")
    one, two = (cost_model.gemm_us(machine, cost_model.Gemm(rows, 4096, 8192), "bfloat16") for rows in (1, 2))
    assert two < one, "the profile no longer says so"
    sizes = ((1, 1, 4096), (1, 1, 8192), (8192, 4096), (8192,), (5120, 8192))
    [decision] = on_cpus(block, *(zeros(*each) for each in sizes), force=()).decisions
    assert decision.chosen.choice == OTHER and on(decision, Fabric.SHM).estimate is not None
