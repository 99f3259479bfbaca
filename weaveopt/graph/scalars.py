"""Python floats that Dynamo passes to a graph as tensors: their values, for rewrites that need a number.

With `torch.compile(dynamic=True)` every float that a model reads (a norm's eps is one) becomes an input of the graph, a
float64 tensor without dimensions, made from a symbol that has a value in this call. A rewrite may take it as that
value; `weaveopt.pipeline.specialize.guard` then has torch compile again for another one, as it does for constants.
Tensors of the program itself are no such inputs, whatever their shape: their values are not known when a graph is
compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.fx as fx

from weaveopt.graph.pattern import CAST, Argument, is_call

_SYMBOL = "weaveopt_symbol"


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
    """The number that an argument is in this call; None where that is not known when the graph is compiled."""
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return float(argument)
    symbol = symbol_of(argument)
    return None if symbol is None else float(symbol.node.hint)


def symbols_of(arguments: Iterable[Argument]) -> tuple[torch.SymFloat, ...]:
    """Return the arguments that are no plain numbers."""
    return tuple(symbol for symbol in map(symbol_of, arguments) if symbol is not None)


def casts_of(argument: Argument) -> tuple[fx.Node, ...]:
    """Nodes between a Python float's placeholder and its reader, the last one first."""
    return tuple(node for node in _under_casts(argument) if node.op != "placeholder")


def _under_casts(argument: Argument) -> Iterator[fx.Node]:
    while isinstance(argument, fx.Node):
        yield argument
        argument = argument.args[0] if is_call(argument, CAST) else None
