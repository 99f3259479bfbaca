"""The rule on GPUs that reach each other's memory: the product stays in the graph, the call holds a run-time table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx

from tests import forms
from tests.preview import FORCED, previewed
from tests.rewrites.test_all_reduce_rms_norm import EXPECTED, inputs
from weaveopt import backend, cost_model
from weaveopt.config import Config
from weaveopt.cost_model.machine import Curve, Machine, Point
from weaveopt.fabrics import topology
from weaveopt.ops.all_reduce_norm.call import AllReduceNormCall, decode, region_need
from weaveopt.ops.all_reduce_norm.names import variant_name
from weaveopt.pipeline.rewrite import rewrite
from weaveopt.records.candidate import Algorithm, Candidate, Fabric, Form
from weaveopt.records.memory import RegionNeed
from weaveopt.records.report import GraphReport
from weaveopt.records.site import Site, Workload
from weaveopt.rewrites.all_reduce_rms_norm import candidates as lowering
from weaveopt.rewrites.all_reduce_rms_norm.estimate import estimate_all_reduce_norm
from weaveopt.rule import CapturedGraph, Context

RULE = "all_reduce_rms_norm"
H200 = cost_model.load("h200x4")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs that were rewritten, in order."""
    seen: list[fx.Graph] = []

    def spying(captured: CapturedGraph, *rest: object) -> tuple[str, ...]:
        rounding = rewrite(captured, *rest)  # type: ignore[arg-type]
        seen.append(captured.graph)
        return rounding

    monkeypatch.setattr(backend, "rewrite", spying)
    return seen


