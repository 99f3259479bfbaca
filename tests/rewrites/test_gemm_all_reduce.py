"""The rule: which GEMMs it takes in, why it leaves others, and the rewritten graph against eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from tests.graphs import forms
from tests.graphs.calls import targets
from tests.graphs.executing import Backend, executing, executing_alone
from tests.graphs.models import FAMILIES, VOCABULARY, load, save
from tests.graphs.preview import previewed
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL, equal_ranks
from weaveopt.config import Config
from weaveopt.ops.gemm_comm.all_reduce.call import GemmReductionCall, decode
from weaveopt.ops.reduction.call import SumOut
from weaveopt.records.candidate import LEAVE, Candidate, Fabric
from weaveopt.records.report import GraphReport
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites import RULES
from weaveopt.rewrites.all_reduce_rms_norm import AllReduceRMSNorm
from weaveopt.rewrites.gemm_all_reduce import GemmAllReduce
from weaveopt.rule import Context, FoundSite, Proposal
from weaveopt.sites.reduction.matcher import ReductionFacts

RULE, OTHER = "gemm_all_reduce", "all_reduce_rms_norm"
OTHERS = (OTHER, "shard_norm")
"""Other rules that propose at the same sites."""
CONFIG = Config(force=(RULE,), disable=OTHERS, strict=True, timeout_s=30.0, compile_timeout_s=60.0)
NOT_TAKEN = {
    "cohere": "several_partials",
    "mixture": "several_partials",
    "parallel_biases": "several_partials",
    "product_bias": "bias_not_supported",
    "scaled_product": "gemm_is_scaled",
    "embedding": "no_gemm",
}
"""Forms whose GEMM the rule leaves, and why. In fp32 the cast of `residual_in_fp32` follows the GEMM."""
ON_RANKS = ((3, torch.float32, (2, 121)),)
ON_EQUAL_RANKS = ((2, torch.bfloat16, (2, 7)), (3, torch.float32, (5, 1)))
Form = Callable[[forms.Weights, Tensor, Tensor], tuple[Tensor, ...]]


def inputs(dtype: torch.dtype, rank: int = 0, tokens: tuple[int, int] = (2, 7)) -> tuple[Tensor, Tensor]:
    x = torch.randn(*tokens, forms.INNER, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)
    residual = torch.randn(*tokens, forms.HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)
    return x, residual


def seen(form: Form, *, force: tuple[str, ...] = (RULE,), dynamic: bool = False) -> GraphReport:
    weights = forms.make_weights(torch.float32)
    report = previewed(
        lambda x, r: form(weights, x, r), inputs(torch.float32), disable=OTHERS, force=force, dynamic=dynamic
    )
    assert report.fallbacks == ()
    return report


def own(candidates: Sequence[Candidate], fabric: Fabric) -> list[Candidate]:
    return [each for each in candidates if each.choice == RULE and each.fabric is fabric]


def chunked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """GPU candidates in chunks; `test_gemm_all_reduce_tiles` has those in tiles."""
    return [each for each in own(candidates, Fabric.PEER) if each.variant.startswith("chunks")]


def calls(graph: fx.Graph) -> list[tuple[str, GemmReductionCall]]:
    """Weight layout and constants of every call."""
    found = [node for node in graph.nodes if node.target is torch.ops.weave.gemm_all_reduce_norm.default]
    return [(str(node.args[2]), decode(str(node.args[-1]))) for node in found]


@pytest.mark.parametrize("form", forms.FORMS, ids=lambda form: form.__name__)
def test_form_is_taken_or_says_why(form: Form) -> None:
    report = seen(form)
    why = NOT_TAKEN.get(form.__name__, "no_gemm" if form is forms.residual_in_fp32 else None)
    for decision in report.decisions:
        codes = {r.code for each in decision.alternatives if each.choice == RULE for r in each.rejections}
        if why is None:
            assert decision.chosen.choice == RULE and decision.chosen.fabric is Fabric.SHM
        else:
            assert decision.chosen.choice == LEAVE and why in codes, codes


def test_both_layouts_of_weights(graphs: list[fx.Graph]) -> None:
    """As linear layers keep them, and as they are multiplied; the transposed view disappears."""

    def block(x: Tensor, residual: Tensor, linear: Tensor, plain: Tensor, norm: Tensor) -> Tensor:
        total = residual + forms.all_reduce(torch.nn.functional.linear(x, linear))
        inner = forms.rms(total, norm)[..., : forms.INNER].contiguous()
        return forms.rms(total + forms.all_reduce(inner @ plain), norm)

    x, residual = inputs(torch.float32)
    weights = forms.make_weights(torch.float32)
    linear = weights.product.t().contiguous()
    previewed(block, (x, residual, linear, weights.product, weights.norm), disable=OTHERS, force=(RULE,), static=True)
    assert [layout for layout, _ in calls(graphs[-1])] == ["nk", "kn"]
    found = targets(graphs[-1])
    assert not any(("mm" in name and "weave" not in name) or "c10d" in name for name in found), found
    assert not any(name in ("aten.t.default", "aten.permute.default", "aten.transpose.int") for name in found), found


def test_a_product_that_others_read_stays() -> None:
    def form(w: forms.Weights, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        product = x @ w.product
        return forms.rms(r + forms.all_reduce(product), w.norm), product.relu()

    (decision,) = seen(form).decisions
    assert decision.chosen.choice == LEAVE
    (candidate,) = (each for each in decision.alternatives if each.choice == RULE)
    assert [r.code for r in candidate.rejections] == ["read_by_others"]


def test_sums_are_handed_out_whole(graphs: list[fx.Graph]) -> None:
    """Rows are divided chunk by chunk: no site of a chain may hold rows of its own only."""
    seen(forms.chain)
    found = [call.reduction for _, call in calls(graphs[-1])]
    assert [call.residual_sharded for call in found] == [False] * 3
    assert [call.sum_out for call in found] == [SumOut.WHOLE, SumOut.WHOLE, SumOut.NONE]


def test_memory_is_that_of_a_chunk() -> None:
    """The arena does not grow with the number of chunks."""
    (plan,) = seen(forms.residual_dead).plans
    weights = forms.make_weights(torch.float32)
    (other,) = previewed(lambda x, r: forms.residual_dead(weights, x, r), inputs(torch.float32)).plans
    assert 0 < sum(b.num_bytes for b in plan.buffers) <= sum(b.num_bytes for b in other.buffers)


def on_gpus(tokens: int, k: int, hidden: int, **options: tuple[str, ...]) -> GraphReport:
    """Half a Llama layer on four H200: rows of [tokens, hidden], GEMMs of depth k."""

    def block(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + forms.all_reduce(torch.nn.functional.linear(x, weight))
        return forms.rms(total, norm), total

    shapes = ((tokens, k), (tokens, hidden), (hidden, k), (hidden,))
    given = tuple(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    options = {"force": (), **options}
    return previewed(block, given, world=4, machine="h200x4", device="cuda", static=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 64, 256])
def test_a_gemm_of_one_wave_has_nothing_to_overlap(tokens: int) -> None:
    (decision,) = on_gpus(tokens, 2048, 8192).decisions
    found = chunked(decision.alternatives)
    assert found
    for candidate in found:
        (why,) = candidate.rejections
        assert why.code == "one_wave" and dict(why.values)["waves"] == 1


def test_a_large_gemm_is_overlapped_where_that_is_predicted_faster() -> None:
    (decision,) = on_gpus(8192, 7168, 8192).decisions
    assert decision.chosen.choice == RULE and decision.chosen.variant == "chunks, norm apart"
    estimate = decision.chosen.estimate
    assert estimate is not None and decision.baseline is not None
    terms = {term.name: term.us for term in estimate.terms}
    assert {"gemm", "exchange", "overlapped", "last chunk"} <= terms.keys() and terms["overlapped"] < 0
    assert estimate.us_with_margin < decision.baseline.us
    others = [each for each in decision.alternatives if each.choice == OTHER and each.estimate is not None]
    assert others and all(each.estimate.us_with_margin > estimate.us for each in others if each.estimate is not None)
    parameters = dict(decision.chosen.parameters)
    assert 0 < int(parameters["num_ctas"]) <= 64 and int(parameters["chunk_tokens"]) % 128 == 0


def test_a_machine_whose_contention_is_not_known_is_left_alone() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + forms.all_reduce(torch.nn.functional.linear(x, weight))
        return forms.rms(total, norm), total

    shapes = ((8192, 7168), (8192, 8192), (8192, 7168), (8192,))
    given = tuple(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    report = previewed(block, given, world=8, machine="gb200-nvl72", device="cuda", static=True, force=())
    (decision,) = report.decisions
    found = [r.code for each in chunked(decision.alternatives) for r in each.rejections]
    assert found and set(found) == {"contention_not_measured"}


def test_one_rule_switched_off_leaves_the_other_alone_at_the_site() -> None:
    weights = forms.make_weights(torch.float32)

    def choices(*disable: str) -> set[str]:
        report = previewed(lambda x, r: forms.pre_norm(weights, x, r), inputs(torch.float32), disable=disable, force=())
        return {d.chosen.choice for d in report.decisions}

    assert choices(*OTHERS) == {RULE}, "CPU ranks: cheaper than the library even in chunks"
    assert choices(RULE) == {OTHER}
    assert choices(RULE, *OTHERS) == {LEAVE}


def test_of_equal_work_the_whole_gemm_is_preferred_on_cpu_ranks() -> None:
    """Chunks hide nothing there."""
    weights = forms.make_weights(torch.float32)
    report = previewed(lambda x, r: forms.pre_norm(weights, x, r), inputs(torch.float32), force=())
    assert {d.chosen.choice for d in report.decisions} == {OTHER}


def test_a_symbolic_token_count_has_a_table(graphs: list[fx.Graph]) -> None:
    """Every count goes in as many chunks as are best there, not in chunks as large as the hint's."""
    (decision,) = seen(forms.residual_dead).decisions
    assert decision.chosen.choice == RULE
    ((_, call),) = calls(graphs[-1])
    assert [(row.max_tokens, f"chunks of {row.chunk_tokens}") for row in call.chunks] == [
        (row.max_tokens, row.variant) for row in decision.chosen.table
    ]
    assert call.chunk_tokens(14) == dict(decision.chosen.parameters)["chunk_tokens"] == 7
    most = decision.site.tokens.most
    assert call.chunks[-1].max_tokens == most and call.reduction.max_tokens == call.chunk_tokens(most) > most // 20
    assert call.chunk_tokens(2 * most) == call.chunk_tokens(most)
    assert all(decision.site.tokens.least <= row.max_tokens for row in call.chunks)


