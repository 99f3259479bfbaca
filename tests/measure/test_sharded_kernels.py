"""Sharded mixtures on GPUs: what calibrate measures of them, and that the rule reads of a profile what was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx

from tests.measure.test_families import own_kernels, rows
from tests.rewrites.test_moe_sharded import make_call
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.cost_model.exchange import COMBINE, DISPATCH, gpu_parts
from weaveopt.cost_model.exchange import OP as CURVES
from weaveopt.cost_model.host import host_us
from weaveopt.cost_model.mixture import kernels_us
from weaveopt.fabrics import topology
from weaveopt.fabrics.rows_call import decode
from weaveopt.measure.cases.experts.sharded import (
    CHOICES,
    ROW_BYTES,
    TOKENS,
    ShardedKernels,
    owners,
    pushed_bytes,
    size_of,
)
from weaveopt.measure.cases.reduction.peer import PeerKernels
from weaveopt.measure.clock import Sample
from weaveopt.measure.draft import Draft
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.sharded.op import SITES
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Candidate, Estimate, Fabric
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.moe_sharded import MoeSharded
from weaveopt.rule import Chosen, Context, FoundSite, Placement, Proposal
from weaveopt.sites.mixture.exchange_matcher import ExchangeFacts, ExchangeMatcher

OP = torch.ops.weave.expert_exchange
HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 16, 8


def kernel_us(variant: str, num_bytes: float) -> float:
    return (8.0 if variant == DISPATCH else 4.0) + num_bytes / (3e5 if variant == DISPATCH else 2e6)


def write(family: ShardedKernels) -> Machine:
    draft = Draft(torch.device("cpu"), 2, None)
    link = PeerKernels({(2, 4096, KernelRow(0, Algorithm.TWO_SHOT, Transfer.BULK, 16)): rows(4.0)})
    for each in (*own_kernels(), link, family):  # type: ignore[arg-type]
        each.write(draft)
    return draft.machine("made_up")


def unmeasured() -> Machine:
    """The profile of four GPUs without times of these exchanges."""
    known = cost_model.load("h200x4")
    return replace(
        known,
        fabric_costs=tuple(
            replace(each, curves=tuple(curve for curve in each.curves if curve.op != CURVES))
            for each in known.fabric_costs
        ),
    )


@pytest.fixture
def machine() -> Machine:
    """The profile of four GPUs, with the curves that calibrate writes of made-up samples among two ranks."""
    sizes = {variant: [size_of(variant, tokens, 2) for tokens in TOKENS] for variant in (DISPATCH, COMBINE)}
    family = ShardedKernels(
        {(2, name): [(size, Sample(kernel_us(name, size), 0.01)) for size in all_] for name, all_ in sizes.items()}
    )
    [written] = [costs for costs in write(family).fabric_costs if costs.fabric is Fabric.PEER]
    known = unmeasured()
    [fabric] = [costs for costs in known.fabric_costs if costs.fabric is Fabric.PEER]
    curves = tuple(replace(each, origin=fabric.curves[0].origin) for each in written.curves if each.op == CURVES)
    assert len(curves) == 2, written.curves
    return replace(
        known,
        fabric_costs=tuple(
            replace(each, curves=(*each.curves, *curves)) if each.fabric is Fabric.PEER else each
            for each in known.fabric_costs
        ),
    )


def site_of(context: Context, tokens: int, same: bool = True, dtype: torch.dtype = torch.bfloat16,
            hidden: int = HIDDEN, transposed: bool = False) -> tuple[fx.Graph, FoundSite]:  # fmt: skip
    graph = fx.Graph()
    call = replace(
        make_call(same_tokens=same), hidden=hidden, num_experts=EXPERTS, dtype=str(dtype).removeprefix("torch.")
    )

    def placeholder(name: str, *sizes: int, of: torch.dtype = dtype) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(sizes, dtype=of, device="meta")
        return node

    x = placeholder("x", tokens, hidden)
    experts = placeholder("experts", tokens, CHOSEN, of=torch.int64)
    weights = placeholder("weights", tokens, CHOSEN)
    gate_up = placeholder("gate_up", EXPERTS, 2 * INNER, hidden)
    if transposed:
        gate_up.meta["val"] = torch.empty(EXPERTS, hidden, 2 * INNER, dtype=dtype, device="meta").transpose(1, 2)
    down = placeholder("down", EXPERTS, hidden, INNER)
    node = graph.call_function(OP.default, (x, experts, weights, gate_up, None, down, None, call.encode()))
    node.meta["val"] = torch.empty(tokens, hidden, dtype=dtype, device="meta")
    graph.output(node)
    [site] = ExchangeMatcher().find(graph, context)
    assert isinstance(site, FoundSite)
    return graph, site


def proposals(site: FoundSite, tokens: TokenCounts, context: Context) -> dict[str, Proposal]:
    found = MoeSharded().propose(site, tokens, context)
    return {each.candidate.variant: each for each in found if each.candidate.fabric is Fabric.PEER}


def context_of(machine: Machine) -> Context:
    return Context(Config(), machine, {"0": topology.fake(2, device="cuda")})


def codes(candidate: Candidate) -> list[str]:
    return [each.code for each in candidate.rejections]


def test_owners_get_as_many_rows() -> None:
    for world in (2, 3, 4, 8):
        found = owners(24, world)
        assert torch.bincount(found.flatten(), minlength=world).tolist() == [24 * CHOICES // world] * world
        others = [int((found == other).any(1).sum()) for other in range(1, world)]
        assert sum(others) * ROW_BYTES == pushed_bytes(24, world)


def test_a_profile_keeps_what_was_measured(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "made_up.json"
    path.write_text(cost_model.dumps(machine))
    assert cost_model.load(str(path)) == machine


@pytest.mark.parametrize("transposed", [False, True])
def test_the_price_is_the_measurement(machine: Machine, transposed: bool) -> None:
    context = context_of(machine)
    for tokens in (1, 256, 4096):
        _, site = site_of(context, tokens, transposed=transposed)
        assert isinstance(site.facts, ExchangeFacts)
        sharded = site.facts.sharded(tokens, machine.skew)
        for variant, name in (("kernels", ""), ("hopper", "hopper")):
            candidate = proposals(site, TokenCounts(tokens), context)[variant].candidate
            if variant == "hopper" and tokens == 1:  # too few rows an expert
                assert candidate.estimate is None and codes(candidate) == ["few_rows"]
                continue
            parts = gpu_parts(machine, Fabric.PEER, sharded, name, transposed)
            assert candidate.estimate is not None and parts is not None and not candidate.rejections
            assert candidate.estimate.us == pytest.approx(
                parts.experts + parts.dispatch + parts.returned + parts.combine + parts.host
            )
            mixture = replace(sharded.of_busiest, transposed=transposed)
            assert parts.experts == kernels_us(machine, mixture, name) and parts.host == 6 * host_us(machine)
            if tokens > 1:
                assert parts.dispatch == pytest.approx(kernel_us(DISPATCH, sharded.sent_bytes), rel=0.1)
            hidden_us = parts.experts / 3  # of the returned rows, by the second GEMM
            assert parts.returned == pytest.approx(max(sharded.returned_bytes / 3e5 - hidden_us, 0.0), rel=0.1)
            assert parts.combine == pytest.approx(kernel_us(COMBINE, 0.0), rel=0.1), "the experts' time has the sum"


def test_what_is_left_says_why(machine: Machine) -> None:
    context = context_of(machine)
    for more, found in (
        ({"dtype": torch.float32}, "dtype_not_supported"),
        ({"hidden": 2052}, "rows_not_aligned"),
    ):
        _, site = site_of(context, 64, **more)  # type: ignore[arg-type]
        for proposal in proposals(site, TokenCounts(64), context).values():
            assert codes(proposal.candidate) == [found] and proposal.candidate.estimate is None
    _, site = site_of(context, 64)
    for proposal in proposals(site, TokenCounts(64, most=1 << 25), context).values():
        assert codes(proposal.candidate) == ["too_many"]
    bare = context_of(unmeasured())
    for proposal in proposals(site_of(bare, 64)[1], TokenCounts(64), bare).values():
        assert codes(proposal.candidate) == ["not_measured"]


def test_the_call_says_whose_kernels_run(machine: Machine) -> None:
    """In a graph that sees several token counts, Triton's kernels serve up to the count at which ours become faster."""
    context = context_of(machine)
    graph, site = site_of(context, 64)
    several = proposals(site, TokenCounts(64, most=8192), context)["hopper"]
    few = dict(several.candidate.parameters)["few_tokens"]
    assert isinstance(few, int) and 1 < few < 4096, "at one token weights bind, at thousands arithmetic"
    chosen = Chosen(site, several)
    memory = MoeSharded().memory(chosen, context)
    MoeSharded().replace(graph, chosen, Placement({}, 2), context)
    [node] = [node for node in graph.nodes if node.target is OP.capturable]
    call = decode(ExpertExchangeCall, str(node.args[-1]))
    assert (call.fabric, call.max_tokens, call.few_tokens, call.channel) == (Fabric.PEER, 8192, few, 2)
    assert [call.kernels_at(tokens) for tokens in (1, few, few + 1)] == ["triton", "triton", "hopper"]
    assert memory is not None
    assert [each.buffer for each in memory.buffers] == list(SITES[Fabric.PEER].buffers(call))
    dispatch, combine = (each.buffer.num_bytes for each in memory.buffers)
    assert dispatch == 2 * 8192 * (CHOSEN * 8 + 2 * HIDDEN) and combine == 8192 * CHOSEN * 2 * HIDDEN
    values = dict(several.candidate.parameters)
    assert values["arena_bytes"] == dispatch + combine
    assert values["temporary_bytes"] == 2 * 8192 * CHOSEN * INNER * 2


