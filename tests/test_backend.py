"""`torch.compile(backend="weave")` through Inductor on real ranks: results, shapes, training, groups, caches."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.graphs import forms
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.ranks import run_ranks

FORCE = {"force": ["all_reduce_rms_norm"], "strict": True}


class Block(nn.Module):
    """Two residual blocks as `parallelize_module` users write them, with biases."""

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(64, 128) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(128, 64) for _ in range(2))
        self.norms = nn.ModuleList(norm(64) for _ in range(2))
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        return self.head(self.norms[0](x))  # type: ignore[no-any-return]


def _parallel(model: nn.Module, mesh: object) -> nn.Module:
    plan = {f"up.{i}": ColwiseParallel() for i in range(2)} | {f"down.{i}": RowwiseParallel() for i in range(2)}
    return parallelize_module(model, mesh, plan)  # type: ignore[arg-type]


def _inference(rank: int) -> list[str]:
    """Compiles by name alone, with a mode, and with options; then reads the report."""
    import weaveopt

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    for norm in (nn.RMSNorm, nn.LayerNorm):
        model = _parallel(Block(norm), mesh)
        with torch.no_grad():
            want = model(x)
            every = ({}, {"mode": "reduce-overhead"}, {"options": FORCE})
            for settings in every if norm is nn.RMSNorm else every[-1:]:
                torch._dynamo.reset()
                got = torch.compile(model, backend="weave", **settings)(x)  # type: ignore[call-overload]
                assert_close(got, want, LIBRARY, f"{norm.__name__} {settings}")
    compiled = torch.compile(model, backend="weave", options=FORCE)  # type: ignore[call-overload]
    with torch.no_grad():
        compiled(x)
    report = weaveopt.report(compiled)
    assert [d.chosen.choice for d in report.graphs[-1].decisions] == ["all_reduce_rms_norm"] * 2
    assert "all_reduce_rms_norm" in str(report) and "down" in str(report)
    assert weaveopt.report(nn.Linear(2, 2)).notes, "a model that was never compiled says so"
    return [d.site.module for d in report.graphs[-1].decisions]


def test_inference_by_name_mode_and_options() -> None:
    assert run_ranks(_inference, 2, timeout_s=300) == [["down.0", "down.1"]] * 2


def _dynamic(rank: int) -> int:
    """Token counts from 1 to more than was planned for, in one graph."""
    weights = forms.make_weights(torch.float32)
    graphs = 0

    def counting(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        from weaveopt.backend import weave

        return weave(gm, inputs, options={**FORCE, "max_tokens": 40, "timeout_s": 30.0})

    compiled = torch.compile(lambda x, r: forms.chain(weights, x, r), backend=counting)
    with torch.no_grad():
        for tokens in (4, 7, 1024, 40, 41, 2, 33):
            x = torch.randn(1, tokens, forms.INNER, generator=torch.Generator().manual_seed(rank))
            residual = torch.randn(1, tokens, forms.HIDDEN, generator=torch.Generator().manual_seed(9))
            # Only the sequence: with dynamic=True the sizes of weights that are no parameters are symbolic too.
            torch._dynamo.mark_dynamic(x, 1)
            torch._dynamo.mark_dynamic(residual, 1)
            want = forms.chain(weights, x, residual)
            for a, b in zip(compiled(x, residual), want, strict=True):
                assert_close(a, b, LIBRARY, f"{tokens} tokens")
    import weaveopt

    assert [d.rewritten for d in weaveopt.report().graphs[-1].decisions] == [True] * 3
    return graphs


def test_dynamic_token_counts_share_a_graph() -> None:
    assert run_ranks(_dynamic, 3, timeout_s=300) == [1, 1, 1]


def _training(rank: int) -> None:
    """Forward and backward: gradients equal eager's, and every site left alone says why."""
    import weaveopt

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(2))
    for options in ({}, FORCE):
        grads = []
        for compile_it in (False, True):
            torch._dynamo.reset()
            model = _parallel(Block(), mesh)
            fn = torch.compile(model, backend="weave", options=options) if compile_it else model  # type: ignore[call-overload]
            for _ in range(2):
                fn(x).square().sum().backward()
            grads.append([p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()])
        for want, got in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        report = weaveopt.report(fn)
        phases = [graph.phase for graph in report.graphs]
        assert phases == ["forward", "backward"], phases
        for graph in report.graphs:
            assert all(d.rewritten or d.site.rejections or d.alternatives for d in graph.decisions)


def test_training_gradients_equal_eager() -> None:
    run_ranks(_training, 2, timeout_s=300)


