"""Work outside the sites: as many kernels as Inductor makes, as many bytes, nothing twice, nothing lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from tests.graphs import forms, models
from tests.graphs.inductor_kernels import Generated, captured, generated
from tests.graphs.nonempty import some
from tests.graphs.preview import previewed
from tests.graphs.reductions import Reductions, reduction_of, rows_of
from tests.graphs.traces import context_of, framed, traced_chain
from weaveopt import cost_model
from weaveopt.cli.layers import every_layer
from weaveopt.cli.model_source import CaptureRequest, Source
from weaveopt.cli.preview import capture
from weaveopt.config import Config
from weaveopt.fabrics import topology
from weaveopt.inductor.fused import fuse, traffic_of
from weaveopt.inductor.kernels import KernelContext, outside, within
from weaveopt.inductor.lowered import GraphLowering
from weaveopt.pipeline import price
from weaveopt.preview import preview
from weaveopt.records.candidate import Estimate
from weaveopt.records.report import GraphReport, OutsideWork, WorkFailure
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites import RULES

Form = Callable[[forms.Weights, Tensor, Tensor], tuple[Tensor, ...]]
FAMILIES = {family.id: family for family in models.FAMILIES}


def _requested(family: str, phase: str, batch: int) -> CaptureRequest:
    return CaptureRequest(model=family, tp=2, batch=batch, seq=64, phase=phase)


def _predicted(module: fx.GraphModule) -> tuple[int, int, dict[str, int]]:
    """Generated kernels, their bytes, and library calls by kind, of a whole graph without sites."""
    from weaveopt.inductor.calls import kind_of

    lowering = GraphLowering("cpu")
    for node in module.graph.nodes:
        lowering.lower(node)
    readers: dict[int, list[int]] = {}
    for index, step in enumerate(lowering.steps):
        for value, _ in step.reads:
            readers.setdefault(value, []).append(index)
    num_loops = loops_bytes = 0
    calls: dict[str, int] = {}
    for kernel in fuse(lowering.steps, lowering.device):
        if kernel.call:
            kind = kind_of(lowering.steps[kernel.steps[0]].node.target) or ""
            calls[kind] = calls.get(kind, 0) + 1
        else:
            num_loops += 1
            loops_bytes += sum(traffic_of(kernel, lowering.steps, readers, lowering.escaping, lowering.sizes))
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
    assert calls.get("gemm", 0) == real.num_products
    assert calls.get("attention", 0) == real.num_attentions
    assert num_loops == pytest.approx(real.num_loops, rel=few)
    assert loops_bytes == pytest.approx(real.loops_bytes, rel=small)


def _reported(family: str, machine: str = "cpu", layers: int = 2) -> GraphReport:
    return _captured(family, machine, layers)


@cache  # by position: a name that some callers give would be another key
def _captured(family: str, machine: str, layers: int) -> GraphReport:
    reports: list[GraphReport] = []
    profile, config = cost_model.load(machine), models.config_of(FAMILIES[family])
    config.num_hidden_layers = layers
    seen = preview(Config(), topology.fake(2, device=profile.device), profile, reports.append)
    capture(Source(family, config), _requested(family, "prefill", 2), every_layer(layers), seen)
    (report,) = reports
    assert report.fallbacks == ()
    return report


def _kinds(work: tuple[OutsideWork, ...]) -> dict[str, int]:
    return {kind: sum(each.kind == kind for each in work) for kind in sorted({each.kind for each in work})}


@pytest.mark.parametrize("machine", ["cpu", "h200x4"])
def test_sites_and_work_share_nothing(machine: str) -> None:
    """Four of 15 GEMMs and both attentions belong to sites, and so do all all-reduces: the gather of the logits
    remains. On GPUs GEMMs of one input are sites too: all but that of the logits belong to one."""
    report = _reported("llama", machine=machine)
    baselines = [decision.baseline for decision in report.decisions if not decision.site.rejections]
    projections = [each for each in report.decisions if each.site.kind == "projections"]
    assert [each.site.description for each in projections] == ["3 x (x @ w^T)", "2 x (x @ w^T)"] * (
        machine != "cpu"
    ) * 2
    assert len(baselines) == 5 + 2 + len(projections)
    kinds = _kinds(report.work)
    in_sites = Counter(term.name for each in baselines if each is not None for term in each.terms)
    assert (kinds["gemm"], in_sites["gemm"]) == ((11, 4) if machine == "cpu" else (1, 4 + 4))
    assert in_sites["attention"] == 2 and "attention" not in kinds
    assert in_sites["all_reduce"] == 5 and kinds["collective"] == 1
    assert all(each.us > 0.0 and each.count == 1 for each in report.work)


def test_work_is_in_the_order_of_the_graph() -> None:
    report = _reported("llama")
    after = [each.after for each in report.work]
    assert after == sorted(after) and after[0] == 0 and after[-1] == len(report.decisions)
    sites = [decision.site.kind for decision in report.decisions]
    assert sites == ["reduction", "attention", "reduction", "reduction", "attention", "reduction", "reduction"]
    # Between the embedding's site and the attention's: three projections.
    assert _kinds(tuple(each for each in report.work if each.after == 1))["gemm"] == 3
    between = _kinds(tuple(each for each in report.work if each.after == 2))
    assert "gemm" not in between, "the projection of the output belongs to the next site"
    behind = _kinds(tuple(each for each in report.work if each.after == 3))
    assert behind == {"memory": 1, "gemm": 2}, "gate, up, and their product"
    modules = [each.module for each in report.work if each.kind == "gemm"]
    assert modules[:3] == [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]


def test_a_layer_more_costs_what_a_layer_costs() -> None:
    one, two, three = (sum(each.us for each in _reported("llama", layers=n).work) for n in (1, 2, 3))
    assert three - two == pytest.approx(two - one, rel=0.05) and three > two


def test_each_layer_rotates_its_own_queries_and_keys() -> None:
    """Attention runs between two layers' rotations, so they are no one kernel, though both read the same angles."""
    report = _reported("llama", machine="h200x4", layers=3)
    layers = [
        [each.us for each in report.work if each.kind == "memory" and each.module == f"model.layers.{at}.self_attn"]
        for at in range(3)
    ]
    assert [len(each) for each in some(layers[:2])] == [2, 2] and layers[0] == layers[1]
    assert set(layers[0]) <= set(layers[2]), "with the last layer's mask, which all of them read"


