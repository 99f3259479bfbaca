"""Variant `tiles`: which sites get it at what price, how sums stay sharded between rules, and the rewritten graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from tests.graphs import forms
from tests.graphs.overlapped_gemms import toy
from tests.graphs.preview import previewed
from weaveopt import cost_model
from weaveopt.cost_model.machine import Curve, Machine, Point
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.errors import ProfileError
from weaveopt.ops.gemm_comm.all_reduce.call import ALL_REDUCE, GemmReductionCall, TileOutput, decode, results_in_arena
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.call import decode as decode_reduction
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm, Transfer
from weaveopt.records.candidate import Candidate, Fabric, Rejection
from weaveopt.records.price import error_us_of
from weaveopt.records.report import GraphReport
from weaveopt.rewrites.gemm_all_reduce.tiles import PricedTiles, price

RULE, OTHER = "gemm_all_reduce", "all_reduce_rms_norm"
H200 = cost_model.load("h200x4")
TOKENS, DEPTH, HIDDEN = 4096, 7168, 8192
MIB = 1 << 20
MESSAGE_BYTES = TOKENS * HIDDEN * 2
CUT = TileConfig(256, 1, 4)
SHALLOW_US, DEEP_US = 320.0, 800.0
"""Times of the kernel at `MESSAGE_BYTES` and depths of 512 and 8192."""
KERNEL_US = SHALLOW_US + (DEEP_US - SHALLOW_US) * (DEPTH - 512) / (8192 - 512)


def name_of(output: TileOutput, cut: TileConfig, depth: int) -> str:
    return ALL_REDUCE.name_of(cut, depth, output.variant)


def curve(
    us: float,
    depth: int,
    cut: TileConfig = CUT,
    output: TileOutput = TileOutput.NORM,
    world: int = 4,
    sizes: tuple[int, int] = (MIB, 1 << 30),
) -> Curve:
    """Proportional to bytes: `us` at `MESSAGE_BYTES`."""
    steps = range((sizes[1] // sizes[0]).bit_length())
    points = tuple(Point(size, us * size / MESSAGE_BYTES) for size in (sizes[0] << step for step in steps))
    return Curve("fused", RULE, name_of(output, cut, depth), world, points, HIDDEN, *sizes)


NORMALIZED = (TileOutput.NORM, TileOutput.BOTH)


def pair(
    shallow_us: float = SHALLOW_US,
    deep_us: float = DEEP_US,
    output: Sequence[TileOutput] = NORMALIZED,
    **known: object,
) -> tuple[Curve, ...]:
    """Curves at two depths of each kernel that returns such rows."""
    by_depth = ((shallow_us, 512), (deep_us, 8192))
    return tuple(curve(us, depth, output=each, **known) for each in output for us, depth in by_depth)  # type: ignore[arg-type]


Profile = Callable[..., str]


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """The file of a machine with more curves."""

    def written(*curves: Curve) -> str:
        path = tmp_path / f"toy{len(list(tmp_path.iterdir()))}.json"
        path.write_text(cost_model.dumps(toy(*curves)))
        return str(path)

    return written


@pytest.fixture
def machine(profile: Profile) -> str:
    return profile(*pair(), *pair(output=(TileOutput.SUM,)))


def workload(tokens: int = TOKENS, depth: int = DEPTH, **known: object) -> Workload:
    gemm = cost_model.Gemm(tokens, depth, HIDDEN)
    fields = {"gemm": gemm, "sum_is_used": False, **known}
    return Workload(tokens, tokens, HIDDEN, "bfloat16", 4, **fields)  # type: ignore[arg-type]


def kernel_us(machine: Machine, of: Workload) -> float:
    """Price of the kernel itself."""
    priced = price(machine, of, Fabric.PEER)
    assert isinstance(priced, PricedTiles), priced
    return sum(term.us for term in priced.estimate.terms if term.name in ("gemm", "exposed"))


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
    """Calls of both rules, in graph order."""
    found: list[GemmReductionCall | ReductionCall] = []
    for node in graph.nodes:
        if node.target is torch.ops.weave.gemm_all_reduce_norm.default:
            found.append(decode(str(node.args[-1])))
        elif node.target is torch.ops.weave.all_reduce_norm.default:
            found.append(decode_reduction(str(node.args[-1])))
    return found


def test_the_kernels_time_is_the_one_that_was_measured(profile: Profile) -> None:
    whole, apart = tiles(on_gpus(profile(*pair())))
    assert (whole.variant, apart.variant) == ("tiles", "tiles, norm apart")
    assert whole.estimate is not None and whole.allowed
    terms = {term.name: term.us for term in whole.estimate.terms}
    assert terms["gemm"] + terms["exposed"] == pytest.approx(KERNEL_US)
    assert terms["gemm"] == pytest.approx(cost_model.gemm_us(H200, workload().gemm, "bfloat16"))
    assert "gather" not in terms, "the sum is read by more than reductions, and the kernel was measured handing it out"
    kernel = whole.estimate.terms[0].us + whole.estimate.terms[1].us
    assert error_us_of(kernel) >= KERNEL_US * H200.relative_error / 1.5, "of the kernel, its GEMM included"
    assert dict(whole.parameters) == {
        "tile_columns": 256, "group_pairs": 1, "finisher_ctas": 4, "measured": True,
    }  # fmt: skip


def test_rows_that_not_only_gemms_read_are_charged_for_leaving_the_arena(profile: Profile) -> None:
    """The kernel was measured with rows that stay where peers write them."""
    machine, vocabulary = profile(*pair()), torch.zeros(HIDDEN, 512).bfloat16()

    def copied_us(*results: Callable[[Tensor], Tensor]) -> float:
        def block(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
            normalized, _ = layer(x, residual, weight, norm)
            return tuple(result(normalized) for result in results)

        whole = next(each for each in tiles(on_gpus(machine, fn=block)) if each.variant == "tiles")
        assert whole.estimate is not None
        return {term.name: float(term.us) for term in whole.estimate.terms}.get("copy", 0.0)

    def product(rows: Tensor) -> Tensor:
        return rows @ vocabulary

    assert copied_us(product) == 0.0
    wanted = pytest.approx(cost_model.memory_us(H200, 2.0 * MESSAGE_BYTES))
    assert copied_us(torch.Tensor.clone) == copied_us(product, torch.Tensor.neg) == wanted


def test_it_is_chosen_by_its_price(profile: Profile) -> None:
    chosen = {}
    for factor in (1.0, 5.0):
        (decision,) = on_gpus(profile(*pair(SHALLOW_US * factor, DEEP_US * factor))).decisions
        chosen[factor] = decision.chosen.variant
    assert chosen[1.0] == "tiles" and not chosen[5.0].startswith("tiles")


def test_the_fastest_cut_is_taken(profile: Profile) -> None:
    other = TileConfig(128, 2, 16)
    whole, _ = tiles(on_gpus(profile(*pair(), *pair(deep_us=700.0, cut=other))))
    assert dict(whole.parameters)["tile_columns"] == 128 and dict(whole.parameters)["finisher_ctas"] == 16
    # Where the exchange is the longer part the other one is faster.
    sizes = shapes(depth=512)
    whole, _ = tiles(on_gpus(profile(*pair(), *pair(340.0, 700.0, cut=other)), sizes))
    assert dict(whole.parameters)["tile_columns"] == 256


def test_between_depths_and_beyond_them() -> None:
    known = toy(*pair())
    step_us = (DEEP_US - SHALLOW_US) / 15
    for depth, us in ((64, SHALLOW_US), (512, SHALLOW_US), (1024, SHALLOW_US + step_us), (8192, DEEP_US)):
        assert kernel_us(known, workload(depth=depth)) == pytest.approx(us), depth
    assert kernel_us(known, workload(depth=16384)) == pytest.approx(2 * DEEP_US)
    # Of depths that the exchange hides nothing follows for deeper ones.
    hidden = toy(curve(SHALLOW_US, 512), curve(SHALLOW_US, 1024))
    assert kernel_us(hidden, workload(depth=8192)) == pytest.approx(8 * SHALLOW_US)
    shallow = toy(curve(SHALLOW_US, 512))
    assert kernel_us(shallow, workload(depth=256)) == pytest.approx(SHALLOW_US)
    refused = price(shallow, workload(depth=1024), Fabric.PEER)
    assert isinstance(refused, Rejection) and refused.code == "beyond_measured"


def test_rows_that_begin_another_wave_of_tiles_are_charged_for_it() -> None:
    """On 132 SMs, 4 of which finish rows, 64 clusters compute 512 tiles at 4096 tokens, and 640 at 4224."""
    sizes = MESSAGE_BYTES, 2 * MESSAGE_BYTES
    known = toy(*(curve(us, depth, sizes=sizes) for us, depth in ((SHALLOW_US, 512), (DEEP_US, 8192))))
    assert kernel_us(known, workload()) == pytest.approx(KERNEL_US)
    assert kernel_us(known, workload(TOKENS + 128)) == pytest.approx(KERNEL_US * 10 / 8)
    assert kernel_us(known, workload(2 * TOKENS)) == pytest.approx(KERNEL_US * 2)


def test_the_whole_sum_and_normalized_rows_are_measured_apart(profile: Profile) -> None:
    known = toy(*pair(), *pair(400.0, 900.0, output=(TileOutput.SUM,)))
    apart = workload(depth=8192, has_norm=False, num_norms=0, sum_is_used=True)
    assert kernel_us(known, apart) == pytest.approx(900.0)
    whole, unfused_norm = tiles(on_gpus(profile(*pair())))
    assert whole.allowed and [reason.code for reason in unfused_norm.rejections] == ["not_measured"]


def test_rows_beside_the_whole_sum_are_measured_by_themselves(profile: Profile) -> None:
    """The graph's sum is read outside of sites: times of a kernel whose sum stays sharded do not apply."""
    assert refused(on_gpus(profile(*pair(output=(TileOutput.NORM, TileOutput.SUM))))) == {"not_measured"}
    [whole] = [each for each in tiles(on_gpus(profile(*pair(output=(TileOutput.BOTH,))))) if each.variant == "tiles"]
    assert whole.allowed