def _mesh(rank: int) -> None:
    """A 2 x 2 mesh: GEMMs reduced over one dimension, then over the other, in one graph."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weights = forms.make_weights(torch.float32)
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        first = residual + functional.all_reduce(x @ weights.product, "sum", tp)
        hidden = forms.rms(first, weights.norm) @ weights.after
        second = first + functional.all_reduce(hidden @ weights.second, "sum", dp)
        return forms.rms(second, weights.norm_2), second

    # Over dp the first sum must be alike too, so x differs over tp only.
    x = torch.randn(2, 5, forms.INNER, generator=torch.Generator().manual_seed(rank % 2))
    residual = torch.randn(2, 5, forms.HIDDEN, generator=torch.Generator().manual_seed(17))
    with torch.no_grad():
        want = block(x, residual)
        compiled = torch.compile(block, backend="weave", options=FORCE)  # type: ignore[call-overload]
        for _ in range(3):
            for a, b in zip(compiled(x, residual), want, strict=True):
                assert_close(a, b, LIBRARY, "mesh")
    import weaveopt

    decisions = [d for graph in weaveopt.report().graphs for d in graph.decisions]
    assert len({d.site.groups for d in decisions}) == 2 and all(d.rewritten for d in decisions)


def test_several_groups_in_one_graph() -> None:
    run_ranks(_mesh, 4, timeout_s=300)


def _warm(rank: int, folder: str) -> tuple[int, int, list[tuple[str, str]]]:
    """Cache hits and misses of Inductor, and the decisions, of one fresh process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    from torch._dynamo.utils import counters

    import weaveopt

    model = _parallel(Block(), init_device_mesh("cpu", (dist.get_world_size(),)))
    compiled = torch.compile(model, backend="weave", options=FORCE)  # type: ignore[call-overload]
    with torch.no_grad():
        compiled(torch.ones(1, 4, 64))
    found = counters["inductor"]
    decisions = [(d.site.id, d.chosen.choice) for g in weaveopt.report(compiled).graphs for d in g.decisions]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], decisions


def test_a_warm_cache_hits_and_loses_nothing(tmp_path: object) -> None:
    cold = run_ranks(_warm, 2, str(tmp_path), timeout_s=300, own=True)
    warm = run_ranks(_warm, 2, str(tmp_path), timeout_s=300, own=True)
    assert [row[:2] for row in cold] == [(0, 1)] * 2
    assert [row[:2] for row in warm] == [(1, 0)] * 2
    assert [row[2] for row in warm] == [row[2] for row in cold] and cold[0][2]


def _wrong_option() -> None:
    torch.compile(lambda x: x + 1, backend="weave", options={"strikt": True})(torch.ones(2))  # type: ignore[call-overload]


def test_an_unknown_option_names_the_nearest() -> None:
    from weaveopt.errors import OptionError

    with pytest.raises(OptionError, match=r"strikt.*did you mean 'strict'"):
        _wrong_option()
    with pytest.raises(OptionError, match=r"all_reduce_rms_nrom.*did you mean 'all_reduce_rms_norm'"):
        torch.compile(lambda x: x * 2, backend="weave", options={"disable": ["all_reduce_rms_nrom"]})(torch.ones(2))  # type: ignore[call-overload]


def test_inductors_options_go_on_to_inductor() -> None:
    fn = torch.compile(lambda x: x * 3, backend="weave", options={"max_autotune": False, "strict": True})  # type: ignore[call-overload]
    assert torch.equal(fn(torch.ones(2)), torch.full((2,), 3.0))


def _raised_by_a_block(rank: int, strict: bool) -> str | None:
    """Error that a block raised through the backend; if none, it computed what eager does."""
    import weaveopt

    weights = forms.make_weights(torch.float32)
    x = torch.randn(2, 3, forms.INNER, generator=torch.Generator().manual_seed(rank))
    residual = torch.ones(2, 3, forms.HIDDEN)
    options = {"force": ["all_reduce_rms_norm"], "strict": strict}
    compiled = torch.compile(lambda x, r: forms.pre_norm(weights, x, r), backend="weave", options=options)  # type: ignore[call-overload]
    with torch.no_grad():
        try:
            got = compiled(x, residual)
        except weaveopt.WeaveError as error:
            return str(error)
        for a, b in zip(got, forms.pre_norm(weights, x, residual), strict=True):
            assert_close(a, b, LIBRARY)
    return None


def _failing_step(rank: int, strict: bool) -> tuple[str, str]:
    """A step that breaks on every rank: the graph runs unrewritten and the report holds the exception."""
    import weaveopt
    from weaveopt import backend

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    backend.plan = broken  # type: ignore[assignment]
    error = _raised_by_a_block(rank, strict)
    if error is not None:
        return "raised", error
    (fallback,) = weaveopt.report().fallbacks
    return "fell back", f"{fallback.step}: {fallback.error}"


@pytest.mark.parametrize("strict", [False, True])
def test_a_failing_step_falls_back_or_raises(strict: bool) -> None:
    for outcome, text in run_ranks(_failing_step, 2, strict, timeout_s=300):
        assert outcome == ("raised" if strict else "fell back")
        assert "plan" in text and "planted" in text


