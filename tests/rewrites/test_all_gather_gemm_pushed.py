"""`all_gather_gemm` on GPUs: which sites get which variant at what price, and the rewritten graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from tests.graphs.functional_collectives import all_gather_single
from tests.graphs.overlapped_gemms import HIDDEN, MESSAGE_BYTES, TOKENS, Reported, alone, fused, on_peer, rows, toy
from weaveopt.cost_model import Gemm, gemm_us, memory_us
from weaveopt.cost_model.machine import Curve
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.errors import ProfileError
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.gemm_comm.all_gather import pushed
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER, AllGatherGemmCall
from weaveopt.ops.gemm_comm.all_gather.pushed import price, size_refused
from weaveopt.records.candidate import LEAVE, Fabric, Rejection
from weaveopt.records.site import TokenCounts

RULE = "all_gather_gemm"
OP = torch.ops.weave.all_gather_gemm.default
WIDTH = 4096
ONE, FOUR = TileConfig(256, 1), TileConfig(256, 4)


def curve(us: float, width: int, cut: TileConfig = ONE) -> Curve:
    return fused(us, RULE, ALL_GATHER.name_of(cut, width))


def copied(us: float) -> Curve:
    return alone(us, "all_gather", "copies")


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return all_gather_single(x, dim, dist.group.WORLD)


def up(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(gather(x), w)


def test_names_of_curves() -> None:
    name = ALL_GATHER.name_of(FOUR, 4096)
    assert name == "pushed columns=256 pairs=4 n=4096"
    assert ALL_GATHER.parse(name) == ("pushed", FOUR, 4096)
    assert ALL_GATHER.parse(name.replace(" n", " spare=2 pieces=1 n")) == ("pushed", FOUR, 4096), "as profiles had it"
    assert ALL_GATHER.config_of(str(ONE)) == ONE and str(ONE) != str(FOUR)
    for wrong in (
        "pushed columns=64 pairs=1 n=64",
        "pushed columns=256 pairs=0 n=64",
        "pushed columns=256 pairs=1 ctas=2 n=64",
        "pushed columns=256 pairs=1 spare=2 pieces=2 n=64",
        f"pushed {ONE}",
        f"pushed {ONE} n=0",
    ):
        with pytest.raises(ProfileError, match="a curve of all_gather_gemm") as caught:
            ALL_GATHER.parse(wrong)
        assert "\n" not in str(caught.value) and "--only pushed_gathers" in str(caught.value)


def test_the_widest_gemm_has_the_gather_and_the_others_follow() -> None:
    machine = toy(curve(200.0, 512), curve(700.0, 8192), curve(250.0, 512, FOUR), curve(600.0, 8192, FOUR))
    other = Gemm(TOKENS, HIDDEN, 256)
    for width, want_cut, want_us in ((512, ONE, 200.0), (8192, FOUR, 600.0)):
        for output in (False, True):
            gemms = (Gemm(TOKENS, HIDDEN, width), other)[:: -1 if output else 1]
            found = price(machine, Fabric.PEER, gemms, "bfloat16", 4, output)
            assert not isinstance(found, Rejection)
            cut, estimate = found
            terms = {term.name: term.us for term in estimate.terms}
            assert cut == want_cut
            assert terms["gemm"] + terms["exposed"] == pytest.approx(want_us + gemm_us(machine, other, "bfloat16"))
            assert terms["synchronize"] == memory_us(machine, 1)
            assert terms.get("rows", 0.0) == (memory_us(machine, 2 * MESSAGE_BYTES) if output else 0.0)
    for tokens, world, code in ((TOKENS, 2, "not_measured"), (TOKENS * 64, 4, "beyond_measured")):
        refused = price(machine, Fabric.PEER, (Gemm(tokens, HIDDEN, 512),), "bfloat16", world, False)
        assert isinstance(refused, Rejection) and refused.code == code


def test_more_columns_may_begin_another_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = toy(curve(200.0, 4096), curve(400.0, 8192))
    waves = {4096: 1, 5120: 2, 8192: 2, 16384: 5}
    monkeypatch.setattr(
        pushed,
        "_native",
        SimpleNamespace(product_waves=lambda tokens, columns, *_: waves[columns], GATHER_SPARE_CTAS=2),
    )
    for width, want_us in ((4096, 200.0), (5120, 400.0), (8192, 400.0), (16384, 1000.0)):
        found = price(machine, Fabric.PEER, (Gemm(TOKENS, HIDDEN, width),), "bfloat16", 4, False)
        assert not isinstance(found, Rejection)
        terms = {term.name: term.us for term in found[1].terms}
        assert terms["gemm"] + terms["exposed"] == pytest.approx(want_us), width


def test_it_is_chosen_where_it_was_measured_fast(reported: Reported, graphs: list[fx.Graph]) -> None:
    inputs = rows(TOKENS // 4, HIDDEN), rows(WIDTH, HIDDEN)
    baseline = reported(up, inputs).decisions[0].baseline
    assert baseline is not None
    report = reported(up, inputs, curve(baseline.us / 3, 512), curve(baseline.us / 2, 8192))
    [decision] = report.decisions
    assert (decision.chosen.choice, decision.chosen.fabric, decision.chosen.variant) == (RULE, Fabric.PEER, "pushed")
    assert dict(decision.chosen.parameters)["group_pairs"] == 1
    [node] = [node for node in graphs[-1].nodes if node.target is OP]
    call = decode(AllGatherGemmCall, str(node.args[-1]))
    assert (call.fabric, ALL_GATHER.config_of(call.cut), call.max_tokens) == (Fabric.PEER, ONE, TOKENS)
    [plan] = report.plans
    [buffer] = plan.buffers
    assert buffer.name == "gathered" and buffer.num_bytes >= MESSAGE_BYTES
    slow = curve(baseline.us, 512), curve(3 * baseline.us, 8192)
    assert reported(up, inputs, *slow).decisions[0].chosen.choice == LEAVE
    # The other variant competes by its own curve.
    found = reported(up, inputs, *slow, copied(5.0))
    assert found.decisions[0].chosen.variant == "copies"
    [node] = [node for node in graphs[-1].nodes if node.target is OP]
    assert decode(AllGatherGemmCall, str(node.args[-1])).cut == ""


def test_what_the_kernel_does_not_take_comes_behind_all_rows(reported: Reported) -> None:
    def stored_otherwise(x: Tensor, w: Tensor) -> Tensor:
        return gather(x) @ w

    def sequences(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.linear(gather(x, 1), w)

    def added(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, gather(x), w.t())

    known = curve(1.0, 512), curve(1.0, 8192), copied(1.0)
    shard, weight = rows(256, HIDDEN), rows(512, HIDDEN)
    for fn, inputs, code in (
        (stored_otherwise, (shard, rows(HIDDEN, 512)), "weight_layout"),
        (sequences, (rows(2, 128, HIDDEN), weight), "blocks_not_supported"),
        (added, (shard, weight, rows(1024, 512)), "addend_not_supported"),
        (up, (shard, rows(508, HIDDEN)), "row_not_supported"),
        (up, (rows(256, 508), rows(512, 508)), "row_not_supported"),
        (up, (shard.float(), weight.float()), "dtype_not_supported"),
    ):
        found = on_peer(reported(fn, inputs, *known, force=(RULE,)))
        refused = [reason.code for reason in found["pushed"].rejections]
        assert refused in ([code], [code, "beyond_measured"]), fn.__name__
        assert not found["copies"].rejections, fn.__name__


def test_token_counts_that_are_not_for_the_kernel() -> None:
    gemms = (Gemm(512, HIDDEN, 512),)
    assert not list(size_refused(gemms, "bfloat16", TokenCounts(512)))
    [reason] = size_refused(gemms, "bfloat16", TokenCounts(512, 1, 1024))
    assert reason.code == "symbolic_tokens"
