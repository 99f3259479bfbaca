"""FP8 linears on GPUs: the op quantizes the normalized rows where nothing else reads them, as models write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from functorch.compile import make_boxed_func
from torch import Tensor

from tests.graphs import forms
from tests.graphs.calls import calls, needed, sharded, sizes, targets
from tests.graphs.preview import FORCED, fake_group, previewed
from tests.graphs.quantizations import (
    CASES,
    E4M3,
    LEFT,
    Case,
    Form,
    Quantize,
    block,
    bounded_scale,
    chain,
    inverse,
    linear,
    stored,
    torchao_rows,
)
from tests.rewrites.test_all_reduce_rms_norm import inputs
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.fabrics import topology
from weaveopt.inductor import seams as inductor
from weaveopt.ops.reduction.buffers import RowFormat
from weaveopt.ops.reduction.call import Quant, ReductionCall
from weaveopt.pipeline.context import Known
from weaveopt.preview import rewritten_alone
from weaveopt.records.candidate import Fabric
from weaveopt.records.report import GraphReport

H = forms.HIDDEN
TEXT = {Quant.PER_TOKEN: " -> e4m3 per token", Quant.STATIC: " -> e4m3 static"}


def on_gpus(
    form: Form,
    *,
    static: bool = True,
    dynamic: bool = False,
    machine: str = "h200x4",
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    weights: forms.Weights | None = None,
    given: tuple[Tensor, Tensor] | None = None,
) -> GraphReport:
    weights = weights or forms.make_weights(dtype)
    report = previewed(
        lambda x, r: form(weights, x, r),
        given or inputs(dtype),
        world=4,
        machine=machine,
        device=device,
        static=static,
        dynamic=dynamic,
        force=FORCED,
    )
    assert report.fallbacks == ()
    return report


def quant_calls(graph: fx.Graph) -> list[ReductionCall]:
    return [call for call in calls(graph) if call.quant is not Quant.NONE]


STEPS = ("abs", "amax", "max.dim", "clamp", "div", "rsqrt", "convert_element_type", "all_reduce.default", "wait_tensor")


@pytest.mark.parametrize("static", [True, False], ids=["numbers", "symbols"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.quantize.__name__)
def test_the_op_quantizes(case: Case, static: bool, graphs: list[fx.Graph]) -> None:
    report = on_gpus(block(case.quantize), static=static)
    (decision,) = report.decisions
    assert decision.rewritten and decision.chosen.fabric is Fabric.PEER
    assert decision.site.description == "all_reduce(partial) + residual -> rms_norm(eps=1e-06)" + TEXT[case.quant]
    assert dict(decision.site.facts)["quantization"] == case.quant.value
    (call,) = quant_calls(graphs[-1])
    assert (call.quant, call.out_dtype, call.dtype) == (case.quant, "float8_e4m3fn", "bfloat16")
    found = targets(graphs[-1])
    assert not any(step in target for step in STEPS for target in found), found
    (product,) = graphs[-1].find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    rows = product.args[0].meta["val"]
    assert rows.dtype is E4M3 and rows.ndim == 2 and rows.shape[1] == H
    if case.quant is Quant.PER_TOKEN:
        scale = product.args[2].meta["val"]
        assert scale.dtype is torch.float32 and scale.ndim == 2 and scale.shape[1] == 1
    assert sizes(report.plans[0]) == needed(RowFormat(H, "bfloat16", "float8_e4m3fn", 4), call.table)
    lines = [line for line in report.rounding if "normalized rows are rounded" in line]
    assert len(lines) == 1
    assert any("not rounded to 16 bits" in line for line in report.rounding) is case.narrow
    bounds = [line for line in report.rounding if "bounded by 1e-12" in line]
    assert len(bounds) == bool(case.bound) and all(case.bound in line for line in bounds)


class Quantizer:
    """A quantization whose divisor and bounds are attributes."""

    def __init__(self) -> None:
        self.largest, self.least = 448.0, 1e-10

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True).float().clamp(min=self.least) / self.largest
        return (x.float() / scale).clamp(-self.largest, self.largest).to(E4M3).view(-1, H), scale.view(-1, 1)


def test_floats_of_the_program_are_numbers(graphs: list[fx.Graph]) -> None:
    """With symbolic sizes they are inputs of the graph."""
    report = on_gpus(block(Quantizer()), static=False, dynamic=True)
    (decision,) = report.decisions
    assert decision.rewritten and dict(decision.site.facts)["quantization"] == Quant.PER_TOKEN.value
    assert len(quant_calls(graphs[-1])) == 1
    assert [line for line in report.rounding if "bounded by 1e-12" in line and "1e-10" in line]


@pytest.mark.parametrize("static", [True, False], ids=["numbers", "symbols"])
@pytest.mark.parametrize("quantize", [torchao_rows, inverse, stored], ids=lambda quantize: quantize.__name__)
def test_residuals_between_quantizing_sites_stay_sharded(
    quantize: Quantize, static: bool, graphs: list[fx.Graph]
) -> None:
    report = on_gpus(chain(quantize), static=static)
    assert [d.rewritten for d in report.decisions] == [True] * 3
    assert sharded(graphs[-1]) == [(False, True), (True, True), (True, False)]
    assert len(quant_calls(graphs[-1])) == 3


@pytest.mark.parametrize("norm", [forms.rms, forms.rms_fp32, forms.rms_plus_one], ids=lambda norm: norm.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wherever_the_norm_rounds(
    norm: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, graphs: list[fx.Graph]
) -> None:
    on_gpus(block(inverse, norm), dtype=dtype)
    (call,) = quant_calls(graphs[-1])
    assert call.dtype == str(dtype).removeprefix("torch.")


def test_several_linears_share_one_quantization(graphs: list[fx.Graph]) -> None:
    def form(w: forms.Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = residual + forms.all_reduce(x @ w.product)
        normed = forms.rms(total, w.norm)
        return *(linear(*torchao_rows(normed), out) for out in (48, 32, 16)), total

    on_gpus(form)
    assert len(quant_calls(graphs[-1])) == 1
    found = targets(graphs[-1])
    assert found.count("aten._scaled_mm.default") == 3 and not any("amax" in target for target in found)


def test_no_residual_keeps_the_tokens_apart(graphs: list[fx.Graph]) -> None:
    def form(w: forms.Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        flat = x.reshape(-1, forms.INNER) @ w.product
        rows, scale = bounded_scale(forms.rms(forms.all_reduce(flat).view(residual.shape), w.norm))
        return (linear(rows, scale),)

    on_gpus(form, static=False)
    assert len(quant_calls(graphs[-1])) == 1


@pytest.mark.parametrize(("form", "reason"), LEFT, ids=[str(index) for index in range(len(LEFT))])
def test_left_in_the_graph_with_its_reason(form: Form, reason: str, graphs: list[fx.Graph]) -> None:
    report = on_gpus(form)
    (decision,) = report.decisions
    assert decision.rewritten and quant_calls(graphs[-1]) == []
    assert targets(graphs[-1]).count("weave.all_reduce_norm.default") == 1
    assert " -> e4m3 left as it is: " in decision.site.description and reason in decision.site.description
    facts = dict(decision.site.facts)
    assert (facts["out_dtype"], facts["quantization"]) == ("", "none")
    assert not any("normalized rows are rounded" in line for line in report.rounding)


def test_rows_that_bulk_copies_do_not_take(graphs: list[fx.Graph]) -> None:
    w = forms.make_weights(torch.bfloat16)
    w = replace(w, product=w.product[:, :56].contiguous(), norm=w.norm[:56], after=w.after[:56])
    x, residual = inputs(torch.bfloat16)

    def form(w: forms.Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = residual + forms.all_reduce(x @ w.product)
        rows, scale = bounded_scale(forms.rms(total, w.norm))
        return (rows.float() @ w.after.float()) * scale, total

    report = on_gpus(form, weights=w, given=(x, residual[..., :56].contiguous()))
    (decision,) = report.decisions
    assert decision.rewritten and quant_calls(graphs[-1]) == []
    (note,) = (note for note in decision.chosen.notes if "e4m3" in note)
    assert "rows of a multiple of 16 elements (hidden 56)" in note


def test_cpu_ranks_keep_it_in_the_graph(graphs: list[fx.Graph]) -> None:
    report = on_gpus(block(inverse), machine="cpu", device="cpu")
    (decision,) = report.decisions
    assert decision.rewritten and decision.chosen.fabric is Fabric.SHM
    assert any("e4m3 rows are made" in note and "shm has no kernel" in note for note in decision.chosen.notes)
    assert quant_calls(graphs[-1]) == [] and "aten.max.dim" in targets(graphs[-1])


def test_multicast_takes_the_partial_result(graphs: list[fx.Graph]) -> None:
    """The op that quantizes has no form that multiplies: the GEMM stays in the graph there too."""
    report = on_gpus(block(inverse), machine="h100x8")
    (decision,) = report.decisions
    assert decision.rewritten and len(quant_calls(graphs[-1])) == 1
    assert "weave.mm_all_reduce_norm.default" not in targets(graphs[-1])
    assert decision.chosen.estimate is not None
    assert "copy" not in {term.name for term in decision.chosen.estimate.terms}


def executing_as_gpus(made: list[ReductionCall]) -> Callable[..., object]:
    """Rewrites as for four GPUs and runs the graph here: without peers, the library's all-reduce changes nothing."""

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        known = Known(topology.fake(4, device="cuda"), cost_model.load("h200x4"))
        done = rewritten_alone(module, (), inductor.GraphPass.INFERENCE, Config(force=FORCED), known)
        assert done.report.fallbacks == () and done.result is not None
        made.extend(quant_calls(done.result))
        module.graph = done.result
        module.recompile()
        return make_boxed_func(module.forward)

    return lambda graph_module, example_inputs: inductor.compile_with(inner_compile, graph_module, example_inputs)