def _failing_work(rank: int, strict: bool) -> str:
    """An estimate of the work outside the sites that breaks: the graph is rewritten all the same, and the report says
    both."""
    import weaveopt
    from weaveopt.pipeline import price

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    price.outside = broken  # type: ignore[assignment]
    error = _raised_by_a_block(rank, strict)
    if error is not None:
        return error
    report = weaveopt.report()
    (graph,) = report.graphs
    assert graph.num_rewritten == 1 and report.fallbacks == () and graph.work == ()
    (line,) = (line for line in str(report).splitlines() if "could not be estimated" in line)
    return line


@pytest.mark.parametrize("strict", [False, True])
def test_work_that_cannot_be_estimated_is_told_or_raises(strict: bool) -> None:
    for text in run_ranks(_failing_work, 2, strict, timeout_s=300):
        assert "the work outside the sites of graph" in text and "ZeroDivisionError: planted" in text


def test_the_profile_is_chosen_by_the_gpus_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from weaveopt.config import Config
    from weaveopt.cost_model import Gpu
    from weaveopt.fabrics import gpus, topology
    from weaveopt.pipeline.context import machine_for
    from weaveopt.rule import CapturedGraph

    def graph_on(device: str) -> CapturedGraph:
        graph = torch.fx.Graph()
        with FakeTensorMode():
            graph.placeholder("x").meta["val"] = torch.empty(1, device=device)
        return CapturedGraph("graph", "inference", 1, (), graph)

    def chosen(name: str, *others: str, **settings: str) -> tuple[str, tuple[str, ...]]:
        found = tuple(Gpu(each) for each in (name, *others))
        known = replace(topology.fake(len(found), device="cuda"), gpus=found)
        choice = machine_for(Config(**settings), {"tp": known}, graph_on("cuda"))  # type: ignore[arg-type]
        return choice.machine.name, choice.stands_in_for

    assert chosen("NVIDIA H200", "NVIDIA H200") == ("h200x4", ())
    assert chosen("NVIDIA L40S", "NVIDIA L40S")[1] == ("NVIDIA L40S",)
    assert chosen("NVIDIA L40S", machine="h100x8") == ("h100x8", ()), "who names a profile takes it for its own"
    assert chosen("NVIDIA H200", "NVIDIA L40S") == chosen("NVIDIA L40S", "NVIDIA H200")
    monkeypatch.setattr(gpus, "describe", lambda: {"gpu": "NVIDIA A10", "processors": 72, "bytes_per_s": 0})
    alone = {"tp": topology.fake(2, device="cuda")}
    stand_in = machine_for(Config(), alone, graph_on("cuda")).stands_in_for
    assert stand_in == ("NVIDIA A10",), "ranks that are not there"
    assert machine_for(Config(), {"tp": topology.fake(2)}, graph_on("cpu")).machine.name == "cpu"
    # Graphs that communicate with nobody.
    assert machine_for(Config(), {}, graph_on("cuda")).stands_in_for == ("NVIDIA A10",)
    assert machine_for(Config(), {}, graph_on("cpu")).machine.name == "cpu"


def _unknown_gpu(rank: int, force: bool) -> tuple[int, set[str], str, tuple[str, ...]]:
    """As on GPUs without a profile: the model runs, and the report says what to do."""
    import weaveopt
    from weaveopt import cost_model
    from weaveopt.pipeline import context

    context.machine_for = lambda *_: cost_model.Choice(cost_model.load("cpu"), ("NVIDIA L40S",))  # type: ignore[assignment]
    model = _parallel(Block(), init_device_mesh("cpu", (dist.get_world_size(),)))
    options = {**FORCE, "force": FORCE["force"] if force else []}
    compiled = torch.compile(model, backend="weave", options=options)  # type: ignore[call-overload]
    x = torch.ones(1, 4, 64)
    with torch.no_grad():
        assert_close(compiled(x), model(x), LIBRARY)
    report = weaveopt.report(compiled)
    (graph,) = report.graphs
    (rule,) = FORCE["force"]
    every = [each for d in graph.decisions for each in d.alternatives if each.choice == rule]
    codes = {why.code for each in every for why in each.rejections}
    assert report.machine is not None
    return graph.num_rewritten, codes, str(report).splitlines()[1], report.machine.stands_in_for


@pytest.mark.parametrize("force", [False, True])
def test_a_gpu_without_a_profile_runs(force: bool) -> None:
    for rewritten, codes, line, names in run_ranks(_unknown_gpu, 2, force, timeout_s=300):
        assert rewritten == (2 if force else 0)
        assert ("machine_not_measured" in codes) is not force
        assert line == "machine: cpu stands in for NVIDIA L40S, which has no profile: run `weaveopt calibrate`"
        assert names == ("NVIDIA L40S",)
