"""Variant `tiles`: which sites get it at what price, how sums stay sharded between rules, and the rewritten graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from tests import forms
from tests.preview import previewed
from weaveopt import cost_model
from weaveopt.cost_model.machine import Curve, Machine, Point
from weaveopt.errors import ProfileError
from weaveopt.ops.gemm_all_reduce.call import Cut, GemmReductionCall, decode, results_in_arena
from weaveopt.records.candidate import Candidate, Fabric
from weaveopt.records.report import GraphReport
from weaveopt.reductions.call import ReductionCall, SumOut
from weaveopt.reductions.call import decode as decode_reduction
from weaveopt.reductions.variant import Algorithm, Transfer
from weaveopt.rewrites.gemm_all_reduce.tiles import parse_cut

RULE, OTHER = "gemm_all_reduce", "all_reduce_rms_norm"
H200 = cost_model.load("h200x4")
TOKENS, DEPTH, HIDDEN = 4096, 7168, 8192
TAIL_US = 10.0
CUT = "tiles columns=256 pairs=4"


def tail(us: float = TAIL_US, variant: str = CUT, world: int = 4, last_bytes: int | None = 1 << 30) -> Curve:
    points = (Point(1 << 20, us), Point(1 << 30, us))
    return Curve("fused", RULE, variant, world, points, first_bytes=1 << 20, last_bytes=last_bytes)


def toy(*curves: Curve) -> Machine:
    """h200x4 on which the kernel was measured so."""
    costs = (
        replace(each, curves=(*each.curves, *curves)) if each.fabric is Fabric.PEER else each
        for each in H200.fabric_costs
    )
    return replace(H200, fabric_costs=tuple(costs))


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "toy.json"
    path.write_text(cost_model.dumps(toy(tail())))
    return str(path)


def layer(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    total = residual + forms.all_reduce(torch.nn.functional.linear(x, weight))
    return forms.rms(total, norm), total


def shapes(tokens: int = TOKENS, depth: int = DEPTH, hidden: int = HIDDEN) -> list[tuple[int, ...]]:
    return [(tokens, depth), (tokens, hidden), (hidden, depth), (hidden,)]


def on_gpus(
    machine: str, sizes: Sequence[tuple[int, ...]] | None = None, dtype: torch.dtype = torch.bfloat16, **options: object
) -> GraphReport:
    given = tuple(torch.empty(shape, dtype=dtype) for shape in sizes or shapes())
    known = {"static": True, "force": (), "fn": layer, **options}
    fn = known.pop("fn")
    return previewed(fn, given, world=4, machine=machine, device="cuda", **known)  # type: ignore[arg-type]


def tiles(report: GraphReport) -> list[Candidate]:
    """As they were proposed, the chosen one among them."""
    (decision,) = report.decisions
    every = sorted((decision.chosen, *decision.alternatives), key=lambda each: each.variant)
    return [each for each in every if each.choice == RULE and each.variant.startswith("tiles")]


def refused(report: GraphReport) -> set[str]:
    return {reason.code for each in tiles(report) for reason in each.rejections}


def calls(graph: fx.Graph) -> list[GemmReductionCall | ReductionCall]:
    """Of both rules, in graph order."""
    found: list[GemmReductionCall | ReductionCall] = []
    for node in graph.nodes:
        if node.target is torch.ops.weave.gemm_all_reduce_norm.default:
            found.append(decode(str(node.args[-1])))
        elif node.target is torch.ops.weave.all_reduce_norm.default:
            found.append(decode_reduction(str(node.args[-1])))
    return found


def test_the_longer_part_hides_the_other_and_a_tail_stays(machine: str) -> None:
    whole, apart = tiles(on_gpus(machine, force=(RULE,)))
    assert (whole.variant, apart.variant) == ("tiles", "tiles, norm apart")
    assert whole.estimate is not None and whole.allowed
    terms = {term.name: term.us for term in whole.estimate.terms}
    assert terms["tail"] == pytest.approx(TAIL_US)
    assert terms["overlapped"] == -min(terms["gemm"], terms["exchange"]) < 0
    expected = max(terms["gemm"], terms["exchange"]) + TAIL_US + terms.get("host", 0.0)
    assert whole.estimate.us == pytest.approx(expected)
    assert dict(whole.parameters) == {"tile_columns": 256, "group_pairs": 4, "measured": True}


def test_it_is_chosen_by_its_price(tmp_path: Path) -> None:
    chosen = {}
    for us in (TAIL_US, 5000.0):
        path = tmp_path / f"{us}.json"
        path.write_text(cost_model.dumps(toy(tail(us))))
        (decision,) = on_gpus(str(path)).decisions
        chosen[us] = decision.chosen.variant
    assert chosen[TAIL_US].startswith("tiles") and not chosen[5000.0].startswith("tiles")


def test_the_fastest_cut_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "cuts.json"
    path.write_text(cost_model.dumps(toy(tail(30.0), tail(20.0, "tiles columns=128 pairs=2"))))
    whole, _ = tiles(on_gpus(str(path)))
    assert dict(whole.parameters)["tile_columns"] == 128 and dict(whole.parameters)["group_pairs"] == 2


def test_a_machine_without_a_measurement_declines() -> None:
    assert refused(on_gpus("h200x4")) == {"not_measured"}


def test_another_number_of_ranks_is_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.write_text(cost_model.dumps(toy(tail(world=2))))
    assert refused(on_gpus(str(path))) == {"not_measured"}


@pytest.mark.parametrize(
    ("sizes", "dtype", "why"),
    [
        (shapes(tokens=16), torch.bfloat16, "beyond_measured"),
        (shapes(depth=7164), torch.bfloat16, "depth_not_supported"),
        (shapes(hidden=8200), torch.bfloat16, "row_not_supported"),
        (shapes(tokens=256 * 128 * 4 + 1, depth=64, hidden=2048), torch.bfloat16, "too_many_tokens"),
        (shapes(), torch.float32, "dtype_not_supported"),
    ],
)
def test_sizes_that_the_kernel_does_not_take(
    machine: str, sizes: list[tuple[int, ...]], dtype: torch.dtype, why: str
) -> None:
    assert refused(on_gpus(machine, sizes, dtype)) == {why}


def test_symbolic_token_counts_are_declined(machine: str) -> None:
    weight, norm = torch.empty(2048, 1024, dtype=torch.bfloat16), torch.empty(2048, dtype=torch.bfloat16)
    sizes = [(TOKENS, 1024), (TOKENS, 2048)]
    report = on_gpus(machine, sizes, fn=lambda x, r: layer(x, r, weight, norm), static=False)
    (decision,) = report.decisions
    assert decision.site.tokens.least < TOKENS < decision.site.tokens.most
    assert refused(report) == {"symbolic_tokens"}


def test_weights_that_are_stored_as_they_are_multiplied_are_declined(machine: str) -> None:
    def plain(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        total = residual + forms.all_reduce(x @ weight)
        return forms.rms(total, norm), total

    sizes = [(TOKENS, DEPTH), (TOKENS, HIDDEN), (DEPTH, HIDDEN), (HIDDEN,)]
    assert refused(on_gpus(machine, sizes, fn=plain)) == {"weight_layout"}


def test_only_rms_norms_are_taken_in(machine: str) -> None:
    def layered(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        total = residual + forms.all_reduce(torch.nn.functional.linear(x, weight))
        return torch.nn.functional.layer_norm(total, (HIDDEN,), norm), total

    whole, apart = tiles(on_gpus(machine, fn=layered))
    assert [reason.code for reason in whole.rejections] == ["norm_not_supported"] and apart.allowed


def chain(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    """Three sites whose sums nothing else reads; the last one's partial result is no plain GEMM."""
    total, hidden = residual, x
    for _ in range(2):
        total = total + forms.all_reduce(torch.nn.functional.linear(hidden, weight))
        hidden = forms.rms(total, norm)[:, :DEPTH].contiguous()
    total = total + forms.all_reduce(torch.nn.functional.linear(hidden, weight).relu())
    return (forms.rms(total, norm),)


