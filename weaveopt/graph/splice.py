"""Insert calls into a graph so that everything after it still finds shapes, dtypes and module paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.fx as fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._subclasses import FakeTensorMode
from torch.fx.node import Argument

_REPLACED_BY = "weave_replaced_by"
_KEPT_META = ("nn_module_stack", "stack_trace", "original_aten", "from_node")


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode under which the values of this graph were made."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
            return value.fake_mode  # type: ignore[no-any-return]
    return None


def _value(argument: Argument) -> object:
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    if isinstance(argument, list | tuple):
        return [_value(part) for part in argument]
    return argument


def current(argument: Argument) -> Argument:
    """Return the node that now stands for `argument`: an earlier rewrite may have replaced it."""
    while isinstance(argument, fx.Node) and _REPLACED_BY in argument.meta:
        argument = argument.meta[_REPLACED_BY]
    return argument


def current_node(node: fx.Node) -> fx.Node:
    """`current` of a node, which is one."""
    found = current(node)
    assert isinstance(found, fx.Node), f"{node.name} was replaced by {found!r}"
    return found


def call_after(
    graph: fx.Graph,
    position: fx.Node,
    target: object,
    args: tuple[Argument, ...],
    like: fx.Node,
    named: Mapping[str, Argument] = MappingProxyType({}),
) -> fx.Node:
    """`target(*args, **named)` right after `position`, with its fake value, and provenance copied from `like`."""
    with graph.inserting_after(position):
        node = graph.call_function(target, args, dict(named))  # type: ignore[arg-type]
    node.meta.update({key: like.meta[key] for key in _KEPT_META if key in like.meta})
    mode = fake_mode_of(graph)
    values = tuple(_value(argument) for argument in args)
    named_values = {name: _value(argument) for name, argument in named.items()}
    if mode is None:
        node.meta["val"] = target(*values, **named_values)  # type: ignore[operator]
    else:
        with mode:
            node.meta["val"] = target(*values, **named_values)  # type: ignore[operator]
    return node


def last_of(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """The one that stands last in the graph, but never before the last placeholder."""
    placeholders = graph.find_nodes(op="placeholder", sort=True)
    last: fx.Node = max([*placeholders[-1:], *nodes])
    return last


def replace_uses(graph: fx.Graph, old: fx.Node, replacement: fx.Node) -> None:
    """Every reader of `old` reads `replacement`; where one stands before it, the graph is put in order again."""
    old.replace_all_uses_with(replacement)
    old.meta[_REPLACED_BY] = replacement
    if any(user < replacement for user in replacement.users):
        stable_topological_sort(graph)


def erase_dead(graph: fx.Graph, nodes: frozenset[fx.Node]) -> None:
    """Erase those of `nodes` that have no users any more, last first.

    Collectives count as side effects for FX's own dead-code elimination, so they are named here.
    """
    for node in sorted(nodes, reverse=True):
        if not node.users:
            graph.erase_node(node)
