"""Capture: the nodes that it removes and keeps, and what it says of a graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives
import torch.fx as fx
from torch._subclasses import FakeTensorMode

from weaveopt.inductor.seams import GraphPass
from weaveopt.pipeline.capture import capture

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def graph_of(*shape: int) -> tuple[fx.Graph, fx.Node, fx.Node]:
    """x -> all_reduce -> wait, with fake values."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        value = mode.from_tensor(torch.empty(*shape))
    nodes = [graph.placeholder("x")]
    nodes.append(graph.call_function(c10d.all_reduce.default, (nodes[0], "sum", "7")))
    nodes.append(graph.call_function(c10d.wait_tensor.default, (nodes[1],)))
    for node in nodes:
        node.meta["val"] = value
    return graph, nodes[0], nodes[2]


def finish(graph: fx.Graph, result: fx.Node) -> fx.GraphModule:
    result.meta.setdefault("val", next(iter(graph.nodes)).meta["val"])
    graph.output((result,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_copy_over_a_whole_tensor_is_what_was_copied() -> None:
    graph, x, wait = graph_of(2, 3, 8)
    module = finish(graph, graph.call_function(aten.copy.default, (x, wait)))
    captured = capture(module, "g", GraphPass.INFERENCE)
    assert not any(node.target is aten.copy.default for node in captured.graph.nodes)
    assert any(node.target is aten.copy.default for node in module.graph.nodes), "the module itself is not touched"


def test_views_that_cancel_and_doubled_waits_go() -> None:
    graph, _, wait = graph_of(2, 3, 8)
    again = graph.call_function(c10d.wait_tensor.default, (wait,))
    flat = graph.call_function(aten.view.default, (again, [6, 8]))
    back = graph.call_function(aten.view.default, (flat, [2, 3, 8]))
    again.meta["val"] = back.meta["val"] = wait.meta["val"]
    with wait.meta["val"].fake_mode:
        flat.meta["val"] = wait.meta["val"].view(6, 8)
    captured = capture(finish(graph, back), "g", GraphPass.INFERENCE)
    targets = [node.target for node in captured.graph.nodes]
    assert targets.count(c10d.wait_tensor.default) == 1
    (result,) = captured.graph.output_node().args[0]  # type: ignore[misc]
    assert result.target is c10d.wait_tensor.default  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("shape", "arguments", "phase", "tokens"),
    [
        ((2, 3, 8), {"is_inference": True}, "prefill", 6),
        ((4, 1, 8), {"is_inference": True, "is_backward": False}, "decode", 4),
        ((6, 8), {"is_inference": True}, "inference", 6),
        ((2, 3, 8), {"is_inference": False}, "forward", 6),
        ((2, 3, 8), {}, "forward", 6),
        ((2, 3, 8), {"is_backward": True}, "backward", 6),
    ],
)
def test_the_phase_is_told(shape: tuple[int, ...], arguments: dict[str, object], phase: str, tokens: int) -> None:
    """From the arguments that Inductor gives `inner_compile`."""
    graph, _, wait = graph_of(*shape)
    captured = capture(finish(graph, wait), "g", GraphPass.of(arguments))
    assert (captured.phase, captured.tokens, captured.groups) == (phase, tokens, ("7",))
