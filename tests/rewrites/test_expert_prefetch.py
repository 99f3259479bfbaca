"""The rule `expert_prefetch`: what it proposes, when it is chosen, and what speaks against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from tests.graphs import profiles
from tests.graphs.preview import previewed
from tests.measure.test_families import own_kernels
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.cost_model.exchange import ShardedMixture, pushed_parts
from weaveopt.cost_model.imbalance import busiest_over_mean, expected_maximum
from weaveopt.cost_model.machine import Curve, Point
from weaveopt.cost_model.mixture import Mixture
from weaveopt.cost_model.prefetch import (
    IN_PLACE,
    READS,
    ahead_parts,
    in_place_parts,
    layer_missing_bytes,
    missing_bytes,
    pulled_us,
    read_parts,
)
from weaveopt.fabrics import exported
from weaveopt.fabrics.rows_call import decode
from weaveopt.measure.cases import FAMILIES
from weaveopt.measure.cases.experts.reads import ACTIVE, EXPERT_BYTES, ExpertReads
from weaveopt.measure.cases.reduction.peer import PeerKernels
from weaveopt.measure.clock import Sample
from weaveopt.measure.draft import Draft
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall, PrefetchForm, experts_call
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Candidate, Fabric
from weaveopt.records.report import Decision, GraphReport
from weaveopt.records.skew import Skew
from weaveopt.rewrites.expert_prefetch.candidates import least_hiding

RULE, TOKENS = "expert_prefetch", "moe_sharded"
OP = torch.ops.weave.expert_prefetch.default
HIDDEN, INNER, EXPERTS, CHOICES = 64, 32, 4, 2
SMALL = Mixture(512, CHOICES, EXPERTS, HIDDEN, INNER, True, "bfloat16")


def make_call(world: int = 2, same_tokens: bool = False, independent: bool = False) -> ExpertExchangeCall:
    return ExpertExchangeCall(
        site="expert_exchange", group="0", fabric=Fabric.LIBRARY, world=world, hidden=HIDDEN, dtype="bfloat16",
        max_tokens=0, timeout_s=0.0, num_experts=EXPERTS, same_tokens=same_tokens, independent=independent,
    )  # fmt: skip


Fn = Callable[..., Tensor]


def exchange(call: ExpertExchangeCall) -> Fn:
    text = call.encode()

    def fn(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        exchanged: Tensor = torch.ops.weave.expert_exchange(x.sin(), experts, weights, gate_up, None, down, None, text)
        return exchanged + x

    return fn


def reported(
    call: ExpertExchangeCall, tokens: int = 16, dtype: torch.dtype = torch.bfloat16, **more: object
) -> GraphReport:
    inputs = (
        torch.zeros(tokens, HIDDEN, dtype=dtype),
        torch.zeros(tokens, CHOICES, dtype=torch.int64),
        torch.zeros(tokens, CHOICES),
        torch.zeros(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype),
        torch.zeros(EXPERTS, HIDDEN, INNER, dtype=dtype),
    )
    return previewed(exchange(call), inputs, **{"static": True, "force": (RULE,), **more})  # type: ignore[arg-type]


def candidates(decision: Decision, choice: str) -> list[Candidate]:
    return [each for each in (decision.chosen, *decision.alternatives) if each.choice == choice]


def codes(decision: Decision, choice: str, fabric: Fabric = Fabric.SHM) -> set[str]:
    own = (each for each in candidates(decision, choice) if each.fabric is fabric)
    return {reason.code for each in own for reason in each.rejections}


@pytest.mark.parametrize("independent", [False, True])
def test_the_operation_is_replaced_and_no_memory_is_planned(independent: bool, graphs: list[fx.Graph]) -> None:
    """The call is the same whatever batch a rank has."""
    texts = set()
    for tokens, more in ((24, {}), (7, {}), (9, {"static": False, "dynamic": True})):
        report = reported(make_call(independent=independent), tokens, **more)
        [decision] = report.decisions
        assert (decision.chosen.choice, decision.chosen.fabric) == (RULE, Fabric.SHM) and report.plans == ()
        [node] = [node for node in graphs[-1].nodes if node.target is OP]
        texts.add(str(node.args[-1]))
    [text] = texts
    call = decode(ExpertPrefetchCall, text)
    assert call.fabric is Fabric.SHM and call.form == PrefetchForm.IN_PLACE and call.choices == CHOICES
    assert call.independent is independent and call.site == make_call().site


def test_ranks_that_promise_nothing_exchange_no_tokens() -> None:
    [decision] = reported(make_call(independent=True), force=()).decisions
    assert "ranks_independent" in codes(decision, TOKENS)
    assert "independent ranks" in decision.site.description
    [other] = reported(make_call()).decisions
    assert "ranks_independent" not in codes(other, TOKENS)


def test_reasons_against_it() -> None:
    [many] = reported(make_call(9), world=9).decisions
    assert codes(many, RULE) == {"too_many_places"}
    with mock.patch.object(exported, "refusal", lambda group: "rank 1: no room"):
        [refused] = reported(make_call()).decisions
    assert codes(refused, RULE) == {"not_shared"}
    # Neither has the pulls' contention, nor reads of a peer's experts.
    contended = profiles.without("h200x4", READS)
    assert contended.contention is not None
    for machine in (
        replace(contended, contention=replace(contended.contention, copies=None)), cost_model.load("h100x8"),
    ):  # fmt: skip
        with profiles.found(machine):
            [on_gpus] = reported(make_call(), machine=machine.name, device="cuda").decisions
        in_place, ahead = on_peers(on_gpus)
        assert {why.code for why in in_place.rejections} == {"not_measured"} and in_place.estimate is None
        assert {why.code for why in ahead.rejections} == {"not_measured"}
        assert (ahead.estimate is None) == (machine.name == "h100x8")


def on_peers(decision: Decision) -> tuple[Candidate, Candidate]:
    """Forms `in_place` and `ahead` between GPUs."""
    found = {each.variant: each for each in candidates(decision, RULE) if each.fabric is Fabric.PEER}
    return found.pop("in_place"), found.pop("ahead")


def test_pulls_under_kernels_wait_for_a_profile_that_knows_power() -> None:
    """Ranks that call together keep sending tokens; independent ones cannot, and a forced rule is not asked."""
    on_gpus = {"machine": "h100x2", "device": "cuda", "tokens": 8192}
    [together] = reported(make_call(), **on_gpus, force=()).decisions
    assert {why.code for why in on_peers(together)[1].rejections} == {"power_not_measured"}
    for call, more in ((make_call(independent=True), {"force": ()}), (make_call(), {})):
        [decision] = reported(call, **on_gpus, **more).decisions
        assert (decision.chosen.choice, decision.chosen.fabric) == (RULE, Fabric.PEER)
        assert "power_not_measured" not in {why.code for each in on_peers(decision) for why in each.rejections}


AT_320_GB_PER_S = tuple(Point(1 << power, 20.0 + (1 << power) / 320e3) for power in range(18, 31, 2))


def with_reads(machine: Machine, points: tuple[Point, ...] = AT_320_GB_PER_S) -> Machine:
    """A profile with reads of a peer's experts."""
    origin = machine.origins[0][0]
    curve = Curve(origin, READS, IN_PLACE, 2, points)
    costs = tuple(
        replace(each, curves=(*each.curves, curve)) if each.fabric is Fabric.PEER else each
        for each in machine.fabric_costs
    )
    return replace(machine, fabric_costs=costs)


