"""CUDA graphs that may read weights: which of those that live count."""

from __future__ import annotations

import gc
import inspect
import sys
from types import ModuleType

import pytest
import torch

from weaveopt.ops import captured_graphs
from weaveopt.ops.captured_graphs import may_read_weights, note_capture, note_followed


class Graph:
    """Stands for `torch.cuda.CUDAGraph`, which a process without GPUs cannot make."""


class Wrapped(Graph):
    """A library's own kind."""


class Manager:
    """Stands for what Inductor keeps of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph


@pytest.fixture(autouse=True)
def has_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.parametrize("kind", [Graph, Wrapped])
def test_a_graph_counts_as_long_as_it_lives(kind: type[Graph]) -> None:
    assert not may_read_weights()
    graph = kind()
    assert may_read_weights()
    del graph
    assert not may_read_weights()


def test_graphs_whose_owner_follows_the_weights_do_not_count() -> None:
    followed = Graph()
    note_followed(followed)  # type: ignore[arg-type]
    assert not may_read_weights()
    other = Graph()
    assert may_read_weights()
    del other
    assert not may_read_weights()


def test_graphs_in_cycles_are_gone() -> None:
    gc.disable()
    try:
        graph = Graph()
        graph.itself = graph  # type: ignore[attr-defined]
        del graph
        assert captured_graphs._is_any_unknown() and not may_read_weights()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["CUDAGraphNode", "CUDAGraphTreeManager"])
def test_graphs_that_inductor_manages_do_not_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = ModuleType("torch._inductor.cudagraph_trees")
    setattr(trees, name, Manager)
    monkeypatch.setitem(sys.modules, trees.__name__, trees)
    managers = [Manager(Graph()) for _ in range(2)]
    assert not may_read_weights()
    managers[0], graph = Manager(Graph()), managers[0].graph
    assert may_read_weights(), "nobody manages it any more"
    del graph


def test_graphs_that_may_be_frozen_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc.get_objects` does not know them."""
    frozen = [7]
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen[0])
    monkeypatch.setattr(captured_graphs, "_frozen", None)
    assert not may_read_weights(), "nothing was captured"
    note_capture()
    note_capture()
    assert not may_read_weights(), "nothing was frozen since"
    frozen[0] = 8
    note_capture()
    assert may_read_weights()


def test_a_process_without_gpus_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    graph = Graph()
    assert not may_read_weights()
    del graph


def test_inductor_keeps_its_graphs_where_they_are_looked_for() -> None:
    from torch._inductor import cudagraph_trees

    for name in ("CUDAGraphNode", "CUDAGraphTreeManager"):
        assert "self.graph" in inspect.getsource(getattr(cudagraph_trees, name))
