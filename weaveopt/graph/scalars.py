"""Python floats that Dynamo passes to a graph as tensors: their values, for rewrites that need a number.

With `torch.compile(dynamic=True)` every float that a model reads (a norm's eps is one) becomes an input of the graph, a
float64 tensor without dimensions, made from a symbol that has a value in this call. A rewrite may take it as that
value; `weaveopt.pipeline.specialize.guard` then has torch compile again for another one, as it does for constants.
Tensors of the program itself are no such inputs, whatever their shape: their values are not known when a graph is
compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.fx as fx

from weaveopt.graph.pattern import CAST, Argument, is_call, is_rounding, tensor_of

aten = torch.ops.aten
_SYMBOL = "weaveopt_symbol"
_CONSTANT = frozenset({aten.full.default, aten.scalar_tensor.default})
_ARITHMETIC: Mapping[object, Callable[[float, float], float]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
}


def mark(graph: fx.Graph, inputs: Sequence[object]) -> None:
    """Notes on each placeholder that is a Python float the symbol that torch has for it (torch 2.13: `item_memo`)."""
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=False):
        symbol = getattr(value, "item_memo", None) if isinstance(value, torch.Tensor) and value.ndim == 0 else None
        if isinstance(symbol, torch.SymFloat) and symbol.node.has_hint() and _is_python_float(symbol):
            node.meta[_SYMBOL] = symbol


def _is_python_float(symbol: torch.SymFloat) -> bool:
    """True unless the symbol is `.item()` of a program's tensor: reading that in a guard would wait for its device."""
    from torch._dynamo.source import CallMethodItemSource

    sources = symbol.node.shape_env.var_to_sources.get(symbol.node._expr, ())
    return bool(sources) and not any(isinstance(source, CallMethodItemSource) for source in sources)


def symbol_of(argument: Argument) -> torch.SymFloat | None:
    """The symbol of a Python float that comes as a tensor, under casts."""
    for node in _under_casts(argument):
        if _SYMBOL in node.meta:
            found = node.meta[_SYMBOL]
            assert isinstance(found, torch.SymFloat), found
            return found
    return None


def number_of(argument: Argument) -> float | None:
    """The number that an argument is in this call; None where that is not known when the graph is compiled.

    Arithmetic on Python floats is known too: a bound of `clamp(-limit, limit)` is -1 times an input.
    """
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return float(argument)
    return _value_of(argument) if symbols_of((argument,)) else None


def symbols_of(arguments: Iterable[Argument]) -> tuple[torch.SymFloat, ...]:
    """Symbols that the arguments are computed from; plain numbers have none."""
    nodes = (node for argument in arguments for node in _computing(argument))
    found = (symbol_of(node) for node in nodes if node.op == "placeholder")
    return tuple(symbol for symbol in found if symbol is not None)


def casts_of(argument: Argument) -> tuple[fx.Node, ...]:
    """Nodes between a Python float's placeholder and its reader, the last one first."""
    return tuple(node for node in _computing(argument) if node.op != "placeholder")


def _value_of(argument: Argument) -> float | None:
    if not isinstance(argument, fx.Node):
        return float(argument) if isinstance(argument, int | float) else None
    if (symbol := symbol_of(argument)) is not None:
        return float(symbol.node.hint)
    if is_rounding(argument):
        return _value_of(argument.args[0])
    if is_call(argument, _CONSTANT):
        return _value_of(argument.args[-1])
    if argument.target not in _ARITHMETIC or argument.kwargs:
        return None
    left, right = (_value_of(each) for each in argument.args[:2])
    if left is None or right is None or (argument.target is aten.div.Tensor and right == 0):
        return None
    return _ARITHMETIC[argument.target](left, right)


def _computing(argument: Argument) -> Iterator[fx.Node]:
    """The nodes that compute a scalar, consumers first."""
    pending = [argument]
    while pending:
        node = pending.pop()
        if isinstance(node, fx.Node):
            yield node
            if is_call(node, CAST | _CONSTANT | _ARITHMETIC.keys()) and (value := tensor_of(node)) is not None:
                pending.extend(node.args[:2] if value.ndim == 0 else ())


def _under_casts(argument: Argument) -> Iterator[fx.Node]:
    while isinstance(argument, fx.Node):
        yield argument
        argument = argument.args[0] if is_call(argument, CAST) else None
