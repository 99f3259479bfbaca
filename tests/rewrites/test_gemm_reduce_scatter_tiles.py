"""`gemm_reduce_scatter` on GPUs: which sites get which variant at what price, and the rewritten graph."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from tests.graphs.functional_collectives import reduce_scatter_single
from tests.graphs.overlapped_gemms import HIDDEN, MESSAGE_BYTES, TOKENS, Reported, alone, fused, on_peer, rows, toy
from weaveopt.cost_model import Gemm
from weaveopt.cost_model.machine import Curve
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.errors import ProfileError
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER, GemmReduceScatterCall
from weaveopt.ops.gemm_comm.reduce_scatter.tiles import price, size_refused
from weaveopt.records.candidate import LEAVE, Fabric, Rejection
from weaveopt.records.site import TokenCounts

RULE = "gemm_reduce_scatter"
OP = torch.ops.weave.gemm_reduce_scatter.default
DEPTH = 4096
FEW, MANY = TileConfig(256, 1, 4), TileConfig(256, 2, 16)


def curve(us: float, depth: int, cut: TileConfig = FEW) -> Curve:
    return fused(us, RULE, REDUCE_SCATTER.name_of(cut, depth))


def summed(us: float) -> Curve:
    return alone(us, "reduce_scatter", "partials")


def scatter(x: Tensor, op: str = "sum", dim: int = 0) -> Tensor:
    return reduce_scatter_single(x, op, dim, dist.group.WORLD)


def down(x: Tensor, w: Tensor) -> Tensor:
    return scatter(torch.nn.functional.linear(x, w))


def test_names_of_curves() -> None:
    name = REDUCE_SCATTER.name_of(FEW, 4096)
    assert name == "tiles columns=256 pairs=1 ctas=4 k=4096"
    assert REDUCE_SCATTER.parse(name) == ("tiles", FEW, 4096)
    assert REDUCE_SCATTER.parse(name.replace(" k", " own_last=0 k")) == ("tiles", FEW, 4096), "as profiles had it"
    assert REDUCE_SCATTER.config_of(str(MANY)) == MANY
    for wrong in (
        "tiles columns=64 pairs=1 ctas=4 k=64",
        "tiles columns=256 pairs=1 ctas=3 k=64",
        "tiles columns=256 pairs=0 ctas=4 k=64",
        "tiles columns=256 pairs=1 ctas=4 own_last=1 k=64",
        f"tiles {FEW}",
        f"tiles {FEW} k=0",
    ):
        with pytest.raises(ProfileError, match="a curve of gemm_reduce_scatter") as caught:
            REDUCE_SCATTER.parse(wrong)
        assert "\n" not in str(caught.value) and "--only scattered_tiles" in str(caught.value)
    assert REDUCE_SCATTER.config_of(name) is None


def test_the_kernel_is_priced_by_the_fastest_cut_at_the_depth() -> None:
    machine = toy(curve(200.0, 512), curve(700.0, 8192), curve(250.0, 512, MANY), curve(600.0, 8192, MANY))
    for depth, want_cut, want_us in ((512, FEW, 200.0), (8192, MANY, 600.0)):
        found = price(machine, Fabric.PEER, Gemm(TOKENS, depth, HIDDEN), "bfloat16", 4)
        assert not isinstance(found, Rejection)
        cut, estimate = found
        terms = {term.name: term.us for term in estimate.terms}
        assert cut == want_cut
        assert terms["gemm"] + terms["exposed"] == pytest.approx(want_us)
        # The kernel's time is one reading; the library's GEMM that it is told against is no part of what it is off by.
        host = {term.name: term.error_us for term in estimate.terms}.get("host", 0.0)
        kernel = want_us * machine.relative_error / math.sqrt(2)
        assert estimate.error_us == pytest.approx(math.hypot(kernel, host))
    for size, world, code in ((TOKENS, 2, "not_measured"), (TOKENS * 64, 4, "beyond_measured")):
        refused = price(machine, Fabric.PEER, Gemm(size, 512, HIDDEN), "bfloat16", world)
        assert isinstance(refused, Rejection) and refused.code == code


def test_a_few_rows_more_may_take_a_wave_more() -> None:
    machine = toy(curve(200.0, 512), curve(700.0, 8192))

    def us(tokens: int) -> float:
        found = price(machine, Fabric.PEER, Gemm(tokens, 512, HIDDEN), "bfloat16", 4)
        assert not isinstance(found, Rejection)
        return sum(term.us for term in found[1].terms if term.name != "host")

    assert us(TOKENS) == pytest.approx(200.0)
    assert us(TOKENS + 4) > 1.2 * us(TOKENS)


def test_tiles_are_chosen_where_they_were_measured_fast(reported: Reported, graphs: list[fx.Graph]) -> None:
    inputs = rows(TOKENS, DEPTH), rows(HIDDEN, DEPTH)
    baseline = reported(down, inputs).decisions[0].baseline
    assert baseline is not None
    fast = curve(baseline.us / 3, 512), curve(baseline.us / 2, 8192)
    report = reported(down, inputs, *fast)
    [decision] = report.decisions
    assert (decision.chosen.choice, decision.chosen.fabric, decision.chosen.variant) == (RULE, Fabric.PEER, "tiles")
    assert dict(decision.chosen.parameters)["finisher_ctas"] == 4
    [node] = [node for node in graphs[-1].nodes if node.target is OP]
    call = decode(GemmReduceScatterCall, str(node.args[-1]))
    assert (call.fabric, REDUCE_SCATTER.config_of(call.cut), call.max_tokens) == (Fabric.PEER, FEW, TOKENS)
    [plan] = report.plans
    [buffer] = plan.buffers
    assert buffer.name == "staging" and buffer.num_bytes >= MESSAGE_BYTES
    slow = curve(baseline.us, 512), curve(3 * baseline.us, 8192)
    assert reported(down, inputs, *slow).decisions[0].chosen.choice == LEAVE
    # The other variant competes by its own curve.
    found = reported(down, inputs, *slow, summed(5.0))
    assert found.decisions[0].chosen.variant == "partials"
    [node] = [node for node in graphs[-1].nodes if node.target is OP]
    assert decode(GemmReduceScatterCall, str(node.args[-1])).cut == ""


def test_what_the_kernel_does_not_take_is_summed_behind_the_gemms(reported: Reported) -> None:
    def stored_otherwise(x: Tensor, w: Tensor) -> Tensor:
        return scatter(x @ w)

    def sequences(x: Tensor, w: Tensor) -> Tensor:
        return scatter(torch.nn.functional.linear(x, w), dim=1)

    def columns(x: Tensor, w: Tensor) -> Tensor:
        return scatter(torch.nn.functional.linear(x, w), dim=-1)

    def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return scatter(torch.nn.functional.linear(x, w, b))

    def two(x: Tensor, w: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        return scatter(linear(x, w) + linear(x.sin(), w))

    known = curve(1.0, 512), curve(1.0, 8192), summed(1.0)
    whole, weight = rows(1024, 512), rows(HIDDEN, 512)
    for fn, inputs, code in (
        (stored_otherwise, (whole, rows(512, HIDDEN)), "weight_layout"),
        (sequences, (rows(2, 512, 512), weight), "blocks_not_supported"),
        (columns, (whole, weight), "columns_not_supported"),
        (biased, (whole, weight, rows(HIDDEN)), "addend_not_supported"),
        (two, (whole, weight), "several_gemms"),
        (down, (rows(1024, 508), rows(HIDDEN, 508)), "depth_not_supported"),
        (down, (whole, rows(8196, 512)), "row_not_supported"),
        (down, (whole, rows(16384, 512)), "row_not_supported"),
        (down, (whole.float(), weight.float()), "dtype_not_supported"),
    ):
        found = on_peer(reported(fn, inputs, *known, force=(RULE,)))
        assert [reason.code for reason in found["tiles"].rejections] in ([code], [code, "beyond_measured"]), fn.__name__
        assert not found["partials"].rejections, fn.__name__


def test_token_counts_that_are_not_for_tiles() -> None:
    gemm = Gemm(512, 512, HIDDEN)
    for counts, found in (
        (TokenCounts(512), []),
        (TokenCounts(512, 1, 1024), ["symbolic_tokens"]),
        (TokenCounts(4 * 256 * 128 + 4), ["too_many_tokens"]),
    ):
        assert [reason.code for reason in size_refused(gemm, "bfloat16", 4, counts)] == found
