"""Which graphs are a model's own: after its parameters were replaced, of a second model of its class, after a reset;
and which of its calls ran without any graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weaveopt
from tests.graphs.preview import fake_group
from weaveopt.errors import WeaveError
from weaveopt.records.report import Report
from weaveopt.reporting.document import to_json
from weaveopt.reporting.document_reader import from_json
from weaveopt.reporting.text import text
from weaveopt.rewrites import RULES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    """GEMMs alone: no kernel of Inductor's own has to be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def _compiled(model: nn.Module) -> nn.Module:
    model.compile(backend="weave", dynamic=False)
    return model


def _num_graphs(model: object) -> int:
    return len(weaveopt.report(model).graphs)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two ranks of which only this one is there; nothing waits for the other."""
    monkeypatch.setenv("WEAVE_DISABLE", ",".join(RULES.names))
    with fake_group(2):
        yield


CONVERSIONS = (("bfloat16", True), ("half", False), ("cpu", False))
"""And whether a training step came before."""


def test_a_compiled_dtensor_model_can_be_converted(group: None) -> None:
    """Each conversion: the dtype after it, and the model's graphs before and after another call."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for conversion, train in CONVERSIONS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.enable_grad():
            model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        _compiled(model)
        with torch.set_grad_enabled(train):
            out = model(torch.ones(4, 8)).sum()
        if train:
            out.backward()
            model.zero_grad()
        del out
        getattr(model, conversion)()
        before = _num_graphs(model)
        dtype = next(model.parameters()).dtype
        with torch.no_grad():
            model(torch.ones(4, 8, dtype=dtype))
        found.append((str(dtype), before, _num_graphs(model)))
    # A training step has two graphs. Where nothing changed, nothing is compiled again.
    assert found == [("torch.bfloat16", 2, 3), ("torch.float16", 1, 2), ("torch.float32", 1, 1)]


