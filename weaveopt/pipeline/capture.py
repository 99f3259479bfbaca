"""Step 1: take the graph that AOTAutograd made, say what it is, and remove what frameworks leave around collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from weaveopt.graph.facts import collectives_in, count_tokens, groups_in, tokens_of
from weaveopt.graph.pattern import SHAPE_ONLY, is_call, tensor_of
from weaveopt.graph.scalars import mark
from weaveopt.inductor.seams import GraphPass
from weaveopt.rule import CapturedGraph

_c10d = torch.ops._c10d_functional
_COPY = frozenset({torch.ops.aten.copy.default})
_REDUCE_SCATTER = frozenset({_c10d.reduce_scatter_tensor.default})
_WAIT = frozenset({_c10d.wait_tensor.default})


def capture(
    graph_module: fx.GraphModule, name: str, graph_pass: GraphPass, inputs: Sequence[object] = ()
) -> CapturedGraph:
    """A copy of the graph, normalized; the graph module itself is not touched. `inputs` are its fake arguments."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(graph_module.graph, val_map=copies, return_output_node=True)
    assert isinstance(output, tuple)
    value, output_node = output
    made = graph.output(value)
    made.meta.update(output_node.meta)
    graph._codegen = graph_module.graph._codegen
    if graph_pass is not GraphPass.BACKWARD:  # which has no guards of its own
        mark(graph, inputs)
    for node in list(graph.nodes):
        _normalize(graph, node)
    collectives = collectives_in(graph)
    phase, tokens = _phase(collectives, graph_pass)
    return CapturedGraph(name, phase, tokens, groups_in(graph), graph, _symbolic_tokens(collectives))


def _normalize(graph: fx.Graph, node: fx.Node) -> None:
    """`copy(x, y)` that replaces all of x is y; a view of a view is one view; a wait of a wait is one wait."""
    if is_call(node, _COPY):
        target, source = node.args[:2]
        if _same_layout(target, source) and isinstance(source, fx.Node):
            _replace(graph, node, source)
    elif is_call(node, frozenset({torch.ops.aten.view.default})) and is_call(node.args[0], SHAPE_ONLY):
        inner = node.args[0]
        while is_call(inner, SHAPE_ONLY):
            inner = inner.args[0]  # type: ignore[union-attr]
        assert isinstance(inner, fx.Node)
        if _same_layout(inner, node):
            _replace(graph, node, inner)
    elif is_call(node, _WAIT) and is_call(node.args[0], _WAIT):
        _replace(graph, node, node.args[0])  # type: ignore[arg-type]


def _same_layout(a: object, b: object) -> bool:
    x = tensor_of(a) if isinstance(a, fx.Node) else None
    y = tensor_of(b) if isinstance(b, fx.Node) else None
    if x is None or y is None or x.ndim != y.ndim or x.dtype != y.dtype:
        return False
    return all(p is q or p == q for p, q in zip((*x.shape, *x.stride()), (*y.shape, *y.stride()), strict=True))


def _replace(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def _phase(collectives: list[fx.Node], graph_pass: GraphPass) -> tuple[str, int]:
    """`decode` is one position a sequence; the token count is that of the widest all-reduce, or without any of the
    widest collective, by its larger side."""
    reductions = [node for node in collectives if "all_reduce" in str(node.target)]
    values = [v for node in reductions or collectives if (v := _larger_side(node)) is not None and v.ndim >= 2]
    tokens = max((count_tokens(value, 0)[0] for value in values), default=0)
    if graph_pass is not GraphPass.INFERENCE:
        return graph_pass.name.lower(), tokens
    sequences = [value for node in reductions or collectives for value in _forms(node) if value.ndim == 3]
    if not sequences:
        return "inference", tokens
    decode = all(isinstance(value.shape[1], int) and value.shape[1] == 1 for value in sequences)
    return ("decode" if decode else "prefill"), tokens


def _symbolic_tokens(collectives: list[fx.Node]) -> torch.SymInt | None:
    """Find the symbolic token count, with a value in this call, that most all-reduces have.

    Without all-reduces: the one that most gathers and reduce-scatters have, by their larger side.
    """
    reductions = [node for node in collectives if "all_reduce" in str(node.target)]
    found: dict[object, list[torch.SymInt]] = {}
    for node in reductions or collectives:
        value = _larger_side(node)
        count = None if value is None else tokens_of(value)
        if isinstance(count, torch.SymInt) and count.node.has_hint():
            found.setdefault(count.node.expr, []).append(count)
    return max(found.values(), key=len)[0] if found else None


def _larger_side(collective: fx.Node) -> torch.Tensor | None:
    """Return the full-size tensor of a collective: a reduce-scatter's input, any other collective's output."""
    source = collective.args[0] if is_call(collective, _REDUCE_SCATTER) else collective
    return tensor_of(source) if isinstance(source, fx.Node) else None


def _forms(collective: fx.Node) -> list[torch.Tensor]:
    """A collective's result, and the views of it that are read (a mixture reduces [tokens, hidden])."""
    readers = [user for wait in collective.users for user in wait.users if is_call(user, SHAPE_ONLY)]
    return [value for node in (collective, *readers) if (value := tensor_of(node)) is not None]
