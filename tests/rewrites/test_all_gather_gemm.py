"""The rule `all_gather_gemm`: what it takes and leaves, with which reasons, and at what price."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from tests.graphs import profiles
from tests.graphs.functional_collectives import all_gather_single
from tests.graphs.preview import previewed
from weaveopt import cost_model
from weaveopt.fabrics import topology
from weaveopt.ops.gemm_comm.all_gather.prices import candidates
from weaveopt.records.candidate import LEAVE, Fabric
from weaveopt.records.report import Decision, GraphReport
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.all_gather_gemm.forms import RULE, work_of
from weaveopt.sites.sequence.gather_matcher import GatherFacts

OP = torch.ops.weave.all_gather_gemm.default
PEER_CODES = ["not_measured", "weight_layout", "beyond_measured"]
"""Rejections of `copies`, then of `pushed` with an unsupported weight layout and fewer rows than were measured."""


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return all_gather_single(x, dim, dist.group.WORLD)


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


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is OP]


def test_one_call_serves_all_weights(graphs: list[fx.Graph]) -> None:
    """Three gathers of one shard, a bias, weights that are prepared between the GEMMs, and rows that stay."""

    def fn(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        q = torch.nn.functional.linear(gather(x, 1), wq, bias).relu()
        k = gather(x, 1) @ wk.exp()
        whole = gather(x, 1)
        return q, k.sin(), whole @ wv, whole.amax(-1)

    decision = decided(fn, rows(3, 8, 32), rows(16, 32), rows(32, 8), rows(32, 24), rows(16))
    assert decision.chosen.choice == RULE
    assert decision.chosen.parameters == (("gemms", 3), ("hands_out_rows", True), ("max_tokens", 48))
    [call] = calls(graphs[0])
    assert [len(each) for each in call.args[1:3]] == [3, 3]  # type: ignore[arg-type]
    assert {user.args[1] for user in call.users if user.target is operator.getitem} == {0, 1, 2, 3}
    assert not any("_c10d_functional" in str(node.target) for node in graphs[0].nodes)


def test_what_is_left_says_why() -> None:
    def cast(x: Tensor, w: Tensor) -> Tensor:
        return gather(x.float()).bfloat16() @ w

    def chained(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x.sin())
        first = whole @ w
        return first, whole @ first[:32].exp()

    def in_rank_order(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        """The collective's own order is read too: the ranks' shards one after the other."""
        whole = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(x.view(4, 4, 32), 2, dist.group.WORLD.group_name)
        )
        in_order = torch.cat(whole.chunk(2), dim=1)
        return in_order @ w, whole.amax(-1)

    def factors(x: Tensor, w: Tensor) -> Tensor:
        return torch.addmm(w.new_zeros(32, 8), gather(x), w, alpha=2)

    for fn, code in (
        (cast, "dtype_changes"), (chained, "operand_not_ready"), (in_rank_order, "order_not_supported"),
        (factors, "gemm_not_supported"),
    ):  # fmt: skip
        decision = decided(fn, rows(16, 32), rows(32, 8))
        assert decision.chosen.choice == LEAVE
        assert [reason.code for each in decision.alternatives for reason in each.rejections] == [code], fn.__name__


def test_scaled_gemms_are_left() -> None:
    def fn(x: Tensor, w: Tensor, one: Tensor) -> Tensor:
        return torch._scaled_mm(gather(x), w.t(), one, one, out_dtype=torch.bfloat16)

    e4m3 = torch.float8_e4m3fn
    decision = decided(fn, rows(16, 32, dtype=e4m3), rows(16, 32, dtype=e4m3), torch.ones(()))
    assert [reason.code for each in decision.alternatives for reason in each.rejections] == ["gemm_not_supported"]


def gemm(x: Tensor, w: Tensor) -> Tensor:
    return gather(x) @ w


def test_every_fabric_has_its_reasons() -> None:
    decision = decided(gemm, rows(16, 32), rows(32, 8))
    assert (decision.chosen.choice, decision.chosen.fabric) == (RULE, Fabric.SHM)
    assert codes(decision, Fabric.TCP) == ["fabric_needs_hosts", "no_kernel"]
    assert codes(decision, Fabric.PEER) == ["fabric_needs_cuda", "fabric_not_on_machine"]
    with profiles.found(profiles.without("h200x4", "all_gather")):
        on_gpus = decided(gemm, rows(16, 32), rows(32, 8), machine="h200x4", device="cuda")
    assert on_gpus.chosen.choice == LEAVE and codes(on_gpus, Fabric.PEER) == PEER_CODES


def test_what_was_not_measured_is_not_used() -> None:
    machine, known = cost_model.load("cpu"), topology.fake(2)
    facts = GatherFacts("0", 2, 1, 0, 1, 512, 1024, 256, "bfloat16", "bfloat16")
    work = work_of(facts, [1024], TokenCounts(512))
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
    for tokens in (1, 64, 1024, 4096):
        decision = decided(gemm, rows(tokens, 1024), rows(1024, 256), force=False, world=world)
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
    """Two buffers, each of one rank's shard."""
    report = reported(gemm, rows(48, 1000), rows(1000, 32))
    [plan] = report.plans
    [buffer] = plan.buffers
    assert (plan.fabric, buffer.name, buffer.num_bytes) == (Fabric.SHM, "partial", 2 * 48 * 1000 * 2)


def test_rows_that_are_no_number(graphs: list[fx.Graph]) -> None:
    """A graph that only gathers has a token count too, and the plan reserves for those that may come."""
    weight = torch.nn.Parameter(rows(32, 64), requires_grad=False)
    report = reported(lambda x: gemm(x, weight), rows(24, 32), static=False, dynamic=True)
    [decision] = report.decisions
    assert decision.chosen.choice == RULE, decision.alternatives
    assert report.tokens == 48 and decision.site.tokens.most > 48
    assert report.regime is not None and report.regime.min_tokens <= 48
    assert len(calls(graphs[0])) == 1


def test_sites_of_equal_facts_may_allow_different_rewrites(graphs: list[fx.Graph]) -> None:
    """The rows are read in the GEMM's order at one, in the ranks' order at the other one."""

    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for shard, in_order in ((x, True), (y, False)):
            whole = torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_gather_into_tensor(shard, 2, dist.group.WORLD.group_name)
            )
            sequences = torch.cat(whole.chunk(2), dim=1)
            found += [sequences @ w, (sequences if in_order else whole).amax(-1)]
        return tuple(found)

    report = reported(fn, rows(4, 4, 32), rows(4, 4, 32), rows(32, 8))
    first, second = report.decisions
    assert first.site.facts == second.site.facts
    assert [first.chosen.choice, second.chosen.choice] == [RULE, LEAVE] and len(calls(graphs[0])) == 1
    assert [reason.code for each in second.alternatives for reason in each.rejections] == ["order_not_supported"]