@pytest.fixture
def swapped() -> Iterator[None]:
    """Conversions swap tensors of all models, as they do where parameters are DTensors."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def test_nothing_of_a_report_refers_to_parameters(swapped: None) -> None:
    """However the model came to be compiled: itself, by a function that it is given, by one that closes over it."""
    module, given, closed, held = _compiled(Block()), Block(), Block(), Block()
    module(torch.ones(4, 8))
    torch.compile(lambda model, x: model(x), backend="weave")(given, torch.ones(4, 8))
    torch.compile(lambda x: closed(x), backend="weave")(torch.ones(4, 8))
    models = {"held": [held]}
    torch.compile(lambda x: models["held"][0](x), backend="weave")(torch.ones(4, 8))
    for model in (module, given, closed, held):
        assert _num_graphs(model) == 1
        assert not any(weakref.getweakrefs(parameter) for parameter in model.parameters())
        model.to(torch.bfloat16)
    for model in (module, given, closed):
        assert _num_graphs(model) == 1


@pytest.mark.usefixtures("little_garbage")
def test_a_model_is_freed_with_its_report() -> None:
    model = _compiled(Block())
    model(torch.ones(4, 8))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_second_model_of_a_class_runs_the_first_ones_code() -> None:
    first, second, plain = _compiled(Block()), _compiled(Block()), Block()
    first(torch.ones(4, 8))
    assert torch.equal(second(torch.ones(4, 8)), second.down(second.up(torch.ones(4, 8))))
    report = weaveopt.report(second)
    assert report.graphs == weaveopt.report(first).graphs
    assert "compiled for another Block" in str(report) and "nothing was compiled" not in str(report)
    assert not weaveopt.report(first).notes
    wrapper = nn.Sequential(second)
    assert weaveopt.report(wrapper).graphs == report.graphs
    assert not weaveopt.report(plain).graphs, "it was never to be compiled"
    other = Block()
    other.compile(backend="eager", dynamic=False)
    other(torch.ones(4, 8))
    assert not weaveopt.report(other).graphs, "another backend's"
    optimized = torch.compile(Block(), backend="weave", dynamic=False)
    optimized(torch.ones(4, 8))
    assert weaveopt.report(optimized).graphs == report.graphs


def test_what_a_reset_dropped_is_no_longer_the_models() -> None:
    model = Block()
    first = torch.compile(model, backend="weave", dynamic=False)
    first(torch.ones(4, 8))
    first(torch.ones(2, 8))
    assert _num_graphs(first) == 2
    torch._dynamo.reset()
    gone = weaveopt.report(model)
    assert len(gone.graphs) == 2 and "no call runs it" in str(gone)
    second = torch.compile(model, backend="weave", options={"max_tokens": 64}, dynamic=False)
    second(torch.ones(4, 8))
    report = weaveopt.report(second)
    assert len(report.graphs) == 1 and "2 earlier graphs not shown" in str(report)
    assert report.graphs[0].name != gone.graphs[0].name


@torch._dynamo.config.patch(recompile_limit=2)
def test_calls_beyond_the_recompile_limit_are_told() -> None:
    model = _compiled(Block())
    for num_rows in (2, 3):
        model(torch.ones(num_rows, 8))
    assert weaveopt.report(model).uncompiled == ()
    model(torch.ones(4, 8))
    report = weaveopt.report(model)
    (found,) = report.uncompiled
    assert found.what.startswith("Block.forward (") and "test_which_model.py:" in found.what
    assert "recompile_limit was reached" in found.reason and "size mismatch at index 0" in found.reason
    assert (len(report.graphs), found.calls) == (2, None)
    assert "uncompiled: the calls of Block.forward" in " ".join(str(report).split())
    assert not weaveopt.report(_compiled(nn.Linear(8, 8))).uncompiled


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_calls_under_a_stance_are_counted(stance: str) -> None:
    model, other = _compiled(Block()), _compiled(Block())
    function = torch.compile(lambda x: x @ x, backend="weave")
    with torch.compiler.set_stance(stance):
        for _ in range(3):
            model(torch.ones(4, 8))
        function(torch.ones(4))
    report = weaveopt.report(model)
    (found,) = report.uncompiled
    assert (found.calls, stance in found.reason) == (3, True)
    assert "nothing was compiled: its calls ran uncompiled" in str(report) and "3 of the calls of Block" in str(report)
    assert not weaveopt.report(other).uncompiled
    assert [each.calls for each in weaveopt.report(function).uncompiled] == [1]
    model(torch.ones(4, 8))
    again = weaveopt.report(model)
    assert (len(again.graphs), again.uncompiled) == (1, report.uncompiled)
    assert from_json(to_json(again)) == Report(**{name: getattr(again, name) for name in vars(again)})


def _doubled(x: Tensor) -> Tensor:
    return x @ x


def test_torch_asks_nobody_under_its_default_stance() -> None:
    plain = torch._dynamo.eval_frame._callback_from_stance
    with torch.compiler.set_stance("force_eager"):
        assert torch._dynamo.eval_frame._callback_from_stance is not plain
    assert torch._dynamo.eval_frame._callback_from_stance is plain
    assert plain.__module__ == "torch._dynamo.eval_frame"


def test_a_function_has_the_graphs_that_were_compiled_of_it() -> None:
    model = Block()
    function, other = (torch.compile(each, backend="weave") for each in (lambda x: model(x), _doubled))
    function(torch.ones(4, 8))
    other(torch.ones(4, 4))
    assert _num_graphs(function) == _num_graphs(other) == 1
    assert weaveopt.report(function).graphs == weaveopt.report(model).graphs != weaveopt.report(other).graphs


class Holder:
    """As a trainer or a pipeline holds its model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


MISUSES = [
    ("Block", "found str 'Block', expected what torch.compile returned"),
    (3, "found int '3'"),
    (torch.ones(2), "found Tensor"),
    (Block, "found the class Block"),
    ([Block()], "found list"),
    (Holder(Block()), "weaveopt.report(x.model)"),
    (Block().forward, "the method 'forward' of a Block, expected the module itself"),
]


@pytest.mark.parametrize(("what", "words"), MISUSES, ids=[type(what).__name__ for what, _ in MISUSES])
def test_misuse_is_one_line(what: object, words: str) -> None:
    with pytest.raises(WeaveError) as caught:
        weaveopt.report(what)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_calls_without_a_graph_are_in_the_text() -> None:
    report = weaveopt.report(_compiled(Block()))
    assert "nothing was compiled yet" in text(report)