def test_same_work_however_the_sites_are_treated() -> None:
    """A site that is left alone is a site, so its collective and its GEMM are no work."""
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 7, forms.INNER), torch.randn(2, 7, forms.HIDDEN))

    def fn(x: Tensor, r: Tensor) -> Tensor:
        (projected,) = forms.chain(weights, x, r)
        return projected.relu()

    rewritten = previewed(fn, inputs, static=True)
    left = previewed(fn, inputs, static=True, force=(), disable=RULES.names)
    assert rewritten.num_rewritten == 3 and left.num_rewritten == 0
    assert rewritten.work == left.work and set(_kinds(left.work)) <= {"memory", "gemm"}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (forms.pre_norm, [("gemm", 1)]),
        # Both products that meet in one sum belong to the site; what feeds the second comes before it.
        (forms.cohere, [("memory", 0), ("gemm", 1)]),
        # A product with alpha stays in the graph, and is no part of the estimate.
        (forms.scaled_product, [("gemm", 0), ("gemm", 1)]),
        (forms.norm_read_twice, [("gemm", 1), ("memory", 1)]),
        (forms.chain, [("gemm", 1), ("gemm", 2), ("gemm", 3)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_site_covers_is_no_work(form: Form, expected: list[tuple[str, int]]) -> None:
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 7, forms.INNER), torch.randn(2, 7, forms.HIDDEN))
    report = previewed(lambda x, r: form(weights, x, r), inputs, static=True)
    assert [(each.kind, each.after) for each in report.work] == expected


def test_a_site_that_may_not_be_rewritten_covers_the_same() -> None:
    """Its GEMM, all-reduce, addition and norm are its baseline, though no rule takes it."""
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 7, forms.INNER), torch.randn(2, 7, forms.HIDDEN))

    def fn(x: Tensor, r: Tensor) -> Tensor:
        return forms.rms(r.unsqueeze(0) + forms.all_reduce((x @ weights.product).unsqueeze(0)), weights.norm)

    report = previewed(fn, inputs, static=True)
    (decision,) = report.decisions
    codes = {each.choice: {r.code for r in each.rejections} for each in decision.alternatives}
    assert codes.keys() == {rule.name for rule in RULES.of_kind("reduction")} and len(codes) > 1
    assert all("shape_not_known" in each for each in codes.values())
    assert not decision.rewritten
    assert _terms(decision.baseline) == ["gemm", "all_reduce", "memory"] and report.work == ()


def _terms(estimate: Estimate | None) -> list[str]:
    return [] if estimate is None else [term.name for term in estimate.terms]


def test_an_all_reduce_without_a_norm_is_its_own_baseline() -> None:
    """With the GEMM in front of it; what follows belongs to no site."""
    weights = forms.make_weights(torch.float32)
    report = previewed(
        lambda x: forms.all_reduce(x @ weights.product).relu(), (torch.randn(2, 7, forms.INNER),), static=True
    )
    (decision,) = report.decisions
    assert decision.site.rejections == () and ("has_norm", False) in decision.site.facts
    assert _terms(decision.baseline) == ["gemm", "all_reduce"]
    assert [(each.kind, each.after) for each in report.work] == [("memory", 1)]