def _check_forms(rank: int, dtype: torch.dtype, tokens: tuple[int, int], backend: Backend = executing) -> list[str]:
    """Runs every form rewritten and eager; returns what was rewritten."""
    weights = forms.make_weights(dtype)
    x, residual = inputs(dtype, rank, tokens)
    taken: list[str] = []
    for form in forms.FORMS:
        reports: list[GraphReport] = []
        torch._dynamo.reset()
        with torch.no_grad():
            want = form(weights, x, residual)
            compiled = torch.compile(lambda x, r, form=form: form(weights, x, r), backend=backend(CONFIG, reports))
            got, again = compiled(x, residual), compiled(x, residual)
        for index, (a, b, c) in enumerate(zip(got, want, again, strict=True)):
            what = f"{form.__name__} output {index}"
            exchanged = torch.bfloat16 if form is forms.residual_in_fp32 else dtype
            assert_close(a.to(exchanged), b.to(exchanged), LIBRARY, what)
            assert torch.equal(a, c), f"{what} differs between runs"
            everyone = [torch.empty_like(a) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, a.contiguous())
            assert all(torch.equal(a, other) for other in everyone), f"{what} differs between ranks"
        if any(d.chosen.choice == RULE for report in reports for d in report.decisions):
            taken.append(form.__name__)
    return taken


