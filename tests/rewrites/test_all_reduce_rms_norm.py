"""The rule: every form is found, every refusal has its reason, and the rewritten graph computes the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.fx as fx
from torch import Tensor

from tests.graphs import forms
from tests.graphs.calls import sharded, targets
from tests.graphs.dtyped import forms_with, name_of
from tests.graphs.executing import FORCED, Backend, executing, executing_alone
from tests.graphs.nonempty import some
from tests.graphs.preview import previewed
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL, equal_ranks
from weaveopt.records.candidate import LEAVE, Candidate, Fabric
from weaveopt.records.report import GraphReport
from weaveopt.rewrites import RULES

EXPECTED = {
    "pre_norm": "all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
    "other_order": "all_reduce(partial) + residual -> rms_norm(eps=1e-05)",
    "residual_dead": "all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
    "gemma_norm": "all_reduce(partial) + residual -> rms_norm(eps=3e-06, weight + 1)",
    "fp32_weight": "all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
    "library_norm": "all_reduce(partial) + residual -> rms_norm(eps=0.0001)",
    "no_weight": "all_reduce(partial) + residual -> rms_norm(eps=0.0001)",
    "layer_norm": "all_reduce(partial) + residual -> layer_norm(eps=1e-05)",
    "cohere": "all_reduce(partial) + all_reduce(partial) + residual -> layer_norm(eps=1e-05)",
    "mixture": "all_reduce(partial) + all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
    "post_norm": "all_reduce(partial) -> rms_norm(eps=1e-05) + residual",
    "gemma_sandwich": "all_reduce(partial) -> rms_norm(eps=3e-06, weight + 1) + residual"
    " -> rms_norm(eps=3e-06, weight + 1)",
    "embedding": "(all_reduce(partial)) * scale -> rms_norm(eps=1e-06)",
    "scaled": "(all_reduce(partial)) * scale + residual -> rms_norm(eps=1e-06)",
    "reduced_bias": "all_reduce(partial) + bias + residual -> rms_norm(eps=1e-06)",
    "parallel_biases": "all_reduce(partial) + all_reduce(partial) + bias + bias + residual -> layer_norm(eps=1e-05)",
    "two_residuals": "all_reduce(partial) + residual + residual -> rms_norm(eps=1e-06)",
    "product_bias": "all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
    "scaled_product": "all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
    "two_dimensions": "all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
    "no_residual": "all_reduce(partial) -> rms_norm(eps=1e-06)",
    "norm_read_twice": "all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
    "chain": "all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
    "sum_alone": "all_reduce(partial); no norm: none over the hidden dimension follows",
    "layer_end": "all_reduce(partial) + residual; no norm: none over the hidden dimension follows",
    "read_by_several": "all_reduce(partial); no norm: none over the hidden dimension follows",
    "other_work": "all_reduce(partial) + residual; no norm: none over the hidden dimension follows",
    "residual_in_fp32": "all_reduce(partial); no norm: the addition changes the dtype or shape of the reduced value",
    "heads_normed": "all_reduce(partial); no norm: a view splits the hidden dimension before the norm",
    "normed_in_double": "all_reduce(partial) + residual -> rms_norm(eps=1e-06)",
}


ON_RANKS = ((2, torch.bfloat16, (2, 7)), (2, torch.float16, (5, 51)))
ON_EQUAL_RANKS = ((2, torch.float32, (1, 160)), (3, torch.float32, (5, 1)))


def inputs(dtype: torch.dtype, rank: int = 0, tokens: tuple[int, int] = (2, 7)) -> tuple[Tensor, Tensor]:
    x = torch.randn(*tokens, forms.INNER, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)
    residual = torch.randn(*tokens, forms.HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)
    return x, residual


@pytest.mark.parametrize(("form", "dtype"), forms_with(torch.bfloat16, torch.float32), ids=name_of)
def test_form_is_found(form: object, dtype: torch.dtype) -> None:
    assert callable(form)
    weights = forms.make_weights(dtype)
    report = previewed(lambda x, r: form(weights, x, r), inputs(dtype))
    assert report.fallbacks == ()
    told = [d.site.description.partition(" (node ")[0] for d in report.decisions]
    assert told == [EXPECTED[form.__name__]] * (3 if form is forms.chain else 1)
    assert all(d.rewritten for d in report.decisions)


def test_residual_of_a_chain_stays_sharded(graphs: list[fx.Graph]) -> None:
    weights = forms.make_weights(torch.float32)
    previewed(lambda x, r: forms.chain(weights, x, r), inputs(torch.float32))
    assert sharded(graphs[-1]) == [(False, True), (True, True), (True, False)]


def _two_shot(form: Callable[..., object]) -> GraphReport:
    weights = forms.make_weights(torch.float32)
    report = previewed(lambda x, r: form(weights, x, r), inputs(torch.float32, tokens=(2, 700)))
    assert all(d.chosen.variant.startswith("two_shot") for d in report.decisions)
    return report


def _gathers(candidate: Candidate) -> bool:
    terms = {} if candidate.estimate is None else {term.name for term in candidate.estimate.terms}
    return "gather" in terms


def test_a_whole_sum_is_handed_out_alone_or_gathered_whichever_costs_less() -> None:
    """If others read the sum, the op gathers rows of both results, or the sum alone, which every rank normalizes."""
    (decision,) = _two_shot(forms.pre_norm).decisions
    found = (decision.chosen, *decision.alternatives)
    by_name = {each.variant: each for each in found if each.fabric is Fabric.SHM}
    both, alone = by_name["two_shot"], by_name["two_shot, norm apart"]
    assert _gathers(both) and not _gathers(alone)
    assert both.estimate is not None and alone.estimate is not None
    assert decision.chosen.variant == (alone if alone.estimate.us < both.estimate.us else both).variant
    assert any(note.startswith("norm apart:") for note in decision.chosen.notes) != _gathers(decision.chosen)


@pytest.mark.parametrize("form", [forms.residual_dead, forms.chain])
def test_a_sharded_sum_or_one_that_nothing_reads_is_not_handed_out(form: Callable[..., object]) -> None:
    for decision in some(_two_shot(form).decisions):
        assert not _gathers(decision.chosen) and decision.chosen.variant == "two_shot"
        assert not any(note.startswith(("gather:", "norm apart:")) for note in decision.chosen.notes)


def test_rows_without_a_residual_keep_their_shape_where_the_norm_stays_in_the_graph() -> None:
    """The sum is a view of what was reduced, and of symbolic sizes."""
    weights = forms.make_weights(torch.float32)

    def form(x: Tensor) -> tuple[Tensor, Tensor]:
        flat = forms.all_reduce(x.reshape(-1, forms.INNER) @ weights.product)
        total = flat.view(*x.shape[:-1], forms.HIDDEN)
        return forms.rms(total, weights.norm), total

    report = previewed(form, inputs(torch.float32, tokens=(2, 700))[:1], dynamic=True)
    assert report.fallbacks == ()
    assert [d.chosen.variant for d in report.decisions] == ["two_shot, norm apart"]


def test_product_writes_into_the_arena_without_a_copy(graphs: list[fx.Graph]) -> None:
    weights = forms.make_weights(torch.float32)
    previewed(lambda x, r: forms.cohere(weights, x, r), inputs(torch.float32))
    found = targets(graphs[-1])
    assert found.count("weave.mm_all_reduce_norm.default") == 1
    # The other product is what the first one accumulates onto; neither all-reduce is left.
    assert found.count("aten.mm.default") == 2 and not any("c10d" in target for target in found)


def _maximum(w: forms.Weights, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    return (forms.rms(r + functional.all_reduce(x @ w.product, "max", dist.group.WORLD), w.norm),)


def _double(w: forms.Weights, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    return (forms.rms(r.double() + forms.all_reduce((x @ w.product).double()), w.norm.double()),)


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (_maximum, "not_a_sum"),
        (_double, "dtype_not_supported"),
    ],
)
def test_refusal_has_its_reason(form: object, code: str) -> None:
    assert callable(form)
    weights = forms.make_weights(torch.float32)
    report = previewed(lambda x, r: form(weights, x, r), inputs(torch.float32))
    assert report.fallbacks == ()
    for decision in report.decisions:
        assert decision.chosen.choice == LEAVE
        assert [r.code for r in decision.site.rejections] == [code]
        assert decision.site.rejections[0].message and decision.site.rejections[0].values


def _four_dimensions(w: forms.Weights, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    total = r.unsqueeze(0) + forms.all_reduce((x @ w.product).unsqueeze(0))
    return (forms.rms(total, w.norm),)


def _sequences_first(w: forms.Weights, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """The residual's strides are those of both results."""
    total = r.transpose(0, 1).contiguous().transpose(0, 1) + forms.all_reduce(x @ w.product)
    return forms.rms(total, w.norm), total


