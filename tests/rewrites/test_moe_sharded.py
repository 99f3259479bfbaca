"""The rule `moe_sharded`: what it takes and leaves, with which reasons, at what price, and with how much memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from torch import Tensor

import weaveopt.ops  # noqa: F401
from tests.graphs import profiles
from tests.graphs.preview import previewed
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model.exchange import (
    ShardedMixture,
    experts_us,
    library_exchange_us,
    synchronize_us,
)
from weaveopt.cost_model.mixture import Mixture
from weaveopt.fabrics import topology
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.sharded.op import SITES
from weaveopt.records.candidate import LEAVE, Fabric
from weaveopt.records.report import Decision, GraphReport
from weaveopt.records.site import TokenCounts
from weaveopt.records.skew import Skew
from weaveopt.rewrites.moe_sharded import RULE, MoeSharded
from weaveopt.rule import Context, FoundSite
from weaveopt.sites.mixture.exchange_matcher import ExchangeMatcher

OP = torch.ops.weave.expert_exchange.default
HIDDEN, INNER, EXPERTS, CHOICES = 64, 32, 4, 2


def make_call(world: int = 2, same_tokens: bool = True) -> ExpertExchangeCall:
    return ExpertExchangeCall(
        site="expert_exchange", group="0", fabric=Fabric.LIBRARY, world=world, hidden=HIDDEN, dtype="bfloat16",
        max_tokens=0, timeout_s=0.0, num_experts=EXPERTS, same_tokens=same_tokens,
    )  # fmt: skip


def inputs_of(tokens: int) -> tuple[Tensor, ...]:
    return (
        torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(tokens, CHOICES, dtype=torch.int64),
        torch.zeros(tokens, CHOICES),
        torch.zeros(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16),
    )


def reported(
    tokens: int = 16, force: bool = True, call: ExpertExchangeCall | None = None, **more: object
) -> GraphReport:
    text = (call or make_call()).encode()

    def fn(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        exchanged: Tensor = torch.ops.weave.expert_exchange(x.sin(), experts, weights, gate_up, None, down, None, text)
        return exchanged + x

    forced = (RULE,) if force else ()
    return previewed(fn, inputs_of(tokens), force=forced, **{"static": True, **more})  # type: ignore[arg-type]


def sharded_of(tokens: int, world: int) -> ShardedMixture:
    return ShardedMixture(Mixture(tokens, CHOICES, EXPERTS, HIDDEN, INNER, True, "bfloat16"), world)


def codes(decision: Decision, fabric: Fabric) -> list[str]:
    own = (each for each in decision.alternatives if each.choice == RULE and each.fabric is fabric)
    return [reason.code for each in own for reason in each.rejections]


def test_the_call_gets_a_fabric_and_its_memory(graphs: list[fx.Graph]) -> None:
    report = reported(tokens=24)
    [decision] = report.decisions
    assert (decision.chosen.choice, decision.chosen.fabric) == (RULE, Fabric.SHM)
    assert ("batches", 1) in decision.chosen.parameters, "nothing is saved by reading the weights twice"
    [node] = [node for node in graphs[0].nodes if node.target is OP]
    call = decode(ExpertExchangeCall, str(node.args[-1]))
    want = replace(
        make_call(), site=decision.site.id, fabric=Fabric.SHM, max_tokens=24, choices=CHOICES, batches=1,
        timeout_s=Config().timeout_s,
    )  # fmt: skip
    assert call == want
    [plan] = report.plans
    sizes = {buffer.name: buffer.num_bytes for buffer in plan.buffers}
    assert sizes == {buffer.name: buffer.num_bytes for buffer in SITES[Fabric.SHM].buffers(call)}
    assert set(sizes) == {"moe_dispatch", "moe_combine"} and plan.fabric is Fabric.SHM


def test_a_call_that_has_a_fabric_is_no_site() -> None:
    call = replace(make_call(), fabric=Fabric.SHM, max_tokens=16, choices=CHOICES)
    assert reported(call=call).decisions == ()


def test_what_is_left_says_why() -> None:
    [alone] = reported(call=make_call(world=1), world=1).decisions
    assert [each.code for each in alone.site.rejections] == ["one_rank"]
    [other] = reported(call=make_call(world=4)).decisions
    assert [each.code for each in other.site.rejections] == ["group_not_known"]


def test_batches_of_their_own(graphs: list[fx.Graph]) -> None:
    """The call and the decision are the same whatever batch a rank has, and the graph plans no memory."""
    texts, found = set(), set()
    for tokens, more in ((24, {}), (7, {}), (9, {"static": False, "dynamic": True})):
        report = reported(tokens, call=make_call(same_tokens=False), **more)
        [decision] = report.decisions
        assert (decision.chosen.choice, decision.chosen.fabric) == (RULE, Fabric.SHM) and report.plans == ()
        assert decision.site.tokens == TokenCounts(Config().batch_tokens, most=Config().max_tokens)
        found.add((decision.chosen, decision.baseline))
        [node] = [node for node in graphs[-1].nodes if node.target is OP]
        texts.add(str(node.args[-1]))
    assert len(found) == 1, found
    [text] = texts
    call = decode(ExpertExchangeCall, text)
    assert call.site == make_call().site and call.max_tokens == Config().max_tokens
    assert call.timeout_s == Config().compile_timeout_s and call.arena_bytes == Config().arena_bytes


def test_parameters_say_what_travels() -> None:
    [decision] = reported(tokens=100).decisions
    sharded = sharded_of(100, 2)
    values = dict(decision.chosen.parameters)
    assert values["rows"] == 200 and values["active_experts"] == EXPERTS
    assert values["wire_bytes"] == sharded.wire_bytes == (50 + 25 + 100) * 2 * HIDDEN
    [plan] = reported(tokens=100).plans
    assert values["arena_bytes"] == sum(buffer.num_bytes for buffer in plan.buffers)


def test_every_fabric_has_its_reasons() -> None:
    [decision] = reported().decisions
    assert codes(decision, Fabric.TCP) == ["fabric_needs_hosts", "no_kernel"] * 2
    assert codes(decision, Fabric.MULTIMEM)[-1] == "no_kernel"
    assert codes(decision, Fabric.PEER) == ["fabric_needs_cuda", "fabric_not_on_machine"] * 2
    with profiles.found(profiles.without("h200x4", "expert_exchange", "expert_reads")):
        [on_gpus] = reported(machine="h200x4", device="cuda", disable=("expert_prefetch",)).decisions
    assert on_gpus.chosen.choice == LEAVE and codes(on_gpus, Fabric.PEER) == ["not_measured"] * 2


def test_tokens_that_are_no_number(graphs: list[fx.Graph]) -> None:
    [decision] = reported(static=False, dynamic=True).decisions
    assert decision.chosen.choice == RULE and decision.site.tokens.most == Config().max_tokens
    [node] = [node for node in graphs[0].nodes if node.target is OP]
    assert decode(ExpertExchangeCall, str(node.args[-1])).max_tokens == Config().max_tokens


@pytest.mark.parametrize("world", [2, 4])
def test_never_slower_by_price(world: int) -> None:
    """A rewritten site saves more than the model's own error; the experts are the same with and without the rule, but
    for the passes of each batch."""
    for tokens in (1, 64, 2048):
        alone = ("expert_prefetch",)
        [decision] = reported(tokens, force=False, call=make_call(world), world=world, disable=alone).decisions
        assert decision.baseline is not None
        every = (decision.chosen, *decision.alternatives)
        candidates = [each for each in every if each.choice == RULE and each.fabric is Fabric.SHM]
        estimates = [each.estimate for each in candidates]
        assert len(estimates) == 2 and all(estimates)
        saves = any(each is not None and each.us_with_margin < decision.baseline.us for each in estimates)
        assert saves == (decision.chosen.choice == RULE), tokens
        machine = cost_model.load("cpu")
        sharded = sharded_of(tokens, world)
        slowdown = machine.oversubscription(world, 1)
        for each in candidates:
            assert each.estimate is not None
            terms, batches = {term.name: term.us for term in each.estimate.terms}, dict(each.parameters)["batches"]
            assert isinstance(batches, int)
            assert terms["experts"] == pytest.approx(experts_us(machine, sharded, batches) * slowdown)
        assert decision.baseline.us > experts_us(machine, sharded) * slowdown + library_exchange_us(machine, sharded)


def test_rows_are_counted_once_for_each_destination() -> None:
    sharded = sharded_of(100, 2)
    assert sharded.rows_sent == pytest.approx(75), "a token misses the other rank with probability 1/4"
    assert sharded.rows_returned == pytest.approx(100)
    assert replace(sharded, of_rank=replace(sharded.of_rank, choices=50)).rows_sent == pytest.approx(100)
    assert replace(sharded, world=1).rows_sent == 0


def test_all_wait_for_the_busiest_rank() -> None:
    """Half of the choices are of a quarter of the experts, which are one rank's."""
    mixture = Mixture(100, 2, 8, HIDDEN, INNER, True, "bfloat16")
    even, uneven = ShardedMixture(mixture, 4), ShardedMixture(mixture, 4, Skew(0.5, 0.25))
    assert (even.of_busiest.rows, uneven.of_busiest.rows) == (200, 400) and even.of_busiest == mixture
    assert uneven.rows_returned == pytest.approx(2 * even.rows_returned) == 300
    assert uneven.rows_sent == pytest.approx(300 * (1 - 0.5**2)) and even.rows_sent == pytest.approx(
        300 * (1 - 0.75**2)
    )
    spread = ShardedMixture(mixture, 4, Skew(0.5, 0.125)).of_busiest
    assert spread.rows == round(800 * (0.5 + 4 * 0.5 / 28)) and spread.rows_of_expert[1] == pytest.approx(100, abs=0.1)
    machine = cost_model.load("cpu")
    assert experts_us(machine, uneven) > experts_us(machine, even)


