"""Place an order of communication in a graph: every wait names the other starts as operands."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from weaveopt.graph.pattern import is_call
from weaveopt.graph.splice import call_after
from weaveopt.ops.collective_wait import op as _op  # noqa: F401
from weaveopt.records.order import Order

WAIT = frozenset({torch.ops._c10d_functional.wait_tensor.default})
STARTED = "started"
"""Argument of `_end` operators and of `collective_wait` that names what is in flight."""


def place(graph: fx.Graph, order: Order) -> Order:
    """Make each wait of `order` depend on the starts that come before it, which have to stand before it in `graph`.

    The library's `wait_tensor` becomes `collective_wait`; an operator with an argument `started`, as `_end` operators
    have, gets the starts appended to it. Returns the pairs that the graph has, with the names of its nodes now: pairs
    of nodes that a rewrite removed are gone.
    """
    nodes = {node.name: node for node in graph.nodes}
    held = order.within(nodes)
    placed: list[tuple[str, str]] = []
    for wait in held.waits:
        starts = [nodes[start] for start in held.starts_before(wait)]
        late = [start.name for start in starts if nodes[wait] < start]
        assert not late, f"{wait} stands before {late} in the graph"
        name = _depend(graph, nodes[wait], [_value(graph, start) for start in starts]).name
        placed += [(name, start.name) for start in starts]
    return Order(tuple(placed))


def _value(graph: fx.Graph, start: fx.Node) -> fx.Node:
    """A tensor of a start: the first one where it has several."""
    if isinstance(start.meta["val"], torch.Tensor):
        return start
    return call_after(graph, start, operator.getitem, (start, 0), like=start)


def _depend(graph: fx.Graph, wait: fx.Node, started: list[fx.Node]) -> fx.Node:
    """The node that waits after `started`."""
    if is_call(wait, WAIT):
        total = wait.args[0]
        assert isinstance(total, fx.Node), wait.args
        arguments = (total, started)
        placed = call_after(graph, wait, torch.ops.weave.collective_wait.default, arguments, like=wait)
        wait.replace_all_uses_with(total)
        graph.erase_node(wait)
        return placed
    names = [argument.name for argument in wait.target._schema.arguments]  # type: ignore[union-attr]
    assert STARTED in names, f"{wait.name} waits by {wait.target}, which has no argument {STARTED!r}"
    position = names.index(STARTED)
    assert position < len(wait.args), f"{wait.name} has no value of its argument {STARTED!r}"
    wait.update_arg(position, [*wait.args[position], *started])  # type: ignore[misc]
    return wait
