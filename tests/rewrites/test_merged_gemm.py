"""GEMMs of one input as one: which are, what it costs, and that results, weights and strides stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weaveopt
from tests.graphs.preview import previewed
from tests.graphs.projected import Projected, weights
from weaveopt.autotune.candidate_run import MOST_SETS
from weaveopt.backend import weave
from weaveopt.inductor import prepared_inputs
from weaveopt.ops.merged_gemm import op
from weaveopt.ops.merged_gemm.adjacent import joined
from weaveopt.records.report import Decision, GraphReport
from weaveopt.rewrites import RULES
from weaveopt.rewrites.merged_gemm import RULE
from weaveopt.sites.projections.matcher import KIND, ProjectionMatcher

ON_CPU = replace(RULES, matchers=(ProjectionMatcher(("cpu",)),))
"""The rule, and no other, where its kernels are the CPU's."""


def compiled(model: Callable[..., object], strict: bool = True) -> Callable[..., object]:
    torch._dynamo.reset()
    options = {"force": [RULE], "strict": strict}
    return torch.compile(model, backend=partial(weave, options=options, rules=ON_CPU))  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# sites and prices


def decisions(report: GraphReport) -> list[Decision]:
    return [each for each in report.decisions if each.site.kind == KIND]


def gpu_report(fn: Callable[..., object], *inputs: Tensor, disable: tuple[str, ...] = ()) -> GraphReport:
    return previewed(fn, inputs, machine="h200x4", device="cuda", static=True, force=(), disable=disable)


def projections(*sizes: int, rows: int = 8, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return (torch.empty(1, rows, 4096, dtype=dtype), *(torch.empty(size, 4096, dtype=dtype) for size in sizes))


def three(x: Tensor, *each: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight).sin() for weight in each)


def test_few_rows_are_one_gemm_and_many_are_left_where_it_loses() -> None:
    [few] = decisions(gpu_report(three, *projections(2048, 512, 512)))
    assert few.chosen.choice == RULE and few.chosen.estimate is not None
    assert few.chosen.estimate.us < 0.7 * few.baseline.us
    assert few.site.description == "3 x (x @ w^T)" and few.site.groups == ()
    assert dict(few.site.facts)["columns"] == "2048 + 512 + 512"
    [many] = decisions(gpu_report(three, *projections(14336, 14336, rows=16384)))
    assert many.chosen.choice == "leave"
    [off] = decisions(gpu_report(three, *projections(2048, 512, 512), disable=(RULE,)))
    assert off.chosen.choice == "leave" and off.alternatives[0].rejections[0].code == "disabled"


def test_results_that_are_returned_are_copied() -> None:
    def returned(x: Tensor, *each: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight) for weight in each)

    [decision] = decisions(gpu_report(returned, *projections(2048, 512, 512)))
    estimate = next(each for each in (decision.chosen, *decision.alternatives) if each.choice == RULE).estimate
    assert estimate is not None and [term.name for term in estimate.terms] == ["gemm", "copy"]


def test_places_that_look_alike() -> None:
    x, wide, narrow = projections(2048, 512)
    y, bias = torch.empty_like(x), torch.empty(512, dtype=torch.bfloat16)

    def sites(fn: Callable[..., object], *inputs: Tensor) -> int:
        return len(decisions(gpu_report(fn, *inputs)))

    assert sites(lambda x, y, a, b: (F.linear(x, a).sin(), F.linear(y, b).sin()), x, y, wide, narrow) == 0
    assert sites(lambda x, a: (F.linear(x, a).sin(), F.linear(x, a).cos()), x, wide) == 0
    assert sites(lambda x, a, b: (F.linear(x, a).sin(), F.linear(x, b * 2).sin()), x, wide, narrow) == 0
    assert sites(lambda x, a, b: (F.linear(x, a).sin(), (x @ b).sin()), x, wide, narrow.t().contiguous()) == 0
    assert sites(lambda x, a, b, c: (F.linear(x, a).sin(), F.linear(x, b, c).sin()), x, wide, narrow, bias) == 0
    biased = lambda x, b, c, d, e: (F.linear(x, b, c).sin(), F.linear(x, d, e).sin())  # noqa: E731
    assert sites(biased, x, narrow, bias, narrow.clone(), bias.clone()) == 1
    assert sites(lambda x, a, b: (F.linear(x, a).sin(), F.linear(x.view(8, 4096), b).sin()), x, wide, narrow) == 1