def on_gpus(
    form: Callable[..., object],
    dtype: torch.dtype = torch.bfloat16,
    *,
    static: bool = True,
    world: int = 4,
    machine: str = "h200x4",
    force: tuple[str, ...] = (),
) -> GraphReport:
    weights = forms.make_weights(dtype)
    return previewed(
        lambda x, r: form(weights, x, r),
        inputs(dtype),
        world=world,
        machine=machine,
        device="cuda",
        static=static,
        force=force,
    )


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def calls(graph: fx.Graph) -> list[AllReduceNormCall]:
    return [decode(str(node.args[-1])) for node in graph.nodes if "weave" in str(node.target)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", forms.FORMS, ids=lambda form: form.__name__)
def test_every_form_is_rewritten_and_keeps_its_products(
    form: Callable[..., object], dtype: torch.dtype, graphs: list[fx.Graph]
) -> None:
    report = on_gpus(form, dtype, force=FORCED)
    assert report.fallbacks == ()
    assert [d.site.form for d in report.decisions] == [EXPECTED[form.__name__]] * (3 if form is forms.chain else 1)
    assert {d.chosen.fabric for d in report.decisions} == {Fabric.PEER}
    found = targets(graphs[-1])
    assert found.count("weave.all_reduce_norm.default") == len(report.decisions)
    assert "weave.mm_all_reduce_norm.default" not in found and not any("c10d" in target for target in found)
    for node in graphs[-1].nodes:
        if node.target is torch.ops.weave.all_reduce_norm.default:
            assert node.args[0].meta["val"].dtype is dtype
    for call, decision in zip(calls(graphs[-1]), report.decisions, strict=True):
        assert call.lowerings == decision.chosen.lowerings
        assert call.max_tokens == call.lowerings[-1].max_tokens


def test_products_that_meet_are_added_first(graphs: list[fx.Graph]) -> None:
    report = on_gpus(forms.cohere)
    (decision,) = report.decisions
    assert decision.rewritten and decision.chosen.estimate is not None
    assert targets(graphs[-1]).count("aten.mm.default") == 3  # two products and the one behind the norm
    (node,) = graphs[-1].find_nodes(op="call_function", target=torch.ops.weave.all_reduce_norm.default)
    assert node.args[0].target is torch.ops.aten.add.Tensor
    names = [term.name for term in decision.chosen.estimate.terms]
    assert "add" in names and "copy" not in names


@pytest.mark.parametrize(("static", "max_tokens"), [(True, 14), (False, 8192)])
def test_the_table_covers_what_may_come(static: bool, max_tokens: int, graphs: list[fx.Graph]) -> None:
    report = on_gpus(forms.chain, static=static)
    assert [d.rewritten for d in report.decisions] == [True] * 3
    tables = {d.chosen.lowerings for d in report.decisions}
    (table,) = tables
    assert table[-1].max_tokens == max_tokens
    (plan,) = report.plans
    assert plan.fabric is Fabric.PEER and plan.regions is not None
    for row in table:
        need = region_need(row, forms.HIDDEN, "bfloat16", "bfloat16", 4)
        assert plan.regions.union(need) == plan.regions
    assert [p.max_tokens for p in plan.placements] == [max_tokens] * 3
    assert [p.sum_sharded for p in plan.placements] == [True, True, False]
    assert [(c.residual_sharded, c.sum_out.value) for c in calls(graphs[-1])] == [
        (False, "sharded"),
        (True, "sharded"),
        (True, "none"),
    ]
    words = {(c.partial_offset, c.output_offset, c.partial_bytes, c.one_shot_max_tokens) for c in calls(graphs[-1])}
    assert words == {(0, 0, 0, 0)}, "the runtime places the regions"


def test_wide_rows_have_room(graphs: list[fx.Graph]) -> None:
    """Weights in fp32 make the normed rows fp32."""
    report = on_gpus(forms.fp32_weight, force=FORCED)
    (decision,), (plan,) = report.decisions, report.plans
    assert decision.site.workload is not None and decision.site.workload.out_dtype == "float32"
    assert calls(graphs[-1])[0].out_dtype == "float32"
    wide = RegionNeed()
    for row in decision.chosen.lowerings:
        wide = wide.union(region_need(row, forms.HIDDEN, "bfloat16", "float32", 4))
    assert plan.regions == wide


def with_kernels(*curves: Curve, library_us: float | None = None) -> Machine:
    """h200x4 with these kernels on peer; `library_us`: an all-reduce of any size."""
    every = []
    for costs in H200.fabric_costs:
        if costs.fabric is Fabric.PEER:
            costs = replace(costs, curves=curves)
        elif library_us is not None:
            points = (Point(1, library_us), Point(1 << 40, library_us))
            costs = replace(costs, curves=(Curve("nccl", "all_reduce", "library", 4, points),))
        every.append(costs)
    return replace(H200, fabric_costs=tuple(every))


def kernel(algorithm: Algorithm, form: Form, *points: tuple[int, float], ctas: int = 0) -> Curve:
    last_bytes = points[-1][0] if form is Form.MAIL else None
    name = variant_name(algorithm, form, ctas)
    return Curve("fused", "all_reduce_norm", name, 4, tuple(Point(*each) for each in points), last_bytes=last_bytes)


ROW = 16384
KERNELS = (
    kernel(Algorithm.ONE_SHOT, Form.MAIL, (ROW, 5.0), (64 * ROW, 15.0)),
    kernel(Algorithm.TWO_SHOT, Form.MAIL, (ROW, 7.0), (64 * ROW, 9.0), (512 * ROW, 40.0)),
    kernel(Algorithm.TWO_SHOT, Form.BULK, (ROW, 12.0), (512 * ROW, 45.0), (8192 * ROW, 640.0), ctas=64),
    kernel(Algorithm.TWO_SHOT, Form.BULK, (ROW, 11.0), (512 * ROW, 50.0), (8192 * ROW, 700.0), ctas=16),
)


def offered(
    tokens: int,
    machine: Machine,
    *,
    max_tokens: int = 0,
    hidden: int = 8192,
    world: int = 4,
    force: tuple[str, ...] = (),
    known: topology.Topology | None = None,
) -> dict[tuple[Fabric, Algorithm, object], Candidate]:
    """The candidates of one site, by fabric, algorithm and form."""
    workload = Workload(tokens, max_tokens or tokens, hidden, "bfloat16", world)
    site = Site("a", RULE, "0", "", ("a",), workload)
    group = known or topology.fake(world, device="cuda")
    context = Context(Config(force=force), machine, {"0": group})
    found = lowering.candidates(RULE, site.workload, group, context)  # type: ignore[arg-type]
    return {(c.fabric, c.algorithm, dict(c.parameters).get("form")): c for c in found}


def codes(candidate: Candidate) -> list[str]:
    return [rejection.code for rejection in candidate.rejections]


ONE_MAIL = (Fabric.PEER, Algorithm.ONE_SHOT, "mail")
TWO_MAIL = (Fabric.PEER, Algorithm.TWO_SHOT, "mail")
TWO_BULK = (Fabric.PEER, Algorithm.TWO_SHOT, "bulk")


@pytest.mark.parametrize(
    ("tokens", "chosen"), [(1, ONE_MAIL), (100, TWO_MAIL), (512, TWO_MAIL), (513, TWO_BULK), (4096, TWO_BULK)]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_candidate_at_the_hint_is_the_tables_row(tokens: int, chosen: object, dynamic: bool) -> None:
    found = offered(tokens, with_kernels(*KERNELS), max_tokens=8192 if dynamic else 0)
    assert [key for key, candidate in found.items() if candidate.allowed] == [chosen]
    for key in (ONE_MAIL, TWO_MAIL, TWO_BULK):
        candidate = found[key]
        assert candidate.lowerings == found[TWO_BULK].lowerings != ()
        beyond = (key == ONE_MAIL and tokens > 64) or (key == TWO_MAIL and tokens > 512)
        expected = [] if key == chosen else ["beyond_measured", "slower_algorithm"] if beyond else ["slower_algorithm"]
        assert codes(candidate) == expected
        assert (candidate.estimate is None) is beyond
    best = next(c for c in found.values() if c.allowed)
    row = next(row for row in best.lowerings if tokens <= row.max_tokens)
    assert dict(best.parameters)["num_ctas"] == row.num_ctas
    assert best.estimate is not None and best.estimate == estimate_all_reduce_norm(
        with_kernels(*KERNELS),
        Workload(tokens, tokens, 8192, "bfloat16", 4),
        Fabric.PEER,
        row.algorithm,
        sum_sharded=False,
        transfer=row.form,
        num_ctas=row.num_ctas,
    )


def test_the_library_is_faster_at_every_size_or_above_one() -> None:
    never = offered(64, with_kernels(*KERNELS, library_us=0.1))
    assert all("library_faster" in codes(never[key]) for key in (ONE_MAIL, TWO_MAIL, TWO_BULK))
    forced = offered(64, with_kernels(*KERNELS, library_us=0.1), force=(RULE,))
    assert forced[TWO_MAIL].allowed
    above = offered(4096, with_kernels(*KERNELS, library_us=60.0), max_tokens=8192)
    (reason,) = above[TWO_BULK].rejections
    assert reason.code == "library_faster"
    assert dict(reason.values)["table_ends_at"] == above[TWO_BULK].lowerings[-1].max_tokens < 4096


def test_rows_and_worlds_that_the_kernels_do_not_take() -> None:
    assert "row_not_supported" in codes(offered(4, H200, hidden=8190)[TWO_BULK])
    assert "world_not_supported" in codes(offered(4, H200, world=9)[TWO_BULK])
    assert not {"row_not_supported", "world_not_supported"} & set(codes(offered(4, H200, hidden=8184)[TWO_BULK]))


def test_other_fabrics_say_why_not() -> None:
    found = offered(64, H200)
    for key, candidate in found.items():
        if key[0] is not Fabric.PEER:
            assert "fabric_not_on_machine" in codes(candidate)
    assert "no_kernel" in codes(found[Fabric.NVSHMEM, Algorithm.TWO_SHOT, None])
    assert {key[0] for key, c in found.items() if "no_kernel" in codes(c)} == {Fabric.NVSHMEM}


def test_between_hosts_it_stays_away() -> None:
    group = topology.fake(4, hosts=2, device="cuda")
    workload = Workload(64, 64, 8192, "bfloat16", 4, hosts=2)
    found = lowering.candidates(RULE, workload, group, Context(Config(), H200, {"0": group}))
    assert not any(candidate.allowed for candidate in found)
    assert all("fabric_needs_one_host" in codes(c) for c in found if c.fabric is Fabric.PEER)


def test_multimem_is_kept_where_the_profile_has_it_and_called_unmeasured(
    graphs: list[fx.Graph], tmp_path: Path
) -> None:
    dgx = cost_model.load("h100x8")
    no_peer = replace(dgx, fabric_costs=tuple(c for c in dgx.fabric_costs if c.fabric is not Fabric.PEER))
    (tmp_path / "dgx.json").write_text(cost_model.dumps(no_peer))
    report = on_gpus(forms.chain, machine=str(tmp_path / "dgx.json"), world=8, force=FORCED)
    chosen = report.decisions[0].chosen
    assert chosen.fabric is Fabric.MULTIMEM and dict(chosen.parameters)["measured"] is False
    assert {row.form for row in chosen.lowerings} == {Form.DIRECT}
    # There the product writes into the arena.
    assert "weave.mm_all_reduce_norm.default" in targets(graphs[-1])
    (plan,) = report.plans
    assert plan.regions is not None and plan.regions.partial_bytes > 0
    real = replace(topology.fake(8, device="cuda"), fake=False)
    found = offered(64, cost_model.load("h100x8"), world=8, known=real)
    assert "multicast_not_known" in codes(found[Fabric.MULTIMEM, Algorithm.TWO_SHOT, "direct"])
