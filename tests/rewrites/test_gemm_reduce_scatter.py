"""The rule `gemm_reduce_scatter`: what it takes and leaves, with which reasons, and at what price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from tests.graphs import profiles
from tests.graphs.functional_collectives import reduce_scatter_single
from tests.graphs.preview import previewed
from weaveopt import cost_model
from weaveopt.cost_model import Gemm
from weaveopt.fabrics import topology
from weaveopt.ops.gemm_comm.reduce_scatter.prices import GemmReduceScatterWork, candidates
from weaveopt.records.candidate import LEAVE, Fabric
from weaveopt.records.report import Decision, GraphReport
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.gemm_reduce_scatter.rule import RULE

OP = torch.ops.weave.gemm_reduce_scatter.default
PEER_CODES = ["not_measured", "weight_layout", "beyond_measured"]
"""Rejections of `partials`, then of `tiles` with an unsupported weight layout and fewer rows than were measured."""


def scatter(x: Tensor, op: str = "sum", dim: int = 0) -> Tensor:
    return reduce_scatter_single(x, op, dim, dist.group.WORLD)


def rows(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*sizes, dtype=dtype)


def reported(fn: Callable[..., object], *inputs: Tensor, force: bool = True, **more: object) -> GraphReport:
    forced = (RULE,) if force else ()
    return previewed(fn, inputs, force=forced, **{"static": True, **more})  # type: ignore[arg-type]


def decided(fn: Callable[..., object], *inputs: Tensor, force: bool = True, **more: object) -> Decision:
    [decision] = reported(fn, *inputs, force=force, **more).decisions
    return decision


def codes(decision: Decision, fabric: Fabric) -> list[str]:
    return [reason.code for each in decision.alternatives if each.fabric is fabric for reason in each.rejections]


def test_a_mean_and_a_scale_are_part_of_the_operation(graphs: list[fx.Graph]) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return scatter(x @ w, "avg"), scatter((x.sin() @ w) / 4, dim=1), scatter(x.cos() @ w, dim=-1)

    report = reported(fn, rows(2, 16, 32), rows(32, 8))
    assert [each.chosen.choice for each in report.decisions] == [RULE] * 3
    calls = [str(node.args[-1]) for node in graphs[0].nodes if node.target is OP]
    assert ['"scale":0.5' in each for each in calls] == [True, False, False]
    assert ['"scale":0.25' in each for each in calls] == [False, True, False]
    assert ['"columns":true' in each for each in calls] == [False, False, True]
    assert not any("_c10d_functional" in str(node.target) for node in graphs[0].nodes)
    assert any("in fp32, in their order, and rounded once" in line for line in report.rounding)


def test_sums_of_scatters_become_one(graphs: list[fx.Graph]) -> None:
    def fn(x: Tensor, wq: Tensor, wk: Tensor, residual: Tensor) -> Tensor:
        return residual + (scatter(x @ wq) + scatter(x @ wk))

    report = reported(fn, rows(16, 32), rows(32, 8), rows(32, 8), rows(8, 8))
    [decision] = report.decisions
    assert decision.chosen.choice == RULE and ("gemms", 2) in decision.chosen.parameters
    [call] = [node for node in graphs[0].nodes if node.target is OP]
    assert len(call.args[0]) == 2  # type: ignore[arg-type]
    [total] = call.users
    assert total.target is torch.ops.aten.add.Tensor, "the residual is added behind it"
    assert any("summed on each rank before" in line for line in report.rounding)


def test_what_is_left_says_why() -> None:
    def cast(x: Tensor, w: Tensor, rest: Tensor) -> Tensor:
        return scatter((x @ w).float())

    def behind_the_scale(x: Tensor, w: Tensor, rest: Tensor) -> Tensor:
        return scatter((x @ w) * 0.5 + rest)

    def biased(x: Tensor, w: Tensor, rest: Tensor) -> Tensor:
        return rest.view(2, 8, 8)[0] + (scatter(x @ w) + scatter(x.sin() @ w) + rest[0])

    for fn, code in ((cast, "dtype_changes"), (behind_the_scale, "addend_not_scaled"), (biased, "sum_not_plain")):
        decision = decided(fn, rows(16, 32), rows(32, 8), rows(16, 8))
        assert decision.chosen.choice == LEAVE
        assert [reason.code for each in decision.alternatives for reason in each.rejections] == [code], fn.__name__


def test_scaled_gemms_are_left() -> None:
    def fn(x: Tensor, w: Tensor, one: Tensor) -> Tensor:
        return scatter(torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16))

    e4m3 = torch.float8_e4m3fn
    decision = decided(fn, rows(16, 32, dtype=e4m3), rows(16, 32, dtype=e4m3), torch.ones(()))
    assert [reason.code for each in decision.alternatives for reason in each.rejections] == ["gemm_not_supported"]


def gemm(x: Tensor, w: Tensor) -> Tensor:
    return scatter(x @ w)


def test_every_fabric_has_its_reasons() -> None:
    decision = decided(gemm, rows(16, 32), rows(32, 8))
    assert (decision.chosen.choice, decision.chosen.fabric) == (RULE, Fabric.SHM)
    assert codes(decision, Fabric.TCP) == ["fabric_needs_hosts", "no_kernel"]
    assert codes(decision, Fabric.PEER) == ["fabric_needs_cuda", "fabric_not_on_machine"]
    with profiles.found(profiles.without("h200x4", "reduce_scatter")):
        on_gpus = decided(gemm, rows(16, 32), rows(32, 8), machine="h200x4", device="cuda")
    assert on_gpus.chosen.choice == LEAVE and codes(on_gpus, Fabric.PEER) == PEER_CODES


def test_what_was_not_measured_is_not_used() -> None:
    machine, known = cost_model.load("cpu"), topology.fake(2)
    work = GemmReduceScatterWork((Gemm(512, 256, 1024),), "bfloat16", 2, 1)
    bare = replace(machine, fabric_costs=tuple(replace(each, curves=()) for each in machine.fabric_costs))
    for profile, found in ((machine, []), (bare, ["not_measured"])):
        [shm] = [
            candidate
            for candidate, _ in candidates(RULE, work, TokenCounts(512), known, profile, usable_only=False)
            if candidate.fabric is Fabric.SHM
        ]
        assert [reason.code for reason in shm.rejections] == found
        assert (shm.estimate is None) == bool(found)
        assert bool(list(candidates(RULE, work, TokenCounts(512), known, profile, usable_only=True))) != bool(found)


@pytest.mark.parametrize("world", [2, 4])
def test_never_slower_by_price(world: int) -> None:
    """A rewritten site saves more than the model's own error; the GEMM is the same with and without the rule."""
    for tokens in (world, 64, 1024, 8192):
        decision = decided(gemm, rows(tokens, 256), rows(256, 1024), force=False, world=world)
        assert decision.baseline is not None
        [estimate] = [each.estimate for each in (decision.chosen, *decision.alternatives) if each.fabric is Fabric.SHM]
        assert estimate is not None
        saves = estimate.us_with_margin < decision.baseline.us
        assert saves == (decision.chosen.choice == RULE), tokens
        gemms = [{term.name: term.us for term in each.terms}["gemm"] for each in (estimate, decision.baseline)]
        host_us = cost_model.host_us(cost_model.load("cpu")) * max(world / 2, 1)
        assert gemms[0] == pytest.approx(gemms[1] - host_us)
        assert {"synchronize", "host"} < {term.name for term in estimate.terms}


def test_memory_is_planned() -> None:
    report = reported(gemm, rows(48, 32), rows(32, 1000))
    [plan] = report.plans
    [buffer] = plan.buffers
    assert (plan.fabric, buffer.name, buffer.num_bytes) == (Fabric.SHM, "partial", 2 * 48 * 1000 * 2)


def test_rows_that_are_no_number(graphs: list[fx.Graph]) -> None:
    """A graph that only reduce-scatters has a token count too, and the plan reserves for those that may come."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scatter(torch.cat([x, x.sin()]) @ w)

    weight = torch.nn.Parameter(rows(32, 64), requires_grad=False)
    report = reported(lambda x: fn(x, weight), rows(24, 32), static=False, dynamic=True)
    [decision] = report.decisions
    assert decision.chosen.choice == RULE, decision.alternatives
    assert report.tokens == 48 and decision.site.tokens.most > 48
    assert report.regime is not None and report.regime.min_tokens <= 48
    assert sum(node.target is OP for node in graphs[0].nodes) == 1