@pytest.mark.parametrize(("columns", "hidden", "bias", "fits"), [
    (509, 4096, False, True), (509, 4096, True, False), (512, 4095, False, True), (509, 4095, False, False),
])  # fmt: skip
def test_weights_begin_at_aligned_addresses(columns: int, hidden: int, bias: bool, fits: bool) -> None:
    """Inductor copies inputs that it does not find aligned, in every call."""
    x = torch.empty(8, hidden, dtype=torch.bfloat16)
    each = [torch.empty(n, hidden, dtype=torch.bfloat16) for n in (columns, 512)]
    biases = [torch.empty(n, dtype=torch.bfloat16) for n in (columns, 512)] if bias else [None, None]

    def run(x: Tensor, a: Tensor, b: Tensor, c: Tensor | None, d: Tensor | None) -> tuple[Tensor, Tensor]:
        return F.linear(x, a, c).sin(), F.linear(x, b, d).sin()

    given = [x, *each, *(one for one in biases if one is not None)]
    fn = run if bias else lambda x, a, b: run(x, a, b, None, None)
    [decision] = decisions(gpu_report(fn, *given))
    codes = {reason.code for other in decision.alternatives for reason in other.rejections}
    assert ("not_aligned" in codes) is not fits, decision


def test_cpu_ranks_have_no_such_sites() -> None:
    x, *each = projections(64, 32)
    assert decisions(previewed(three, (x, *each), machine="cpu", static=True)) == []


