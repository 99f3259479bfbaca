"""The rule `shard_norm`: what it takes and leaves, with which reasons, and with which neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from tests.graphs import forms
from tests.graphs.overlapped_gemms import Reported
from tests.graphs.preview import previewed
from tests.graphs.shard_norm_graphs import (
    FUSED,
    GATHER,
    OTHER,
    SCATTER,
    H,
    K,
    block,
    calls,
    gather_calls,
    inputs,
    on,
    refused,
    reported,
    scatter_calls,
)
from weaveopt.ops.reduction.call import SumOut
from weaveopt.ops.reduction.call import decode as decode_reduction
from weaveopt.records.candidate import LEAVE, Fabric
from weaveopt.rewrites.shard_norm.candidates import RULE

# --- what it takes ----------------------------------------------------------------------------------------------------


def test_a_block_becomes_two_operations(graphs: list[fx.Graph]) -> None:
    report = reported(block)
    [decision] = report.decisions
    assert (decision.chosen.choice, decision.chosen.fabric) == (RULE, Fabric.SHM)
    [scatter], [gather] = scatter_calls(graphs[0]), gather_calls(graphs[0])
    assert (scatter.hidden, scatter.max_tokens, scatter.columns) == (H, 16, False)
    assert (gather.hidden, gather.max_tokens, gather.returns_rows) == (H, 16, False)
    [node] = calls(graphs[0], GATHER)
    assert len(node.args[1]) == 2, "both GEMMs read one gather"  # type: ignore[arg-type]
    shard = node.args[0]
    assert isinstance(shard, fx.Node) and tuple(shard.meta["val"].shape) == (8, H), "the norm is of this rank's rows"
    left = [str(each.target) for each in graphs[0].nodes]
    assert not any(name.startswith(("_c10d_functional", "aten.mm", "aten.addmm")) for name in left), left
    assert any("rounded once" in line for line in report.rounding)
    [plan] = report.plans
    [buffer] = plan.buffers
    assert (plan.fabric, buffer.name, buffer.num_bytes) == (Fabric.SHM, "partial", 2 * 16 * H * 2)


def test_what_is_replicated_is_named(graphs: list[fx.Graph]) -> None:
    """Every rank makes rows of its own copy of these, so the first call compares them."""
    reported(block)
    [scatter], [node] = scatter_calls(graphs[0]), calls(graphs[0], SCATTER)
    assert scatter.replicated == "residual norm_weight"
    assert [tuple(each.meta["val"].shape) for each in node.args[5]] == [(2, 8, H), (H,)]  # type: ignore[union-attr]


def several(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """Attention and MLP side by side, each with a bias, and a scaled sum of both after a LayerNorm."""
    one, two = forms.all_reduce(linear(x, down)) + norm, forms.all_reduce(linear(x.relu(), down))
    total = residual + (one + two)
    return (linear(layer_norm(total, (H,), norm, norm), up),)


def post(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    total = residual + forms.rms_plus_one(forms.all_reduce(linear(x, down)), norm)
    return (linear(forms.rms_plus_one(total, norm), up),)


def biased(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """A bias that every rank adds ahead of the sum, and one of a GEMM after the norm (Qwen2)."""
    total = residual + forms.all_reduce(linear(x, down, norm)) * 0.5
    return (linear(forms.rms(total, norm), up, up[:, 0].contiguous()),)


def without_residual(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (linear(forms.rms(forms.all_reduce(linear(x, down)), norm), up),)


@pytest.mark.parametrize(
    ("fn", "num_gemms", "num_addends"),
    [(several, 2, 0), (post, 1, 0), (biased, 1, 1), (without_residual, 1, 0)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_forms_that_models_have(
    fn: Callable[..., object], num_gemms: int, num_addends: int, graphs: list[fx.Graph]
) -> None:
    report = reported(fn)
    assert [each.chosen.choice for each in report.decisions] == [RULE], report.decisions
    [node] = calls(graphs[0], SCATTER)
    assert (len(node.args[0]), len(node.args[2])) == (num_gemms, num_addends)  # type: ignore[arg-type]
    assert not calls(graphs[0], torch.ops._c10d_functional.all_reduce.default)


def test_rows_that_do_not_divide_are_filled_up(graphs: list[fx.Graph]) -> None:
    report = reported(block, *inputs(14), world=4)
    [decision] = report.decisions
    assert decision.chosen.choice == RULE
    [scatter], [gather] = scatter_calls(graphs[0]), gather_calls(graphs[0])
    assert scatter.max_tokens == gather.max_tokens == 16
    assert any(note.startswith("pad: ") for note in decision.chosen.notes)
    terms = {term.name: term.us for term in decision.chosen.estimate.terms}  # type: ignore[union-attr]
    assert terms["pad"] > 0.0
    [even] = reported(block, *inputs(16), world=4).decisions
    assert "pad" not in {term.name for term in even.chosen.estimate.terms}  # type: ignore[union-attr]


# --- what it leaves ---------------------------------------------------------------------------------------------------


def read_elsewhere(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    rows = forms.rms(residual + forms.all_reduce(linear(x, down)), norm)
    return linear(rows, up), rows.sum(0)


def last_token(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    rows = forms.rms(residual + forms.all_reduce(linear(x, down)), norm)
    return (linear(rows[:, -1:], up),)


def no_gemm(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    rows = forms.rms(residual + forms.all_reduce(linear(x, down).relu()), norm)
    return (linear(rows, up),)


def no_norm(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (linear(residual + forms.all_reduce(linear(x, down)), up),)


def made_weight(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    rows = forms.rms(residual + forms.all_reduce(linear(x, down)), norm)
    return (linear(rows, up.exp()),)


def added_rows(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    rows = forms.rms(residual + forms.all_reduce(linear(x, down)), norm).flatten(0, 1)
    return (torch.addmm(rows[:, :K].sin(), rows, up.t()),)


def read_partial(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    partial = linear(x, down)
    return linear(forms.rms(residual + forms.all_reduce(partial), norm), up), partial


def weighed_by_the_sum(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> Tensor:
    """Other rows than a rank's own are part of the norm's weight."""
    total = residual + forms.all_reduce(linear(x, down))
    return linear(forms.rms(total, total.mean((0, 1))), up)


@pytest.mark.parametrize(
    ("fn", "codes"),
    [
        (weighed_by_the_sum, {"read_by_others"}),
        (read_elsewhere, {"read_by_others"}),
        (last_token, {"read_by_others"}),
        (no_gemm, {"no_gemm"}),
        (no_norm, {"no_norm"}),
        (made_weight, {"operand_not_ready"}),
        (added_rows, {"read_by_others", "addend_not_supported"}),
        (read_partial, {"read_by_others"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_left_says_why(fn: Callable[..., object], codes: set[str]) -> None:
    report = reported(fn)
    assert (report.fallbacks, refused(report)) == ((), codes)


def test_rows_of_other_symbols_than_the_sum_has_are_left() -> None:
    """x and the residual have symbols of their own, which only a view says to be one count."""
    weights = forms.make_weights(torch.float32)
    given = torch.zeros(2, 7, forms.INNER), torch.zeros(2, 7, forms.HIDDEN)
    report = previewed(lambda x, r: forms.product_bias(weights, x, r), given, force=(RULE,))
    assert report.fallbacks == () and refused(report) == {"size_not_known"}


@pytest.mark.parametrize(("tokens", "codes"), [(4, {"few_rows"}), (5, set()), (6, set())])
def test_a_symbolic_count_of_one_row_a_rank_is_left(tokens: int, codes: set[str], graphs: list[fx.Graph]) -> None:
    """A size of 1 would be made a constant, and the count of all ranks with it."""
    weights = torch.zeros(H, H), torch.zeros(H), torch.zeros(K, H)

    def fn(x: Tensor) -> Tensor:
        square, norm, up = weights
        return linear(forms.rms(x + forms.all_reduce(linear(x, square)), norm), up)

    report = reported(fn, torch.zeros(1, tokens, H), world=4, static=False)
    [decision] = report.decisions
    assert ((refused(report) if codes else set()), decision.chosen.choice == RULE) == (codes, not codes)
    assert bool(scatter_calls(graphs[0])) != bool(codes)


def test_one_rank_has_nothing_to_share() -> None:
    [decision] = reported(block, world=1).decisions
    assert decision.chosen.choice == LEAVE


def test_every_fabric_has_its_reasons(reported: Reported) -> None:
    on_cpus = previewed(block, inputs(), force=(RULE,), static=True).decisions[0]
    assert {reason.code for reason in on(on_cpus, Fabric.PEER).rejections} >= {"fabric_needs_cuda"}
    [decision] = reported(block, inputs()).decisions
    assert decision.chosen.choice != RULE
    assert {reason.code for reason in on(decision, Fabric.PEER).rejections} == {"not_measured"}


# --- its neighbours ---------------------------------------------------------------------------------------------------


def chain(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """Three sites, of which the first and the last have a consumer of rows other than GEMMs."""
    total = residual + forms.all_reduce(linear(x, down))
    rows = forms.rms(total, norm)
    hidden = linear(rows, up) + rows.sum(-1, keepdim=True)
    total = total + forms.all_reduce(linear(hidden, down))
    hidden = linear(forms.rms(total, norm), up)
    total = total + forms.all_reduce(linear(hidden, down))
    return (forms.rms(total, norm)[:, -1:],)


def test_a_sum_stays_sharded_between_both_rules(graphs: list[fx.Graph]) -> None:
    """In both orders: another rule's sum is this one's residual, and this one's sum another's residual."""
    report = reported(chain, *inputs(64))
    assert [each.chosen.choice for each in report.decisions] == [OTHER, RULE, OTHER]
    first, third = (decode_reduction(str(node.args[-1])) for node in calls(graphs[0], FUSED))
    assert (first.residual_sharded, first.sum_out) == (False, SumOut.SHARDED)
    assert (third.residual_sharded, third.sum_out) == (True, SumOut.NONE)
    [scatter], [gather] = scatter_calls(graphs[0]), gather_calls(graphs[0])
    assert scatter.replicated == "norm_weight", "no rank has all rows of the residual"
    assert not gather.returns_rows
    [full_size] = [node for node in graphs[0].nodes if node.target is torch.ops.aten.constant_pad_nd.default]
    assert tuple(full_size.meta["val"].shape) == (64, H) and full_size.args[1] == [0, 0, 0, 32]
    middle = {term.name: term.us for term in report.decisions[1].chosen.estimate.terms}  # type: ignore[union-attr]
    assert middle["unshard_copy"] > 0.0 and middle.get("gather", 0.0) == pytest.approx(0.0, abs=1e-6)


def test_rows_filled_up_are_not_divided_as_other_rules_do(graphs: list[fx.Graph]) -> None:
    report = reported(chain, *inputs(62), world=4)
    assert [each.chosen.choice for each in report.decisions] == [OTHER, RULE, OTHER]
    first, third = (decode_reduction(str(node.args[-1])) for node in calls(graphs[0], FUSED))
    assert first.sum_out is SumOut.WHOLE and not third.residual_sharded
    assert sorted(call.returns_rows for call in gather_calls(graphs[0])) == [False, True], "the sum is gathered"


def two_layers(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    total = residual + forms.all_reduce(linear(x, down))
    hidden = linear(forms.rms(total, norm), up)
    total = total + forms.all_reduce(linear(hidden, down))
    return linear(forms.rms(total, norm), up), total


@pytest.mark.parametrize("tokens", [16, 14])
def test_between_its_own_sites_the_shard_is_handed_on(tokens: int, graphs: list[fx.Graph]) -> None:
    report = reported(two_layers, *inputs(tokens), world=4)
    assert [each.chosen.choice for each in report.decisions] == [RULE, RULE]
    first, second = calls(graphs[0], SCATTER)
    adds = [node for node in second.users if node.target is torch.ops.aten.add.Tensor]
    assert len(adds) == 1 and {str(each.target) for each in adds[0].all_input_nodes} == {
        str(SCATTER),
        "aten.add.Tensor",
    }, "the residual is the shard that the first site made"
    handed_out = sorted(call.returns_rows for call in gather_calls(graphs[0]))
    assert handed_out == [False, False, True], "gathered at the end"
    pads = [node for node in graphs[0].nodes if node.target is torch.ops.aten.constant_pad_nd.default]
    assert len(pads) == (3 if tokens % 4 else 0), "operands and the first residual are filled up, nothing is widened"
    assert all(node.meta["val"].shape[0] == 4 for node in (first, second))


def two_norms(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """One sum, normalized for attention and for the MLP."""
    total = residual + forms.all_reduce(linear(x, down))
    return linear(forms.rms(total, norm), up), linear(layer_norm(total, (H,), norm), up)


def test_a_second_norm_reads_the_gathered_sum(graphs: list[fx.Graph]) -> None:
    report = reported(two_norms)
    [decision] = report.decisions
    assert decision.chosen.choice == RULE
    assert any(note.startswith("gather: ") for note in decision.chosen.notes)
    terms = {term.name: term.us for term in decision.chosen.estimate.terms}  # type: ignore[union-attr]
    assert terms["gather"] > 0.0
    assert sorted(call.returns_rows for call in gather_calls(graphs[0])) == [False, True]


def overlapping(x: Tensor, residual: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """The GEMM after the first norm makes the partial result of the second sum."""
    total = residual + forms.all_reduce(linear(x, down))
    rows = forms.rms(total, norm)
    second = forms.all_reduce(linear(rows, torch.cat([up, up])[:H]))
    return (linear(forms.rms(second, norm), up),)


def test_one_gemm_is_no_part_of_two_rewrites() -> None:
    report = reported(overlapping, disable=(OTHER, "gemm_all_reduce"))
    chosen = [each.chosen.choice for each in report.decisions]
    assert sorted(chosen) == sorted([RULE, LEAVE]), chosen
    [left] = [each for each in report.decisions if each.chosen.choice == LEAVE]
    assert [reason.code for reason in on(left, Fabric.SHM).rejections] == ["overlaps"]