def test_what_was_not_measured_is_not_used() -> None:
    machine = cost_model.load("cpu")
    bare = replace(machine, fabric_costs=tuple(replace(each, curves=()) for each in machine.fabric_costs))
    mixture = sharded_of(8, 2)
    assert synchronize_us(machine, Fabric.SHM, mixture) and synchronize_us(bare, Fabric.SHM, mixture) is None
    graph = fx.Graph()
    nodes = []
    for name, value in zip(("x", "experts", "weights", "gate_up", "down"), inputs_of(8), strict=True):
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = value
    x, experts, weights, gate_up, down = nodes
    call = graph.call_function(OP, (x, experts, weights, gate_up, None, down, None, make_call().encode()))
    call.meta["val"] = inputs_of(8)[0]
    for profile, found in ((machine, []), (bare, ["not_measured"])):
        context = Context(Config(), profile, {"0": topology.fake(2)})
        [site] = ExchangeMatcher().find(graph, context)
        assert isinstance(site, FoundSite)
        proposals = MoeSharded().propose(site, TokenCounts(8), context)
        [first, _] = [each.candidate for each in proposals if each.candidate.fabric is Fabric.SHM]
        assert [reason.code for reason in first.rejections] == found
        usable = MoeSharded().propose(site, TokenCounts(8), context, usable_only=True)
        assert bool(usable) != bool(found)