def test_gpus_read_in_place_where_that_was_measured(graphs: list[fx.Graph]) -> None:
    """Few rows go through Triton's kernels whatever the call names beyond."""
    found = with_reads(profiles.without("h200x4", READS))
    with mock.patch.object(cost_model, "load", lambda name: found):
        [decision] = reported(make_call(), machine="h200x4", device="cuda").decisions
    assert (decision.chosen.choice, decision.chosen.fabric) == (RULE, Fabric.PEER)
    assert decision.chosen.variant == "in_place" and decision.chosen.estimate is not None
    assert dict(decision.chosen.parameters)["bytes_by_weights"] == EXPERTS * 3 * INNER * HIDDEN * 2
    [node] = [node for node in graphs[-1].nodes if node.target is OP]
    call = decode(ExpertPrefetchCall, str(node.args[-1]))
    assert call.fabric is Fabric.PEER and call.form == PrefetchForm.IN_PLACE
    assert call.kernels == dict(decision.chosen.parameters)["kernels"]
    if call.kernels == "hopper":
        assert call.few_tokens == 4 * 2 * EXPERTS // CHOICES - 1
        assert experts_call(call).kernels_at(call.few_tokens) == "triton"
        assert experts_call(call).kernels_at(call.few_tokens + 1) == "hopper"
    with mock.patch.object(cost_model, "load", lambda name: found):
        [wide] = reported(
            replace(make_call(), dtype="float32"), machine="h200x4", device="cuda", dtype=torch.float32
        ).decisions
    assert "dtype_not_supported" in {why.code for why in on_peers(wide)[0].rejections}


