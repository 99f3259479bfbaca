"""A group that leaves NVLink multicast while a graph is bound: the graph is decided again, without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.fx as fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.graphs import forms
from tests.graphs.preview import FORCED, fake_group
from tests.rewrites.test_all_reduce_rms_norm import inputs
from weaveopt import backend, cost_model
from weaveopt.config import Config
from weaveopt.errors import ArenaError, MulticastError
from weaveopt.fabrics import peer, topology
from weaveopt.fabrics.topology import Topology
from weaveopt.inductor import seams
from weaveopt.pipeline import bind as binding
from weaveopt.pipeline import context as surroundings
from weaveopt.pipeline.agree import Agreed
from weaveopt.pipeline.bind import decides_again, reserve
from weaveopt.preview import returning_fakes
from weaveopt.records.candidate import Fabric, Rejection
from weaveopt.records.memory import MemoryPlan
from weaveopt.records.report import GraphReport
from weaveopt.reporting import registry

WHY = "rank 3: 5 of 68608 elements of sum are not the reference's"
LOST = f"MulticastError: group '0': NVLink multicast cannot be used: {WHY}"


def dgx(folder: Path) -> str:
    """The profile of a DGX whose GPUs reach each other slowly but by multicast."""
    found = cost_model.load("h100x8")
    [peers] = [each for each in found.fabric_costs if each.fabric is Fabric.PEER]
    slow = replace(peers, link=replace(peers.link, latency_us=500.0))
    costs = tuple(slow if each is peers else each for each in found.fabric_costs)
    (folder / "dgx.json").write_text(cost_model.dumps(replace(found, fabric_costs=costs)))
    return str(folder / "dgx.json")


def compiled_once(machine: str) -> tuple[list[GraphReport], list[fx.Graph]]:
    """Reports and rewritten graphs of one graph that eight GPUs compile."""
    torch._dynamo.reset()
    entry, graphs = registry.open_entry(()), []
    weights = forms.make_weights(torch.bfloat16)
    config = Config(force=FORCED, disable=("token_split",), machine=machine, strict=True)

    def inner_compile(module: fx.GraphModule, example_inputs: Sequence[object], **_: object) -> object:
        backend.optimize(module, example_inputs, seams.GraphPass.INFERENCE, config, entry)
        module.graph.lint()
        graphs.append(module.graph)
        return returning_fakes(module.graph)

    def compile_graph(graph_module: fx.GraphModule, example_inputs: Sequence[object]) -> object:
        return seams.compile_with(inner_compile, graph_module, example_inputs)

    with fake_group(8), torch.no_grad():
        run = torch.compile(lambda x, r: forms.chain(weights, x, r), backend=compile_graph, fullgraph=True)
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
            run(*(mode.from_tensor(x, static_shapes=True) for x in inputs(torch.bfloat16)))
    return entry.graphs, graphs


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_graph_is_decided_again_without_it(is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Agreed] = []
    refused = Rejection("multicast_failed", "a first call was not right", (("why", WHY),))

    def bind(agreed: Agreed, why: str, context: object) -> str:
        bound.append(agreed)
        return LOST if is_lost and len(bound) == 1 else ""

    def topologies(captured: object, config: Config) -> Mapping[str, Topology]:
        return {"0": replace(topology.fake(8, device="cuda"), no_multicast=refused if bound else None)}

    monkeypatch.setattr(backend, "bind", bind)
    monkeypatch.setattr(surroundings, "_topologies", topologies)
    reports, graphs = compiled_once(dgx(tmp_path))
    first, last = (each.decided for each in (bound[0], bound[-1]))
    assert first is not None and last is not None
    assert {d.chosen.fabric for d in first.decisions} == {Fabric.MULTIMEM}
    assert dict(first.decisions[0].chosen.parameters)["measured"] is False, "and the report says so"
    assert len(bound) == 1 + is_lost and len(graphs) == 1
    [report] = reports
    assert report.decisions == last.decisions and report.fallbacks == (), "one report: of what runs"
    if not is_lost:
        return
    assert [(d.rewritten, d.chosen.fabric) for d in report.decisions] == [(True, Fabric.PEER)] * 3, "what is next best"
    for decision in report.decisions:
        multimem = [each for each in decision.alternatives if each.fabric is Fabric.MULTIMEM]
        assert multimem and all(refused in each.rejections for each in multimem), "with the reason"
    assert {plan.fabric for plan in report.plans} == {Fabric.PEER}


@pytest.mark.parametrize(("error", "lost"), [(MulticastError, True), (ArenaError, False)])
def test_only_an_arena_without_memory_is_not_asked_for_again(
    error: type[Exception], lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[MemoryPlan] = []

    def reserved(known: Topology, plan: MemoryPlan, floor_bytes: int, timeout_s: float) -> None:
        asked.append(plan)
        raise error(f"{WHY}\nand how it came")

    monkeypatch.setattr(peer, "reserve", reserved)
    monkeypatch.setattr(binding, "_refused", {})
    known = topology.fake(8, device="cuda")
    config = SimpleNamespace(compile_timeout_s=7.0, arena_bytes=0)
    context = SimpleNamespace(topologies={"0": known}, config=config)
    plan = MemoryPlan("0", Fabric.MULTIMEM, 4096)
    with fake_group(8):
        for times in (1, 2):
            why = reserve(plan, context)  # type: ignore[arg-type]
            assert why.startswith(f"{error.__name__}: {WHY}") and decides_again(why) is lost
            assert len(asked) == (times if lost else 1)
    assert not decides_again("")
