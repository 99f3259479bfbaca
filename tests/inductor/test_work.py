"""Work outside the sites: as many kernels as Inductor makes, as many bytes, nothing twice, nothing lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from tests import forms, models
from tests.inductor_kernels import Generated, captured, generated
from tests.preview import previewed
from weaveopt import backend, cost_model
from weaveopt.cli.layers import every_layer
from weaveopt.cli.model_source import Request, Source
from weaveopt.cli.preview import capture
from weaveopt.config import Config
from weaveopt.fabrics import topology
from weaveopt.inductor.fused import fuse, traffic_bytes
from weaveopt.inductor.lowered import Lowering
from weaveopt.pipeline.recognize import recognize
from weaveopt.records.report import GraphReport, Work, WorkFailure
from weaveopt.rule import CapturedGraph, Context

Form = Callable[[forms.Weights, Tensor, Tensor], tuple[Tensor, ...]]
FAMILIES = {family.id: family for family in models.FAMILIES}


def _requested(family: str, phase: str, batch: int) -> Request:
    return Request(model=family, tp=2, batch=batch, seq=64, phase=phase)


def _predicted(module: fx.GraphModule) -> tuple[int, int, dict[str, int]]:
    """Generated kernels, their bytes, and library calls by kind, of a whole graph without sites."""
    from weaveopt.inductor.calls import kind_of

    lowering = Lowering("cpu")
    for node in module.graph.nodes:
        lowering.lower(node)
    readers: dict[int, list[int]] = {}
    for index, step in enumerate(lowering.steps):
        for value, _ in step.reads:
            readers.setdefault(value, []).append(index)
    num_loops = loops_bytes = 0
    calls: dict[str, int] = {}
    for kernel in fuse(lowering.steps):
        if kernel.call:
            kind = kind_of(lowering.steps[kernel.steps[0]].node.target) or ""
            calls[kind] = calls.get(kind, 0) + 1
        else:
            num_loops += 1
            loops_bytes += traffic_bytes(kernel, lowering.steps, readers, lowering.escaping, lowering.sizes)
    return num_loops, loops_bytes, calls


# (family, phase, batch, tolerance of the number of kernels, of their bytes).
CASES = [
    ("llama", "prefill", 1, 0.05, 0.10),
    ("llama", "decode", 4, 0.05, 0.15),
    ("qwen3", "prefill", 1, 0.05, 0.10),
    ("gemma3_text", "prefill", 1, 0.10, 0.05),
    ("mixtral", "prefill", 1, 0.10, 0.10),
]


@pytest.mark.parametrize(("family", "phase", "batch", "few", "small"), CASES, ids=lambda value: str(value))
def test_as_inductor_makes_it(family: str, phase: str, batch: int, few: float, small: float) -> None:
    found: list[tuple[Generated, tuple[int, int, dict[str, int]]]] = []

    def seen(module: fx.GraphModule, inputs: object, arguments: dict[str, object]) -> None:
        predicted = _predicted(module)  # before Inductor edits the graph
        found.append((generated(module, inputs, arguments), predicted))  # type: ignore[arg-type]

    captured(models.config_of(FAMILIES[family]), _requested(family, phase, batch), seen)
    ((real, (num_loops, loops_bytes, calls)),) = found
    assert calls.get("product", 0) == real.num_products
    assert calls.get("attention", 0) == real.num_attentions
    assert num_loops == pytest.approx(real.num_loops, rel=few)
    assert loops_bytes == pytest.approx(real.loops_bytes, rel=small)


@cache
def _reported(family: str, machine: str = "cpu", layers: int = 2) -> GraphReport:
    reports: list[GraphReport] = []
    profile, config = cost_model.load(machine), models.config_of(FAMILIES[family])
    config.num_hidden_layers = layers
    seen = backend.preview(Config(), topology.fake(2, device=profile.device), profile, reports.append)
    capture(Source(family, config), _requested(family, "prefill", 2), every_layer(layers), seen)
    (report,) = reports
    assert report.fallbacks == ()
    return report


def _kinds(work: tuple[Work, ...]) -> dict[str, int]:
    return {kind: sum(each.kind == kind for each in work) for kind in sorted({each.kind for each in work})}


@pytest.mark.parametrize("machine", ["cpu", "h200x4"])
def test_sites_and_work_share_nothing(machine: str) -> None:
    """Of 15 products four belong to sites; all all-reduces do, so what is left is the gather of the logits."""
    report = _reported("llama", machine=machine)
    assert sum(decision.site.workload is not None for decision in report.decisions) == 5
    products = sum(d.site.workload.product is not None for d in report.decisions if d.site.workload is not None)
    kinds = _kinds(report.work)
    assert kinds["product"] + products == 15 and products == 4
    assert kinds["attention"] == 2 and kinds["collective"] == 1
    assert all(each.us > 0.0 and each.count == 1 for each in report.work)


def test_work_is_in_the_order_of_the_graph() -> None:
    report = _reported("llama")
    after = [each.after for each in report.work]
    assert after == sorted(after) and after[0] == 0 and after[-1] == len(report.decisions)
    # Between the site before the attention and the one behind it: three projections, and the attention.
    between = _kinds(tuple(each for each in report.work if each.after == 1))
    assert between["product"] == 3 and between["attention"] == 1
    behind = _kinds(tuple(each for each in report.work if each.after == 2))
    assert behind == {"memory": 1, "product": 2}, "gate, up, and their product"
    modules = [each.module for each in report.work if each.kind == "product"]
    assert modules[:3] == [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]


def test_a_layer_more_costs_what_a_layer_costs() -> None:
    one, two, three = (sum(each.us for each in _reported("llama", layers=n).work) for n in (1, 2, 3))
    assert three - two == pytest.approx(two - one, rel=0.05) and three > two


def test_same_work_however_the_sites_are_treated() -> None:
    """A site that is left alone is a site, so its collective and its product are no work."""
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 7, forms.INNER), torch.randn(2, 7, forms.HIDDEN))

    def fn(x: Tensor, r: Tensor) -> Tensor:
        (projected,) = forms.chain(weights, x, r)
        return projected.relu()

    rewritten = previewed(fn, inputs, static=True)
    left = previewed(fn, inputs, static=True, force=(), disable=("all_reduce_rms_norm",))
    assert rewritten.num_rewritten == 3 and left.num_rewritten == 0
    assert rewritten.work == left.work and set(_kinds(left.work)) <= {"memory", "product"}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (forms.pre_norm, [("product", 1)]),
        # Of the two products that meet in one sum the estimate has the second; what feeds it comes before the site.
        (forms.cohere, [("product", 0), ("memory", 0), ("product", 1)]),
        # A product with alpha stays in the graph, and is no part of the estimate.
        (forms.scaled_product, [("product", 0), ("product", 1)]),
        (forms.norm_read_twice, [("product", 1), ("memory", 1)]),
        (forms.chain, [("product", 1), ("product", 2), ("product", 3)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_site_covers_is_no_work(form: Form, expected: list[tuple[str, int]]) -> None:
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 7, forms.INNER), torch.randn(2, 7, forms.HIDDEN))
    report = previewed(lambda x, r: form(weights, x, r), inputs, static=True)
    assert [(each.kind, each.after) for each in report.work] == expected


def test_a_site_that_may_not_be_rewritten_covers_the_same() -> None:
    """It has an estimate of its product, all-reduce, addition and norm, though no match."""
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 7, forms.INNER), torch.randn(2, 7, forms.HIDDEN))

    def fn(x: Tensor, r: Tensor) -> Tensor:
        return forms.rms(r + forms.all_reduce(x @ weights.product), weights.norm.double())

    report = previewed(fn, inputs, static=True)
    assert [[r.code for r in d.site.rejections] for d in report.decisions] == [["dtype_changes"]]
    assert report.decisions[0].unfused is not None and report.work == ()


def test_an_all_reduce_without_a_norm_is_work() -> None:
    weights = forms.make_weights(torch.float32)
    report = previewed(
        lambda x: forms.all_reduce(x @ weights.product).relu(), (torch.randn(2, 7, forms.INNER),), static=True
    )
    assert [(d.site.workload, d.unfused) for d in report.decisions] == [(None, None)]
    assert _kinds(report.work) == {"collective": 1, "memory": 1, "product": 1}
    assert [(each.kind, each.after) for each in report.work] == [("product", 0), ("collective", 0), ("memory", 1)]


def test_symbolic_sizes_count_as_their_hints() -> None:
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 96, forms.INNER), torch.randn(2, 96, forms.HIDDEN))

    def fn(x: Tensor, r: Tensor) -> Tensor:
        projected, total = forms.pre_norm(weights, x, r)
        return torch.softmax(projected @ projected.transpose(-1, -2), -1).sigmoid() + total.amax()

    static, dynamic = previewed(fn, inputs, static=True), previewed(fn, inputs, dynamic=True)
    assert dynamic.fallbacks == ()
    # A hidden size that is not known makes no site: there the site's own product and collective are work as well.
    assert [d.site.workload for d in dynamic.decisions] == [None]
    counts = _kinds(dynamic.work)
    assert counts["product"] == _kinds(static.work)["product"] + 1 and counts["collective"] == 1
    times = [{round(each.us, 6) for each in report.work if each.kind == "product"} for report in (static, dynamic)]
    assert times[0] == times[1]


@pytest.mark.parametrize(
    ("told", "message"), [("a graph of a form\nnever seen", "a graph of a form"), ("\n", "")], ids=["lines", "nothing"]
)
def test_a_failure_leaves_the_report_without_work(monkeypatch: pytest.MonkeyPatch, told: str, message: str) -> None:
    def fail(*_: object) -> tuple[Work, ...]:
        raise ValueError(told)

    monkeypatch.setattr(backend, "work_of", fail)
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 7, forms.INNER), torch.randn(2, 7, forms.HIDDEN))
    report = previewed(lambda x, r: forms.pre_norm(weights, x, r), inputs)
    assert report.work == () and report.fallbacks == () and report.num_rewritten == 1
    assert report.work_failure == WorkFailure("ValueError", message)


def test_eighty_layers_in_half_a_second() -> None:
    """The graph of a layer repeated: 80 times the nodes of `chain`'s three products, norms and point-wise work."""
    graph = fx.Graph()
    fake = torch.empty(64, 128, device="meta")
    weight = graph.placeholder("weight")
    weight.meta["val"] = torch.empty(128, 128, device="meta")
    node = graph.placeholder("x")
    node.meta["val"] = fake
    aten = torch.ops.aten
    for _ in range(80):
        for target in [aten.mm.default] * 8 + [aten.exp.default, aten.neg.default, aten.relu.default] * 30:
            node = graph.call_function(target, (node, weight) if target is aten.mm.default else (node,))
            node.meta["val"] = fake
    graph.output((node,))
    machine = cost_model.load("h200x4")
    whole = CapturedGraph("graph", "prefill", 64, (), graph)
    context = Context(Config(), machine, {})
    seconds = []
    for _ in range(3):  # the other tests' ranks may still be going
        begin = time.process_time()
        work = backend.work_of(graph, recognize(whole, (), context), context)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.5, seconds
    assert _kinds(work)["product"] == 640 and _kinds(work)["memory"] >= 80