def test_a_sharded_sum_passes_between_sites_of_both_rules(machine: str, graphs: list[fx.Graph]) -> None:
    report = on_gpus(machine, fn=chain, force=(RULE, OTHER))
    assert [(d.chosen.choice, d.chosen.variant) for d in report.decisions] == [
        (RULE, "tiles"),
        (RULE, "tiles"),
        (OTHER, "two_shot bulk"),
    ]
    first, second, third = calls(graphs[-1])
    assert isinstance(first, GemmReductionCall) and isinstance(second, GemmReductionCall)
    assert isinstance(third, ReductionCall)
    assert [first.reduction.residual_sharded, second.reduction.residual_sharded, third.residual_sharded] == [
        False,
        True,
        True,
    ]
    assert [first.reduction.sum_out, second.reduction.sum_out, third.sum_out] == [
        SumOut.SHARDED,
        SumOut.SHARDED,
        SumOut.NONE,
    ]
    for made in (first, second):
        (row,) = made.reduction.table
        assert (row.max_tokens, row.algorithm, row.transfer) == (TOKENS, Algorithm.TWO_SHOT, Transfer.TILES)
        assert (made.variant, made.cut, made.chunks) == ("tiles", Cut(256, 4), ()) and not made.reduction.in_pieces
        assert made.reduction.share(TOKENS, 1) == third.share(TOKENS, 1)
    # What hands rows out costs nothing where nobody reads them whole.
    for decision in report.decisions[:2]:
        terms = {term.name: term.us for term in decision.chosen.estimate.terms}  # type: ignore[union-attr]
        assert terms.get("gather", 0.0) <= 0.0
    (plan,) = report.plans
    assert {placed.name for placed in plan.buffers} >= {"staging", "output"}


def test_normalized_rows_may_lie_in_the_arena(machine: str, graphs: list[fx.Graph]) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        total = residual + forms.all_reduce(torch.nn.functional.linear(x, weight))
        return (forms.rms(total, norm) @ weight, total)

    on_gpus(machine, fn=block, force=(RULE,), disable=(OTHER,))
    (node,) = (n for n in graphs[-1].nodes if n.target is torch.ops.weave.gemm_all_reduce_norm.default)
    if decode(str(node.args[-1])).reduction.norm is None:
        pytest.fail("the norm was expected to be taken in")
    assert results_in_arena(node.args) == (0,)


def test_names_of_curves() -> None:
    assert parse_cut(CUT) == Cut(256, 4)
    for name in ("tiles", "tiles columns=64 pairs=1", "tiles columns=256 pairs=0", "chunks"):
        with pytest.raises(ProfileError, match=RULE):
            parse_cut(name)