def test_reads_of_peers_cost_what_the_curve_says() -> None:
    """A second tile of an expert's rows reads its weights again."""
    machine, few = with_reads(profiles.without("h200x4", READS)), ShardedMixture(replace(QWEN3_30B, tokens=64), 2)
    parts = read_parts(machine, Fabric.PEER, few, "")
    assert parts is not None and parts.reads > 0.0
    assert parts.experts + parts.reads == pytest.approx(20.0 + missing_bytes(few) / 320e3, rel=0.02)
    many = ShardedMixture(replace(QWEN3_30B, tokens=5000), 2)
    twice = read_parts(machine, Fabric.PEER, many, "")
    assert twice is not None
    assert twice.experts + twice.reads == pytest.approx(20.0 + 2 * missing_bytes(many) / 320e3, rel=0.02)
    assert read_parts(profiles.without("h200x4", READS), Fabric.PEER, few, "") is None


def test_the_report_says_what_travels() -> None:
    [decision] = reported(make_call()).decisions
    values = dict(decision.chosen.parameters)
    sharded = mixture(512, 2, SMALL)
    assert values["form"] == "in_place" and values["bytes_by_tokens"] == sharded.wire_bytes
    assert values["bytes_by_weights"] == missing_bytes(sharded) == EXPERTS * 3 * INNER * HIDDEN * 2
    assert (values["fetch_us"], values["exposed_us"], values["hidden_from_tokens"]) == (0.0, 0.0, 1)
    [on_gpus] = reported(make_call(), machine="h200x4", device="cuda").decisions
    _, ahead = on_peers(on_gpus)
    found = dict(ahead.parameters)
    assert found["form"] == "ahead" and found["fetch_us"] >= found["exposed_us"] >= 0.0
    assert found["hidden_from_tokens"] >= 1 and ahead.estimate is not None


def mixture(tokens: int, world: int, of_rank: Mixture | None = None, skew: Skew | None = None) -> ShardedMixture:
    known = of_rank or Mixture(tokens, 2, 4, 2048, 1408, True, "float32")
    found = ShardedMixture(replace(known, tokens=tokens), world)
    return found if skew is None else replace(found, skew=skew)


def in_place_us(machine: Machine, sharded: ShardedMixture) -> float:
    parts = in_place_parts(machine, sharded)
    return parts.experts + parts.memory + parts.host


def test_it_pays_where_routing_is_skewed_and_not_where_it_is_even() -> None:
    machine = cost_model.load("cpu")
    for tokens in (512, 2048):
        even, uneven = mixture(tokens, 2), mixture(tokens, 2, skew=Skew(0.9, 0.125))
        by_tokens = [pushed_parts(machine, Fabric.SHM, each, 1) for each in (even, uneven)]
        assert all(by_tokens)
        first, second = (sum(vars(each).values()) for each in by_tokens if each is not None)
        assert in_place_us(machine, even) > first, tokens
        assert in_place_us(machine, uneven) < second, tokens