def test_a_machine_without_a_measurement_declines() -> None:
    assert refused(on_gpus("h200x4")) == {"not_measured"}


def test_another_number_of_ranks_is_no_measurement(profile: Profile) -> None:
    assert refused(on_gpus(profile(*pair(world=2)))) == {"not_measured"}


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
        assert (made.variant, made.cut, made.chunks) == ("tiles", CUT, ()) and not made.reduction.in_pieces
        assert made.reduction.share(TOKENS, 1) == third.share(TOKENS, 1)
    # What hands rows out costs nothing where nobody reads them whole.
    for decision in report.decisions[:2]:
        terms = {term.name: term.us for term in decision.chosen.estimate.terms}  # type: ignore[union-attr]
        assert terms.get("gather", 0.0) <= 0.0
    (plan,) = report.plans
    assert {placed.name for placed in plan.buffers} >= {"staging", "output"}


def test_normalized_rows_may_lie_in_the_arena(profile: Profile, graphs: list[fx.Graph]) -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        total = residual + forms.all_reduce(torch.nn.functional.linear(x, weight))
        return (forms.rms(total, norm) @ weight, total)

    on_gpus(profile(*pair()), fn=block, force=(RULE,), disable=(OTHER,))
    (node,) = (n for n in graphs[-1].nodes if n.target is torch.ops.weave.gemm_all_reduce_norm.default)
    if decode(str(node.args[-1])).reduction.norm is None:
        pytest.fail("the norm was expected to be taken in")
    assert results_in_arena(node.args) == (0,)


@pytest.mark.parametrize("output", TileOutput)
def test_names_of_curves(output: TileOutput) -> None:
    name = name_of(output, CUT, 4096)
    assert name == f"tiles {output} columns=256 pairs=1 ctas=4 k=4096"
    assert ALL_REDUCE.parse(name) == (f"tiles {output}", CUT, 4096)


@pytest.mark.parametrize(
    "name",
    [
        "tiles",
        "chunks",
        "tiles norm columns=64 pairs=1 ctas=4 k=512",
        "tiles norm columns=256 pairs=0 ctas=4 k=512",
        "tiles norm columns=256 pairs=1 ctas=3 k=512",
        "tiles norm columns=256 pairs=1 ctas=4 k=0",
        "tiles rows columns=256 pairs=1 ctas=4 k=512",
    ],
)
def test_what_is_no_kernel_is_refused_by_name(name: str) -> None:
    with pytest.raises(ProfileError, match=RULE) as caught:
        ALL_REDUCE.parse(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)
