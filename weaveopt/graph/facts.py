"""Facts on nodes that every rule asks for: module path, process group, token counts, shapes to view as."""

from __future__ import annotations

import math
import re

import torch
import torch.fx as fx
from torch.fx.node import Argument

from weaveopt.graph.exchange import exchange_of
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.splice import call_after

aten = torch.ops.aten
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_ROOT = re.compile(r"^[LG]\['(?:(?:args|kwargs)'\]\[[^\]]*\]|\w+'\])(?:\.__self__)?\.?")
"""Dynamo's source of the outermost module: a local or a global of the compiled function, an argument of a wrapper
`def wrapped(*args, **kwargs)` around its `forward`, or the object of a bound method that such a wrapper calls."""
_NOT_PATH = re.compile(r"(?:\.forward)?\.__closure__\[\d+\]\.cell_contents\.__self__|\.__closure__.*$|_modules\['|'\]")
"""Parts of a source that are not in the module's path: first the method that a wrapper in place of a module's
`forward` calls, after which the path continues."""


def group_of(collective: fx.Node) -> str:
    """Name of the process group that a functional collective runs in (its last text argument)."""
    words = [argument for argument in collective.args if isinstance(argument, str)]
    return words[-1] if words else ""


def collectives_in(graph: fx.Graph) -> list[fx.Node]:
    """The functional collectives of a graph, without the waits for them."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and getattr(node.target, "namespace", "") == "_c10d_functional"
        and "wait" not in str(node.target)
    ]


def devices_in(graph: fx.Graph) -> dict[str, str]:
    """Process group -> the kind of device that its first collective runs on; a group of Gloo's may serve several."""
    devices: dict[str, str] = {}
    for node, group in (*_collectives_in(graph), *_exchanges_in(graph, True), *_exchanges_in(graph, False)):
        value = tensor_of(node)
        if value is not None:
            devices.setdefault(group, value.device.type)
    return devices


def runs_on_gpu(graph: fx.Graph) -> bool:
    """True if a graph takes or makes tensors on a GPU."""
    values = (tensor_of(node) for node in graph.nodes)
    return any(value is not None and value.device.type == "cuda" for value in values)


def groups_in(graph: fx.Graph) -> tuple[str, ...]:
    """Names of the process groups that a graph communicates in, sorted."""
    return tuple(sorted({name for _, name in (*_collectives_in(graph), *_exchanges_in(graph, same_tokens=True))}))


def events_of(graph: fx.Graph, group: str) -> tuple[fx.Node, ...]:
    """Nodes that communicate in a group, in graph order."""
    found = {node for node, name in (*_collectives_in(graph), *_exchanges_in(graph, same_tokens=True)) if name == group}
    return tuple(node for node in graph.nodes if node in found)


def groups_synchronized_in_calls(graph: fx.Graph) -> tuple[str, ...]:
    """Return the names of other groups, sorted: their ranks have different batches, so they compile graphs of other
    sizes and at other times, and synchronize only in their calls."""
    return tuple(sorted({name for _, name in _exchanges_in(graph, same_tokens=False)} - {*groups_in(graph)}))


def _collectives_in(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    return [(node, name) for node in collectives_in(graph) if (name := group_of(node))]


def _exchanges_in(graph: fx.Graph, same_tokens: bool) -> list[tuple[fx.Node, str]]:
    """Find the operators that communicate in a group named in their call."""
    found = ((node, exchange_of(node)) for node in graph.nodes)
    return [(node, each.group) for node, each in found if each is not None and each.same_tokens is same_tokens]


def module_of(node: fx.Node) -> str:
    """Path of the innermost module that traced `node` or what it reads; empty in hand-written functions."""
    for candidate in (node, *node.all_input_nodes):
        stack = candidate.meta.get("nn_module_stack")
        if stack:
            path = str(list(stack.values())[-1][0])
            return _NOT_PATH.sub("", _ROOT.sub("", path.replace(".__class__", ""), count=1)).lstrip(".")
    return ""


def tokens_of(value: torch.Tensor) -> int | torch.SymInt:
    """Tokens of `[..., hidden]`, symbolic where a size is."""
    return math.prod(value.shape[:-1])


def is_empty(value: torch.Tensor) -> bool:
    """True if the graph was compiled for a value without elements."""
    return any(isinstance(size, int) and size == 0 for size in value.shape)


def count_tokens(value: torch.Tensor, bound: int) -> tuple[int, int]:
    """Tokens of `[..., hidden]`: the count to estimate for, and the largest to plan for (`bound` if dynamic)."""
    leading = value.shape[:-1]
    hints = [size if isinstance(size, int) else int(size.node.hint or 1) for size in leading]
    tokens = math.prod(hints)
    if all(isinstance(size, int) for size in leading):
        return tokens, tokens
    return tokens, max(tokens, bound)


def shape_of(graph: fx.Graph, node: fx.Node) -> list[Argument]:
    """The shape of `node` as arguments of a view: numbers where static, nodes where not."""
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    if is_call(node, frozenset({aten.view.default})):
        return list(node.args[1])  # type: ignore[arg-type]
    sizes: list[Argument] = []
    for dim, size in enumerate(value.shape):
        static = isinstance(size, int)
        sizes.append(size if static else call_after(graph, node, aten.sym_size.int, (node, dim), like=node))
    return sizes