def test_pulling_costs_the_copies_beyond() -> None:
    machine, sharded = cost_model.load("cpu"), mixture(64, 2)
    copies = cost_model.memory_us(machine, 2 * missing_bytes(sharded))
    assert pulled_us(machine, sharded) == pytest.approx(in_place_us(machine, sharded) + copies)


def test_the_busiest_of_several_ranks() -> None:
    """Known means of the largest of n standard normal numbers."""
    for count, mean in ((1, 0.0), (2, 0.56419), (3, 0.84628), (4, 1.02938), (8, 1.42360)):
        assert expected_maximum(count) == pytest.approx(mean, abs=1e-5)
    assert busiest_over_mean(0.2, 2) == pytest.approx(1.112838)


def test_imbalance_is_charged_to_what_waits() -> None:
    machine = cost_model.load("cpu")
    uneven = replace(machine, imbalance=0.5)
    sharded = mixture(512, 2)
    even = pushed_parts(machine, Fabric.SHM, sharded, 1, 1000.0)
    charged = pushed_parts(uneven, Fabric.SHM, sharded, 1, 1000.0)
    assert even is not None and charged is not None
    assert even.waiting == 0.0 and charged.waiting == pytest.approx(500 * 0.56419, rel=1e-4)
    assert charged.experts == even.experts and charged.combine > even.combine
    assert in_place_us(uneven, sharded) == in_place_us(machine, sharded)


def test_imbalance_of_the_options_reaches_the_baseline() -> None:
    first, second = (
        reported(make_call(), config=Config(imbalance=imbalance)).decisions[0].baseline for imbalance in (0.0, 0.5)
    )
    assert first is not None and second is not None and second.us > first.us


def test_the_least_count_that_hides() -> None:
    for wanted in (1, 37, 5000):
        found = least_hiding(lambda tokens: tokens >= wanted)  # noqa: B023
        assert found is not None and wanted <= found <= max(wanted * 1.03, wanted + 1)
    assert least_hiding(lambda _: False) is None


QWEN3_30B = Mixture(8192, 8, 64, 2048, 768, True, "bfloat16")


def test_a_fetch_takes_what_the_link_gives() -> None:
    """Bytes of a layer that a rank lacks, as the note's table has them: 0.60 GB and 1.66 ms with two ranks."""
    machine, sharded = cost_model.load("h200x4"), ShardedMixture(QWEN3_30B, 2)
    assert layer_missing_bytes(sharded) == pytest.approx(0.604e9, rel=0.01)
    parts = ahead_parts(machine, sharded, "hopper", 0.0)
    assert parts is not None and parts.fetch == pytest.approx(1660, rel=0.02)
    assert parts.exposed == pytest.approx(max(parts.fetch - parts.experts, 0.0))
    hidden = ahead_parts(machine, sharded, "hopper", 1e6)
    assert hidden is not None and hidden.exposed == 0.0


def test_calibrate_writes_what_the_rule_reads() -> None:
    rows = [(each * EXPERT_BYTES, Sample(20.0 + each * 30.0, 0.01)) for each in ACTIVE]
    draft = Draft(torch.device("cpu"), 2, None)
    for each in (*own_kernels(), PeerKernels({(2, 4096, KernelRow(0, Algorithm.TWO_SHOT, Transfer.BULK, 16)): rows}),
                 ExpertReads({2: rows})):  # fmt: skip
        each.write(draft)
    [costs] = [each for each in draft.machine("made_up").fabric_costs if each.fabric is Fabric.PEER]
    [curve] = costs.curves_of(READS, IN_PLACE)
    assert [(point.bytes, point.us) for point in curve.points] == [(size, sample.us) for size, sample in rows]
    assert ExpertReads in FAMILIES