def test_batches_of_their_own(machine: Machine) -> None:
    """The call is the same whatever batch a rank has, no CUDA graph holds it, and the hosts' meeting is charged."""
    assert machine.compiled is not None
    slow = replace(machine, compiled=replace(machine.compiled, host_us=5.0))
    texts, priced = set(), []
    for tokens in (0, 7, 600):
        context = context_of(slow)
        graph, site = site_of(context, tokens, same=False)
        counts = site.site.tokens
        assert counts == TokenCounts(Config().batch_tokens, most=Config().max_tokens)
        found = proposals(site, counts, context)
        assert all(not each.candidate.rejections for each in found.values())
        chosen = Chosen(site, found["hopper"])
        assert MoeSharded().memory(chosen, context) is None, "ranks reserve it in their first call"
        MoeSharded().replace(graph, chosen, Placement({}), context)
        [text] = {str(node.args[-1]) for node in graph.nodes if node.target is OP.default}
        texts.add(text)
        priced.append(found["hopper"].candidate)
    assert len(texts) == 1 and len(set(priced)) == 1
    call = decode(ExpertExchangeCall, texts.pop())
    assert (call.fabric, call.max_tokens, call.timeout_s) == (
        Fabric.PEER, Config().max_tokens, max(Config().timeout_s, Config().compile_timeout_s)
    )  # fmt: skip
    assert 0 < call.few_tokens < 8192, "of the rank that has most, call by call"
    same, own = ({term.name: term.us for term in each.terms} for each in (_estimate_of(slow), priced[0].estimate))
    assert own["host"] == pytest.approx(8 / 6 * same["host"]) and own.keys() == same.keys()


def _estimate_of(machine: Machine) -> Estimate:
    """Estimate for equally many tokens on all ranks."""
    context = context_of(machine)
    counts = TokenCounts(Config().batch_tokens, most=Config().max_tokens)
    estimate = proposals(site_of(context, Config().batch_tokens)[1], counts, context)["hopper"].candidate.estimate
    assert estimate is not None
    return estimate
