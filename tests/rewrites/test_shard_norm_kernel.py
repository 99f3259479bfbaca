"""`shard_norm` by the kernel that adds and normalizes the rows that it sums: what it takes, its price, its graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from tests.graphs import forms
from tests.graphs.overlapped_gemms import HIDDEN, TOKENS, Reported, alone, fused
from tests.graphs.shard_norm_graphs import (
    GATHER,
    SCATTER,
    SCATTER_NORM,
    block,
    calls,
    gather_calls,
    norm_calls,
    on,
    scatter_calls,
    zeros,
)
from weaveopt.cost_model.machine import Curve
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.graph.pattern import skip_shapes
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER, REDUCE_SCATTER_NORM
from weaveopt.ops.reduction.call import SumOut
from weaveopt.ops.reduction.call import decode as decode_reduction
from weaveopt.records.candidate import Fabric
from weaveopt.rewrites.shard_norm.candidates import RULE

OTHER = "all_reduce_rms_norm"
NORMED, TILES, PUSHED = TileConfig(256, 1, 4), TileConfig(256, 1, 4), TileConfig(256, 1)


def big(dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS, hidden: int = HIDDEN) -> tuple[Tensor, ...]:
    sizes = ((1, tokens, 2048), (1, tokens, hidden), (hidden, 2048), (hidden,), (3584, hidden))
    return tuple(zeros(*each, dtype=dtype) for each in sizes)


def curves(normed_us: float, tiles_us: float | None = 0.5) -> list[Curve]:
    """Curves of all halves that hide their exchange."""
    pushed = [fused(0.5, "all_gather_gemm", ALL_GATHER.name_of(PUSHED, n)) for n in (512, 8192)]
    normed = [fused(normed_us, REDUCE_SCATTER_NORM.op, REDUCE_SCATTER_NORM.name_of(NORMED, k)) for k in (512, 8192)]
    if tiles_us is None:
        return [*normed, *pushed]
    return [
        *normed,
        *(fused(tiles_us, "gemm_reduce_scatter", REDUCE_SCATTER.name_of(TILES, k)) for k in (512, 8192)),
        *pushed,
    ]


# --- prices -----------------------------------------------------------------------------------------------------------


def test_the_norm_is_taken_in_where_that_is_predicted_faster(reported: Reported) -> None:
    for normed_us, taken in ((1.0, True), (1e4, False)):
        [decision] = reported(block, big(), *curves(normed_us), force=(RULE,)).decisions
        assert decision.chosen.choice == RULE
        assert decision.chosen.variant == ("tiles norm, pushed" if taken else "tiles, pushed"), normed_us
        candidate, beside = on(decision, Fabric.PEER, takes_norm=True), on(decision, Fabric.PEER)
        assert candidate.estimate is not None and beside.estimate is not None
        found, known = ({term.name: term.us for term in each.estimate.terms} for each in (candidate, beside))  # type: ignore[union-attr]
        assert "norm" in known and "norm" not in found, "its time is part of what was measured"
        assert found["gemm"] == pytest.approx(known["gemm"])
        assert dict(candidate.parameters)["tiles"] == str(NORMED)
        assert any("in the kernel that sums them" in note for note in candidate.notes)


def test_it_is_chosen_without_force(reported: Reported) -> None:
    [decision] = reported(block, big(), *curves(1.0)).decisions
    assert (decision.chosen.choice, decision.chosen.variant) == (RULE, "tiles norm, pushed")
    [decision] = reported(block, big(), *curves(1e5, 1e5)).decisions
    assert decision.chosen.choice != RULE


def test_what_was_not_measured_is_not_used(reported: Reported) -> None:
    measured = [each for each in curves(1.0) if each.op != REDUCE_SCATTER_NORM.op]
    [decision] = reported(block, big(), *measured, force=(RULE,)).decisions
    assert decision.chosen.variant == "tiles, pushed"
    assert [each.code for each in on(decision, Fabric.PEER, takes_norm=True).rejections] == ["not_measured"]
    [alone_] = reported(block, big(), *curves(1.0, None), force=(RULE,)).decisions
    assert alone_.chosen.variant == "tiles norm, pushed", "it needs no other kernel's times"


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_one_operation_makes_sum_and_rows(reported: Reported, graphs: list[fx.Graph]) -> None:
    report = reported(block, big(), *curves(1.0), force=(RULE,))
    [call], [node] = norm_calls(graphs[-1]), calls(graphs[-1], SCATTER_NORM)
    assert (call.cut, call.hidden, call.max_tokens, call.world) == (str(NORMED), HIDDEN, TOKENS, 4)
    assert (call.eps, call.weight_offset, call.cast_before_weight) == (1e-6, 0.0, True)
    a, b, residual, weight, _, same = node.args
    shapes = [tuple(each.meta["val"].shape) for each in (a, b, residual, weight)]  # type: ignore[union-attr]
    assert shapes == [(TOKENS, 2048), (2048, HIDDEN), (TOKENS // 4, HIDDEN), (HIDDEN,)]
    assert call.replicated == "residual norm_weight" and len(same) == 2  # type: ignore[arg-type]
    [gather] = calls(graphs[-1], GATHER)
    rows = gather.args[0]
    assert isinstance(rows, fx.Node) and rows.args == (node, 0), "the rows that GEMMs read are the first result"
    left = {str(each.target) for each in graphs[-1].nodes}
    assert not calls(graphs[-1], SCATTER)
    assert not any(name.startswith(("_c10d", "aten.mm", "aten.rsqrt", "aten.mean", "aten.add")) for name in left), left
    assert any("with the residual in them" in line for line in report.rounding)
    [plan] = report.plans
    assert {each.name for each in plan.buffers} == {"staging", "gathered"}, "no rows are handed out"


def gemma(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (linear(forms.rms_plus_one(residual + forms.all_reduce(linear(x, down)), norm), up),)


def wide_weight(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (linear(forms.rms_fp32(residual + forms.all_reduce(linear(x, down)), norm.float()), up),)


@pytest.mark.parametrize("fn", [gemma, wide_weight])
def test_norms_of_other_families(fn: Callable[..., object], reported: Reported, graphs: list[fx.Graph]) -> None:
    [decision] = reported(fn, big(torch.float16), *curves(1.0), force=(RULE,)).decisions
    assert decision.chosen.variant == "tiles norm, pushed", on(decision, Fabric.PEER, takes_norm=True)
    [call] = norm_calls(graphs[-1])
    assert (call.dtype, call.cast_before_weight) == ("float16", False)
    assert call.weight_offset == (1.0 if fn is gemma else 0.0)


# --- what it leaves ---------------------------------------------------------------------------------------------------


def scaled(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    total = residual + (forms.all_reduce(linear(x, down)) + norm) * 0.5
    return (linear(forms.rms(total, norm), up),)


def post(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    total = residual + forms.rms_plus_one(forms.all_reduce(linear(x, down)), norm)
    return (linear(forms.rms_plus_one(total, norm), up),)


def layered(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    total = residual + forms.all_reduce(linear(x, down))
    return (linear(layer_norm(total, (HIDDEN,), norm, norm), up),)


def without_residual(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (linear(forms.rms(forms.all_reduce(linear(x, down)), norm), up),)


def two_residuals(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    total = residual.sin() + (residual + forms.all_reduce(linear(x, down)))
    return (linear(forms.rms(total, norm), up),)


def several(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    total = residual + (forms.all_reduce(linear(x, down)) + forms.all_reduce(linear(x.relu(), down)))
    return (linear(forms.rms(total, norm), up),)


def with_bias(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (linear(forms.rms(residual + forms.all_reduce(linear(x, down, norm)), norm), up),)


def stored_by_depth(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    partial = x @ down.view(down.shape[1], down.shape[0])
    return (linear(forms.rms(residual + forms.all_reduce(partial), norm), up),)


@pytest.mark.parametrize(
    ("fn", "codes"),
    [
        (scaled, {"bias_not_supported", "scale_not_supported"}),
        (post, {"norm_not_supported"}),
        (layered, {"norm_not_supported"}),
        (without_residual, {"residual_not_supported"}),
        (two_residuals, {"residual_not_supported"}),
        (several, {"several_gemms"}),
        (with_bias, {"addend_not_supported"}),
        (stored_by_depth, {"weight_layout"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_left_says_why(fn: Callable[..., object], codes: set[str], reported: Reported) -> None:
    late = [alone(1.0, "reduce_scatter", "partials"), alone(1.0, "all_gather", "copies")]
    [decision] = reported(fn, big(), *curves(1.0), *late, force=(RULE,)).decisions
    assert {each.code for each in on(decision, Fabric.PEER, takes_norm=True).rejections} == codes
    assert decision.chosen.choice == RULE, "the norm stays a kernel of its own"


def test_sizes_and_dtypes_that_are_left(reported: Reported, graphs: list[fx.Graph]) -> None:
    late = [alone(1.0, "reduce_scatter", "partials"), alone(1.0, "all_gather", "copies")]

    def codes(*given: Tensor, **more: object) -> set[str]:
        [decision] = reported(block, given, *curves(1.0), *late, force=(RULE,), **more).decisions
        return {each.code for each in on(decision, Fabric.PEER, takes_norm=True).rejections}

    assert codes(*big(tokens=TOKENS - 2)) == {"uneven_rows"}
    assert codes(*big(torch.float32)) == {"dtype_not_supported"}
    assert "row_not_supported" in codes(*big(hidden=2 * HIDDEN))
    square = zeros(HIDDEN, HIDDEN), zeros(HIDDEN), zeros(2048, HIDDEN)

    def of_any_size(x: Tensor) -> Tensor:
        return linear(forms.rms(x + forms.all_reduce(linear(x, square[0])), square[1]), square[2])

    given = (zeros(1, 511, HIDDEN),)
    [decision] = reported(of_any_size, given, *curves(1.0), *late, force=(RULE,), static=False).decisions
    assert {each.code for each in on(decision, Fabric.PEER, takes_norm=True).rejections} >= {
        "symbolic_tokens",
        "uneven_rows",
    }
    assert not any(norm_calls(graph) for graph in graphs)


# --- its neighbours ---------------------------------------------------------------------------------------------------


def weights() -> tuple[Tensor, Tensor, Tensor]:
    return zeros(HIDDEN, 2048), zeros(HIDDEN), zeros(2048, HIDDEN)


def two_layers(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    total = residual + forms.all_reduce(linear(x, down))
    total = total + forms.all_reduce(linear(linear(forms.rms(total, norm), up), down))
    return linear(forms.rms(total, norm), up), total


def test_the_shard_is_handed_on_between_its_sites(reported: Reported, graphs: list[fx.Graph]) -> None:
    given = (zeros(1, TOKENS, 2048), zeros(1, TOKENS, HIDDEN), *weights())
    gathered = alone(1.0, "all_gather", "copies")
    report = reported(two_layers, given, *curves(1.0), gathered, force=(RULE,))
    assert [each.chosen.variant for each in report.decisions] == ["tiles norm, pushed"] * 2
    first, second = calls(graphs[-1], SCATTER_NORM)
    residual = second.args[2]
    assert isinstance(residual, fx.Node) and residual.target is torch.ops.aten.select.int, "this rank's rows"
    among = skip_shapes(residual.args[0])
    assert among.args == (first, 1), "of the sum that the first one made"
    assert [call.full_size_sum for call in norm_calls(graphs[-1])] == [True, False]
    assert [call.replicated for call in norm_calls(graphs[-1])] == ["residual norm_weight", "norm_weight"]
    assert sorted(call.returns_rows for call in gather_calls(graphs[-1])) == [False, False, True], "at the end"


def chain(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """Three sites, of which the first and the last have a consumer of rows other than GEMMs."""
    total = residual + forms.all_reduce(linear(x, down))
    rows = forms.rms(total, norm)
    hidden = linear(rows, up) + rows.sum(-1, keepdim=True)
    total = total + forms.all_reduce(linear(hidden, down))
    hidden = linear(forms.rms(total, norm), up)
    total = total + forms.all_reduce(linear(hidden, down))
    return (forms.rms(total, norm)[:, -1:],)


def test_a_sum_stays_sharded_between_both_rules(reported: Reported, graphs: list[fx.Graph]) -> None:
    given = (zeros(1, TOKENS, 2048), zeros(1, TOKENS, HIDDEN), *weights())
    gathered = alone(1.0, "all_gather", "copies")
    report = reported(chain, given, *curves(1.0), gathered, force=(RULE,), disable=("gemm_all_reduce",))
    assert [each.chosen.choice for each in report.decisions] == [OTHER, RULE, OTHER]
    assert report.decisions[1].chosen.variant == "tiles norm, pushed"
    first, third = (
        decode_reduction(str(node.args[-1]))
        for node in graphs[-1].nodes
        if "all_reduce_norm" in str(node.target) and node.op == "call_function"
    )
    assert (first.sum_out, third.residual_sharded) == (SumOut.SHARDED, True)
    [call], [node] = norm_calls(graphs[-1]), calls(graphs[-1], SCATTER_NORM)
    assert call.replicated == "norm_weight", "no rank has all rows of the residual"
    assert call.full_size_sum and not scatter_calls(graphs[-1])
    assert not [each for each in graphs[-1].nodes if each.target is torch.ops.aten.constant_pad_nd.default]
    assert "unshard_copy" not in {term.name for term in report.decisions[1].chosen.estimate.terms}
    last = next(each for each in reversed(graphs[-1].nodes) if "all_reduce_norm" in str(each.target))
    assert any(skip_shapes(each).args == (node, 1) for each in last.all_input_nodes), "its residual is that sum"