@pytest.mark.parametrize(
    ("form", "codes"),
    [(_four_dimensions, ["shape_not_known"]), (_sequences_first, ["layout_not_supported"] * 2)],
)
def test_what_the_rule_does_not_take_is_its_own_candidate_with_all_reasons(form: object, codes: list[str]) -> None:
    """The site is recognized, and another rule might take it."""
    assert callable(form)
    weights = forms.make_weights(torch.float32)
    report = previewed(lambda x, r: form(weights, x, r), inputs(torch.float32))
    (decision,) = report.decisions
    assert report.fallbacks == () and decision.chosen.choice == LEAVE and decision.site.rejections == ()
    (candidate,) = (each for each in decision.alternatives if each.choice == "all_reduce_rms_norm")
    assert [r.code for r in candidate.rejections] == codes
    assert decision.baseline is not None and decision.baseline.us > 0


def test_a_norm_that_the_kernels_do_not_take_stays_in_the_graph() -> None:
    """It is a refused candidate of its own, with the reason; the reduction is rewritten without it."""
    weights = forms.make_weights(torch.float32)
    report = previewed(lambda x, r: forms.normed_in_double(weights, x, r), inputs(torch.float32))
    (decision,) = report.decisions
    assert decision.rewritten and decision.chosen.variant.endswith("norm apart")
    assert ["dtype_changes"] in [[r.code for r in each.rejections] for each in decision.alternatives]