def test_symbolic_sizes_count_as_their_hints() -> None:
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 96, forms.INNER), torch.randn(2, 96, forms.HIDDEN))

    def fn(x: Tensor, r: Tensor) -> Tensor:
        projected, total = forms.pre_norm(weights, x, r)
        return torch.softmax(projected @ projected.transpose(-1, -2), -1).sigmoid() + total.amax()

    static, dynamic = previewed(fn, inputs, static=True), previewed(fn, inputs, dynamic=True)
    assert dynamic.fallbacks == ()
    # Where the hidden size is not known the site is its collective alone, and its product is work.
    ((decision,), (whole,)) = dynamic.decisions, static.decisions
    assert [r.code for r in decision.site.rejections] == ["shape_not_known"]
    assert _terms(decision.baseline) == ["all_reduce"]
    counts = _kinds(dynamic.work)
    assert counts["gemm"] == _kinds(static.work)["gemm"] + 1 and "collective" not in counts
    all_reduces = [{t.us for t in d.baseline.terms if t.name == "all_reduce"} for d in (decision, whole)]  # type: ignore[union-attr]
    assert all_reduces[0] == all_reduces[1]
    times = [{round(each.us, 6) for each in report.work if each.kind == "gemm"} for report in (static, dynamic)]
    assert times[0] == times[1]


@pytest.mark.parametrize(
    ("told", "message"), [("a graph of a form\nnever seen", "a graph of a form"), ("\n", "")], ids=["lines", "nothing"]
)
def test_a_failure_leaves_the_report_without_work(monkeypatch: pytest.MonkeyPatch, told: str, message: str) -> None:
    def fail(*_: object) -> tuple[OutsideWork, ...]:
        raise ValueError(told)

    monkeypatch.setattr(price, "outside", fail)
    weights = forms.make_weights(torch.float32)
    inputs = (torch.randn(2, 7, forms.INNER), torch.randn(2, 7, forms.HIDDEN))
    report = previewed(lambda x, r: forms.pre_norm(weights, x, r), inputs)
    assert report.work == () and report.fallbacks == () and report.num_rewritten == 1
    assert report.work_failure == WorkFailure("ValueError", message)


def test_eighty_layers_in_half_a_second() -> None:
    """The graph of a layer repeated: 80 times the nodes of `chain`'s three GEMMs, norms and point-wise work."""
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
    seconds = []
    for _ in range(3):  # the other tests' ranks may still be going
        begin = time.process_time()
        kernels = outside(graph, (), machine.device, {}, 0)
        surroundings = KernelContext(machine)
        assert sum(map(surroundings.us, kernels)) > 0.0
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.5, seconds
    kinds = [kernel.kind for kernel in kernels]
    assert kinds.count("gemm") == 640 and kinds.count("memory") >= 80


@pytest.mark.parametrize("machine", ["cpu", "h200x4", "h100x8"])
def test_a_site_at_another_token_count_is_priced_as_if_captured_with_it(machine: str) -> None:
    """One problem serves every token count: its baselines are those of graphs captured with that many tokens."""
    profile = cost_model.load(machine)

    def baselines(tokens: int, asked: int = 0) -> list[tuple[tuple[str, float], ...]]:
        graph = traced_chain([512, 768], tokens)
        frame = framed(graph, context_of(graph, profile))
        counts = dict.fromkeys(range(2), TokenCounts(asked)) if asked else {}
        sites = frame.problem(counts).sites
        return [tuple((term.name, term.us) for term in site.baseline.terms) for site in sites]

    for tokens in (1, 7, 64, 640, 4096):
        for ours, wanted in zip(some(baselines(64, tokens)), baselines(tokens), strict=True):
            assert [name for name, _ in ours] == [name for name, _ in wanted] == ["gemm", "all_reduce", "memory"]
            assert [us for _, us in ours] == pytest.approx([us for _, us in wanted], rel=1e-9)


def test_a_part_of_a_site_and_the_rest_are_priced_apart() -> None:
    """The kernels of nodes that a candidate leaves in place are priced by themselves."""
    made = Reductions()
    found = made.site()
    made.call(len, rows_of(found))
    gemm = reduction_of(found).gemm
    assert gemm is not None
    order = {node: index for index, node in enumerate(made.graph.nodes)}
    known = {"0": topology.fake(2)}
    names = [
        [kernel.name for kernel in within(nodes, order, "cpu", known, made.tokens)]
        for nodes in (found.nodes, frozenset([gemm]), found.nodes - {gemm}, frozenset[fx.Node]())
    ]
    assert names == [["gemm", "all_reduce", "memory"], ["gemm"], ["all_reduce", "memory"], []]