def in_order(rows: Tensor) -> Tensor:
    """Neighbouring e4m3 values as neighbouring integers."""
    bits = rows.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


@pytest.mark.parametrize("dynamic", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.quantize.__name__)
def test_the_rewritten_graph_computes_the_same(case: Case, dynamic: bool) -> None:
    """Results are equal bit by bit, except for values midway between two of e4m3, which may be rounded to the other
    one.

    Where the model computes in fp32, scales agree to 2**-22, and a quotient turns only that near the middle; where it
    rounds scale or quotient to bf16, 2**-8 takes the place of that. e4m3 has 4 bits: never more than the neighbour.
    """
    weights = forms.make_weights(torch.bfloat16)

    def fn(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = residual + forms.all_reduce(x @ weights.product)
        return (*case.quantize(forms.rms(total, weights.norm)), total)

    made: list[ReductionCall] = []
    x, residual = inputs(torch.bfloat16, tokens=(3, 170))
    residual = residual * torch.logspace(-3, 2, 170).view(1, -1, 1).bfloat16()
    torch._dynamo.reset()
    with fake_group(4), torch.no_grad():
        want_rows, want_scale, want_total = fn(x, residual)
        normed = forms.rms(want_total, weights.norm).view(-1, H)
        if dynamic:
            for value in (x, residual):
                torch._dynamo.mark_dynamic(value, 1)
        rows, scale, total = torch.compile(fn, backend=executing_as_gpus(made), fullgraph=True)(x, residual)
    assert [call.quant for call in made] == [case.quant]
    assert made[0].max_tokens == (8192 if dynamic else 510)
    assert torch.equal(total, want_total)
    assert (rows.dtype, rows.shape, rows.stride()) == (E4M3, want_rows.shape, want_rows.stride())
    assert (scale.dtype, scale.shape, scale.stride()) == (torch.float32, want_scale.shape, want_scale.stride())
    near = 2**-8 if case.narrow else 2**-22
    torch.testing.assert_close(scale, want_scale, rtol=near, atol=0)
    steps = (in_order(rows) - in_order(want_rows)).abs()
    assert steps.max() <= 1
    middle = (rows.double() + want_rows.double()) / 2
    distance = (normed.double() / scale.double() - middle).abs()
    turned = steps == 1
    assert (distance[turned] <= near * middle[turned].abs()).all()
    assert turned.float().mean() < (1e-1 if case.narrow else 1e-2)


def test_rows_of_zeros_give_zeros() -> None:
    """Without a lower bound the model divides 0 by 0."""
    made: list[ReductionCall] = []
    weights = forms.make_weights(torch.bfloat16)

    def fn(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return torchao_rows(forms.rms(residual + forms.all_reduce(x @ weights.product), weights.norm))

    x, residual = inputs(torch.bfloat16)
    torch._dynamo.reset()
    with fake_group(4), torch.no_grad():
        rows, scale = torch.compile(fn, backend=executing_as_gpus(made), fullgraph=True)(x * 0, residual * 0)
    assert len(made) == 1 and not rows.float().any() and (scale > 0).all()
