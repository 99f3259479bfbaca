"""The rule `expert_prefetch` on GPUs that fetch a layer ahead: its price, its report and its call."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from tests.graphs import profiles
from tests.graphs.preview import previewed
from tests.rewrites.test_expert_prefetch import (
    CHOICES,
    EXPERTS,
    HIDDEN,
    INNER,
    OP,
    QWEN3_30B,
    RULE,
    SMALL,
    make_call,
    mixture,
    reported,
    with_reads,
)
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.cost_model.exchange import ShardedMixture
from weaveopt.cost_model.machine import Contention, CopyContention, Point
from weaveopt.cost_model.mixture import Mixture
from weaveopt.cost_model.prefetch import READS, ahead_parts, cached_bytes, layer_missing_bytes, read_parts
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall, PrefetchForm, experts_call
from weaveopt.records.candidate import Candidate, Fabric
from weaveopt.rewrites.expert_prefetch.candidates import least_hiding

CALL = ExpertPrefetchCall(
    site="", group="0", fabric=Fabric.PEER, world=2, hidden=HIDDEN, dtype="bfloat16", max_tokens=0, timeout_s=0.0
)


def with_pulls(machine: Machine, slowdown: float = 1.05) -> Machine:
    """A profile that says how much pulls slow GEMMs down."""
    assert machine.copy_engine is not None
    before = machine.contention or Contention(machine.copy_engine.origin, ())
    return replace(machine, contention=replace(before, copies=CopyContention(slowdown, 1.0)))


def fetched_ahead(machine: Machine, graphs: list[fx.Graph], **more: object) -> tuple[Candidate, ExpertPrefetchCall]:
    with mock.patch.object(cost_model, "load", lambda name: machine):
        [decision] = reported(make_call(), machine="h200x4", device="cuda", **more).decisions
    assert (decision.chosen.choice, decision.chosen.variant) == (RULE, "ahead"), decision
    [node] = [node for node in graphs[-1].nodes if node.target is OP]
    return decision.chosen, decode(ExpertPrefetchCall, str(node.args[-1]))


def test_gpus_fetch_ahead_where_pulls_and_what_they_slow_down_were_measured(graphs: list[fx.Graph]) -> None:
    machine = with_pulls(profiles.without("h200x4", READS))
    chosen, call = fetched_ahead(machine, graphs)
    assert call.fabric is Fabric.PEER and call.form == PrefetchForm.AHEAD and call.last
    assert (call.in_place_tokens, call.cache_bytes) == (0, 0)
    missing, found = layer_missing_bytes(mixture(512, 2, SMALL)), dict(chosen.parameters)
    assert (found["slot_bytes"], found["first_layer_bytes"], found["cache_bytes"]) == (2 * missing, missing, 0)
    assert found["bytes_by_weights"] == missing and found["kernels"] == call.kernels
    assert found["fetch_us"] == pytest.approx(found["hidden_us"] + found["exposed_us"], abs=0.2)
    chosen, call = fetched_ahead(machine, graphs, config=Config(expert_cache_bytes=missing // 2 + 100, force=(RULE,)))
    found = dict(chosen.parameters)
    assert call.cache_bytes == missing // 2 + 100 and found["cache_bytes"] == missing // 2 == found["slot_bytes"] // 2
    chosen, _ = fetched_ahead(machine, graphs, config=Config(expert_cache_bytes=1 << 40, force=(RULE,)))
    found = dict(chosen.parameters)
    assert (found["slot_bytes"], found["bytes_by_weights"], found["fetch_us"], found["exposed_us"]) == (0, 0, 0, 0)


def test_few_tokens_are_read_in_place_by_this_ranks_own_count() -> None:
    """From the count on at which reads of the chosen experts take longer than a fetch of all that is not hidden."""
    machine, whole = (
        with_pulls(with_reads(profiles.without("h200x4", READS))),
        Mixture(512, 8, 64, 2048, 768, True, "bfloat16"),
    )
    ahead, read = (
        {
            tokens: of(ShardedMixture(replace(whole, tokens=tokens), 2))
            for tokens in (1, 8, 64, 8192)
        }
        for of in (
            lambda asked: ahead_parts(machine, asked, "", 0.0),
            lambda asked: read_parts(machine, Fabric.PEER, asked, ""),
        )
    )  # fmt: skip
    for tokens, in_place in ((1, True), (8192, False)):
        pulled_ahead, in_peers = ahead[tokens], read[tokens]
        assert pulled_ahead is not None and in_peers is not None
        ahead_us = pulled_ahead.experts + pulled_ahead.contention + pulled_ahead.exposed
        assert (in_peers.experts + in_peers.reads < ahead_us) is in_place, tokens


def test_the_form_by_token_count_is_in_the_call(graphs: list[fx.Graph]) -> None:
    """Pulls start slowly and kernels read few bytes fast: the fewest tokens are read in place."""
    points = (Point(1 << 10, 20.0), Point(1 << 14, 60.0), Point(1 << 16, 4000.0))
    machine = with_pulls(with_reads(profiles.without("h200x4", READS), points))
    assert machine.copy_engine is not None
    chosen, call = fetched_ahead(replace(machine, copy_engine=replace(machine.copy_engine, latency_us=300.0)), graphs)
    assert 0 < call.in_place_tokens < 512 and dict(chosen.parameters)["in_place_tokens"] == call.in_place_tokens


def test_the_last_half_of_a_batch_frees_the_slot(graphs: list[fx.Graph]) -> None:
    text = make_call().encode()

    def halves(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        def exchanged(part: Tensor, gates: Tensor) -> Tensor:
            found: Tensor = torch.ops.weave.expert_exchange(
                part.sin(), experts, weights, gates.transpose(1, 2), None, down, None, text
            )
            return found

        return exchanged(x, gate_up) + exchanged(x + 1, gate_up)

    inputs = (
        torch.zeros(16, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(16, CHOICES, dtype=torch.int64),
        torch.zeros(16, CHOICES),
        torch.zeros(EXPERTS, HIDDEN, 2 * INNER, dtype=torch.bfloat16),
        torch.zeros(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16),
    )
    previewed(halves, inputs, static=True, force=(RULE,))
    nodes = [node for node in graphs[-1].nodes if node.target is OP]
    assert [decode(ExpertPrefetchCall, str(node.args[-1])).last for node in nodes] == [False, True]


def test_half_of_the_missing_experts_in_the_cache_halves_the_break_even() -> None:
    """Tokens from which nothing is exposed, by a window that grows with the tokens as Qwen3-30B's attention does."""
    machine = with_pulls(profiles.without("h200x4", READS))

    def least(cache_bytes: int) -> int:
        def hides(tokens: int) -> bool:
            asked = ShardedMixture(replace(QWEN3_30B, tokens=tokens), 2)
            parts = ahead_parts(machine, asked, "hopper", 0.08 * tokens, cache_bytes)
            return parts is not None and parts.exposed <= 0.0

        found = least_hiding(hides)
        assert found is not None
        return found

    missing = layer_missing_bytes(ShardedMixture(QWEN3_30B, 2))
    assert least(missing // 2) <= 0.6 * least(0) and least(missing) < least(missing // 2)
    assert cached_bytes(ShardedMixture(QWEN3_30B, 2), missing // 64 + 1) == missing // 64
    assert cached_bytes(ShardedMixture(QWEN3_30B, 2), missing // 64 - 1) == 0


def test_kernels_of_many_rows_run_from_their_least_count_on() -> None:
    for few, many, wanted in ((0, 0, "hopper"), (9, 0, "hopper"), (9, 100, "wide"), (0, 1, "hopper")):
        found = experts_call(replace(CALL, kernels="hopper", few_tokens=few, wide_tokens=many))
        assert found.kernels_at(10**6) == wanted
        assert found.kernels_at(max(few, 1)) == ("triton" if few else "hopper")
        assert found.kernels_at(50) == "hopper"