def test_no_tokens_ask_for_no_memory() -> None:
    """An arena of no bytes is refused, and a group that was refused one gets no other."""
    weights = forms.make_weights(torch.float32)
    report = previewed(lambda x, r: forms.pre_norm(weights, x, r), inputs(torch.float32, tokens=(2, 0)))
    assert report.plans == () and report.fallbacks == ()
    assert [[r.code for r in d.site.rejections] for d in report.decisions] == [["no_tokens"]]


def test_one_rank_is_left_alone() -> None:
    weights = forms.make_weights(torch.float32)
    report = previewed(lambda x, r: forms.pre_norm(weights, x, r), inputs(torch.float32), world=1)
    assert {r.code for d in report.decisions for c in d.alternatives for r in c.rejections} <= {"one_rank"}
    assert report.num_rewritten == 0


def test_a_disabled_rule_says_so() -> None:
    weights = forms.make_weights(torch.float32)
    fn = lambda x, r: forms.pre_norm(weights, x, r)  # noqa: E731
    report = previewed(fn, inputs(torch.float32), disable=RULES.names, force=())
    codes = {r.code for d in report.decisions for c in d.alternatives for r in c.rejections}
    assert report.num_rewritten == 0 and "disabled" in codes


def _check_forms(rank: int, dtype: torch.dtype, tokens: tuple[int, int], backend: Backend = executing) -> list[str]:
    """Runs every form rewritten and eager; returns what was not rewritten."""
    weights = forms.make_weights(dtype)
    x, residual = inputs(dtype, rank, tokens)
    left: list[str] = []
    for form in forms.FORMS:
        reports: list[GraphReport] = []
        torch._dynamo.reset()
        with torch.no_grad():
            want = form(weights, x, residual)
            compiled = torch.compile(lambda x, r, form=form: form(weights, x, r), backend=backend(FORCED, reports))
            got = compiled(x, residual)
            again = compiled(x, residual)
        for index, (a, b, c) in enumerate(zip(got, want, again, strict=True)):
            assert a.dtype == b.dtype
            exchanged = torch.bfloat16 if form is forms.residual_in_fp32 else dtype
            assert_close(a.to(exchanged), b.to(exchanged), LIBRARY, f"{form.__name__} output {index}")
            assert torch.equal(a, c), f"{form.__name__} output {index} differs between runs"
            everyone = [torch.empty_like(a) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, a.contiguous())
            assert all(torch.equal(a, other) for other in everyone), (
                f"{form.__name__} output {index} differs between ranks"
            )
        left.extend(form.__name__ for report in reports if report.num_rewritten != len(report.decisions))
    return left


@pytest.mark.parametrize(("world", "dtype", "tokens"), [*ON_RANKS, *(ON_EQUAL_RANKS if TEST_ALL else ())])
def test_forms_compute_the_same(world: int, dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    """On real ranks, whose rows differ: few rows, which every rank reduces, and many, which the ranks do not divide."""
    for left in run_ranks(_check_forms, world, dtype, tokens, timeout_s=300):
        assert left == []


@pytest.mark.parametrize(("world", "dtype", "tokens"), ON_EQUAL_RANKS if TEST_ALL else ON_EQUAL_RANKS[:1])
def test_forms_compute_the_same_in_other_sizes(world: int, dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    """Operands that the rewritten graph passes to the operators, which `tests/ops` runs on real ranks."""
    with equal_ranks(world):
        assert _check_forms(0, dtype, tokens, partial(executing_alone, world=world)) == []