def _check_taken(taken: list[str]) -> None:
    missing = {form.__name__ for form in forms.FORMS} - set(taken) - NOT_TAKEN.keys()
    assert missing <= {"residual_in_fp32"} and not set(taken) & NOT_TAKEN.keys()


@pytest.mark.parametrize(("world", "dtype", "tokens"), [*ON_RANKS, *(ON_EQUAL_RANKS if TEST_ALL else ())])
def test_forms_compute_the_same(world: int, dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    """On real ranks, whose rows differ: several chunks, the last one shorter, none of which the ranks divide."""
    for taken in run_ranks(_check_forms, world, dtype, tokens, timeout_s=300):
        _check_taken(taken)


@pytest.mark.parametrize(("world", "dtype", "tokens"), ON_EQUAL_RANKS if TEST_ALL else ON_EQUAL_RANKS[:1])
def test_forms_compute_the_same_in_other_sizes(world: int, dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    """Operands that the rewritten graph passes to the operator, which `tests/ops` runs on real ranks."""
    with equal_ranks(world):
        _check_taken(_check_forms(0, dtype, tokens, partial(executing_alone, world=world)))


DEPTHS = (forms.INNER, forms.INNER - 8, forms.INNER - 16)
"""Depths of the GEMMs of a chain, which distinguish its sites."""


class ChunksAt(GemmAllReduce):
    """Proposes at one site of a chain."""

    def __init__(self, place: int) -> None:
        self.depth = DEPTHS[place]

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        return super().propose(found, tokens, context, usable_only) if _depth(found) == self.depth else ()


class WholeElsewhere(AllReduceRMSNorm):
    """Proposes at all the others."""

    def __init__(self, place: int) -> None:
        self.depth = DEPTHS[place]

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        return () if _depth(found) == self.depth else super().propose(found, tokens, context, usable_only)


def _depth(found: FoundSite) -> int:
    assert isinstance(found.facts, ReductionFacts)
    return found.facts.gemm_depth


def chain(w: forms.Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Three sites in a row, whose sums nothing else reads."""
    total, hidden = residual, x
    for depth in DEPTHS:
        total = total + forms.all_reduce(hidden[..., :depth].contiguous() @ w.product[:depth])
        hidden = forms.rms(total, w.norm) @ w.after
    return (hidden,)


def _check_neighbours(rank: int, place: int) -> list[list[str]]:
    """A chain of three sites one of which is taken by the other rule; sums are passed between them."""
    weights = forms.make_weights(torch.float32)
    rules = replace(RULES, site_rules=(WholeElsewhere(place), ChunksAt(place)))
    config = replace(CONFIG, force=(RULE, OTHER), disable=())
    x, residual = inputs(torch.float32, rank, (2, 120))
    reports: list[GraphReport] = []
    with torch.no_grad():
        want = chain(weights, x, residual)
        compiled = torch.compile(lambda x, r: chain(weights, x, r), backend=executing(config, reports, rules))
        for got in (compiled(x, residual), compiled(x, residual)):
            for a, b in zip(got, want, strict=True):
                assert_close(a, b, LIBRARY, f"chunks at site {place}")
    return [[d.chosen.choice for d in report.decisions] for report in reports]


@pytest.mark.parametrize("place", range(3))
def test_neighbours_of_the_other_rule_keep_working(place: int) -> None:
    expected = [RULE if index == place else OTHER for index in range(3)]
    assert run_ranks(_check_neighbours, 2, place, timeout_s=120) == [[expected]] * 2


def _check_llama(rank: int, folder: str, force: tuple[str, ...], backend: Backend = executing) -> None:
    """A tiny Llama under the plan that transformers ships. Five reductions a graph: the embedding's has no GEMM."""
    family = FAMILIES[0]
    if rank == 0:
        save(family, folder)
    dist.barrier()
    model = load(family, folder, dist.get_world_size())
    prompts = [torch.randint(3, VOCABULARY, (2, n), generator=torch.Generator().manual_seed(n)) for n in (9, 33)]
    reports: list[GraphReport] = []
    torch._dynamo.reset()
    config = replace(CONFIG, force=force)
    with torch.no_grad():
        wanted = [model(ids, use_cache=False).logits for ids in prompts]
        model.compile(backend=backend(config, reports), dynamic=False)
        for ids, want in zip(prompts, wanted, strict=True):
            got = model(ids, use_cache=False).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    chosen = [d.chosen.choice for report in reports for d in report.decisions if d.site.kind == "reduction"]
    assert len(reports) == 2
    assert chosen.count(RULE) == 4 * len(reports) and set(chosen) == {RULE, LEAVE}


def test_a_tiny_llama_computes_as_eager(tmp_path: Path) -> None:
    """On real ranks, each with its shards."""
    run_ranks(_check_llama, 2, str(tmp_path), (RULE,), timeout_s=300)


def test_a_tiny_llama_is_rewritten_where_the_price_says_so(tmp_path: Path) -> None:
    """On equal ranks: prices do not hang on what peers hold."""
    with equal_ranks(2):
        _check_llama(0, str(tmp_path), (), partial(executing_alone, world=2))