@pytest.mark.parametrize("has_cuda", [False, True])
def test_training_leaves_weights_where_they_are(has_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each graph is watched for being captured."""
    monkeypatch.setattr(prepared_inputs, "runs_on_gpu", lambda _: has_cuda)
    monkeypatch.setattr(prepared_inputs, "_is_captured", lambda: False)
    model, plain = Projected(), Projected()
    plain.load_state_dict(model.state_dict())
    places = [each.data_ptr() for each in weights(model)]
    with torch.enable_grad():
        x = torch.randn(2, 3, 16)
        compiled(model)(x).sum().backward()  # type: ignore[attr-defined]
        plain(x).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert [each.data_ptr() for each in weights(model)] == places
    found = [each for graph in weaveopt.report(model).graphs for each in graph.decisions if each.site.kind == KIND]
    assert found and all(each.site.rejections[0].code == "training" for each in found)


# graphs that run


@pytest.mark.parametrize("bias", [False, True])
def test_compiled_layers_compute_the_same(bias: bool) -> None:
    model = Projected(bias)
    before, call = copy.deepcopy(model), compiled(model)
    for tokens in (3, 3, 5, 9):  # the second count makes sizes symbolic
        x = torch.randn(2, tokens, 16)
        torch.testing.assert_close(call(x), before(x))
    assert joined(weights(model)) is not None
    report = weaveopt.report(model)
    assert not report.fallbacks and all(each.decisions[0].chosen.choice == RULE for each in report.graphs)
    assert any("another order" in line for line in report.graphs[0].rounding)


def test_one_compiled_graph_for_several_layers() -> None:
    layers, x = [Projected(True) for _ in range(4)], torch.randn(2, 3, 16)
    calls = [torch.compile(each, backend=partial(weave, options={"force": [RULE]}, rules=ON_CPU)) for each in layers]
    for _ in range(2):
        for layer, call in zip(layers, calls, strict=True):
            torch.testing.assert_close(call(x), layer(x))
    assert all(joined(weights(each)) is not None for each in layers)


def test_weights_that_are_replaced_join_again() -> None:
    model, x = Projected(), torch.randn(2, 3, 16)
    call = compiled(model)
    call(x)
    for each in weights(model):
        each.data = torch.randn_like(each)
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x))
    assert joined(weights(model)) is not None
    for each in weights(model):
        each.mul_(-3.0)
    torch.testing.assert_close(call(x), model(x))


def test_weights_that_are_others_in_every_call_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with parameters that are loaded for each call: to move them takes longer than it saves."""
    monkeypatch.setattr(prepared_inputs, "MOST_TIMES", 3)
    model, x = Projected(), torch.randn(2, 3, 16)
    call = compiled(model, strict=False)
    for times in range(6):
        for each in weights(model):
            each.data = torch.randn_like(each)
        torch.testing.assert_close(call(x), model(x))
        assert (joined(weights(model)) is not None) == (times < 3), times
    [fallback] = weaveopt.report(model).fallbacks
    assert fallback.error == "the inputs were others in 3 calls"


def test_a_call_that_is_captured_moves_nothing_and_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without sites of the rule: the graph replays with the addresses that it saw."""
    captures, noted = [True], list[bool]()
    monkeypatch.setattr(prepared_inputs, "runs_on_gpu", lambda _: True)
    monkeypatch.setattr(prepared_inputs, "_is_captured", lambda: captures[0])
    monkeypatch.setattr(prepared_inputs, "note_capture", lambda: noted.append(True))
    model, x = Projected(), torch.randn(2, 3, 16)
    places = [each.data_ptr() for each in weights(model)]
    for count, option in enumerate(("disable", "force"), start=1):
        call = torch.compile(
            lambda x: model(x), backend=partial(weave, options={option: [RULE]}, rules=ON_CPU)
        )  # fmt: skip
        torch.testing.assert_close(call(x), model(x))
        assert len(noted) == count and [each.data_ptr() for each in weights(model)] == places
        torch._dynamo.reset()
    captures[0] = False
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert joined(weights(model)) is not None


def test_weights_stay_while_a_cuda_graph_lives_that_may_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have captured one from the model before it was compiled. All sites of a call ask once."""
    asked: list[bool] = []
    monkeypatch.setattr(prepared_inputs, "may_read_weights", lambda: not asked.append(True))
    model, x = torch.nn.Sequential(Projected(), Projected()), torch.randn(2, 3, 16)
    before = [each.data_ptr() for each in model.parameters()]
    call = torch.compile(
        lambda x: [each(x) for each in model], backend=partial(weave, options={"force": [RULE]}, rules=ON_CPU)
    )
    for _ in range(2):
        torch.testing.assert_close(call(x), [each(x) for each in model])
    assert [each.data_ptr() for each in model.parameters()] == before and len(asked) == 1
    [fallback] = weaveopt.report().fallbacks
    assert fallback.step == "first call" and "compile first" in fallback.error


def test_what_fails_while_weights_are_moved_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Projected(), torch.randn(2, 3, 16)
    monkeypatch.setattr(torch._C, "_storage_Use_Count", None)
    torch.testing.assert_close(compiled(model, strict=False)(x), model(x))
    assert "TypeError" in weaveopt.report(model).fallbacks[0].error


def test_weights_that_cannot_be_moved_are_reported_once() -> None:
    model, x = Projected(), torch.randn(2, 3, 16)
    kept, call = model.state_dict(), compiled(model, strict=False)
    for _ in range(3):
        torch.testing.assert_close(call(x), model(x))
    kept["layers.1.weight"].mul_(5.0)
    torch.testing.assert_close(call(x), model(x))
    [fallback] = weaveopt.report(model).fallbacks
    assert (fallback.step, fallback.error) == ("first call", "other tensors share the weights' memory")


def test_what_is_returned_has_the_strides_that_it_had() -> None:
    model = Projected()

    def call(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (layer(x) for layer in model.layers)
        return q, k.view(2, 3, 2, 4).transpose(1, 2), v.sin(), x + k.sum()

    x = torch.randn(2, 3, 16)
    for found, wanted in zip(compiled(call)(x), call(x), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride() and found.is_contiguous() == wanted.is_contiguous()
    assert joined(weights(model)) is not None


def test_attention_reads_slices() -> None:
    """Heads of 4 with grouped keys; views that cannot be made of a slice are copied."""
    model = Projected(True)

    def call(x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 3, -1, 4).transpose(1, 2) for layer in model.layers)
        rows = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return rows.transpose(1, 2).flatten() + model.layers[1](x).view(-1).sum()

    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(compiled(call)(x), call(x))
    assert joined(weights(model)) is not None


def test_candidates_are_timed_with_weights_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The option `verify` runs a site by itself, on inputs that are made up."""
    seen: list[bool] = []
    monkeypatch.setattr(op, "joined", lambda each: seen.append((found := joined(each)) is not None) or found)
    torch._dynamo.reset()
    options = {"verify": True, "strict": True}
    call = torch.compile(Projected(), backend=partial(weave, options=options, rules=ON_CPU))
    call(torch.randn(2, 3, 16))
    assert seen and sum(not each for each in seen) <= MOST_SETS, "each set of inputs is apart in its first call alone"
    assert not caplog.records


def test_inference_mode_and_no_grad_in_turns() -> None:
    model, x = Projected(), torch.randn(2, 3, 16)
    call = compiled(model)
    with torch.inference_mode():
        torch.testing.assert_close(call(x), model(x))
    assert not any(each.is_inference() for each in model.parameters())
    torch.testing.assert_close(call(x), model(x))
    with torch.enable_grad():
        model(x).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
