"""A site as a separate graph: its nodes between the values that it reads and those that others read of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

SEED = 0
SCALE = 0.1
"""Scale of the random numbers in place of a model's values: sums of many of them stay small."""


class NotTimedError(Exception):
    """Reason why a site cannot be run by itself; the prediction decides there."""


@dataclass(frozen=True)
class HintedSizes:
    """Symbols as numbers: by their hints in this call, or as a regime is decided for."""

    known: Mapping[sympy.Symbol, int] = field(default_factory=dict)

    @staticmethod
    def of(count: torch.SymInt | None, tokens: int) -> HintedSizes:
        """Sizes with `tokens` for a token count that is a multiple of one symbol; hints for all others."""
        if count is None or count.node.hint == tokens:
            return HintedSizes()
        symbols, [factor, _] = count.node.expr.free_symbols, count.node.expr.as_coeff_Mul()
        if len(symbols) != 1 or count.node.expr != factor * next(iter(symbols)) or tokens % int(factor):
            raise NotTimedError(f"{count.node.expr} tokens cannot be made {tokens}")
        return HintedSizes({next(iter(symbols)): tokens // int(factor)})

    def number(self, value: object) -> int | float | bool:
        """A number, or a symbol's value."""
        if isinstance(value, bool | int | float):
            return value
        if isinstance(value, torch.SymInt):
            shape_env = value.node.shape_env
            found = value.node.expr.xreplace({**shape_env.backed_var_to_val, **self.known})
            if not found.is_number:
                raise NotTimedError(f"the size {value.node.expr} has no value yet")
            return int(found)
        if isinstance(value, torch.SymFloat | torch.SymBool) and value.node.hint is not None:
            return value.node.hint  # type: ignore[no-any-return]
        raise NotTimedError(f"it reads a {type(value).__name__}")


@dataclass(frozen=True)
class GraphPart:
    """Some nodes of a graph, to be called with tensors like `inputs`."""

    module: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    """Fake ones, as the graph has them."""
    sizes: HintedSizes

    @property
    def num_bytes(self) -> int:
        """Size of one set of real inputs."""
        return sum(_storage(value, self.sizes) * value.dtype.itemsize for value in self.inputs)

    def real_inputs(self) -> list[torch.Tensor]:
        """Make inputs of their shapes, strides, dtypes and devices: random numbers; of whole numbers zeros, of flags
        ones. torch's own generators are not touched."""
        made = []
        for value in self.inputs:
            storage = _storage(value, self.sizes)
            if value.dtype.is_floating_point:
                generator = torch.Generator(value.device).manual_seed(SEED)
                flat = torch.empty(storage, device=value.device)
                flat = flat.normal_(std=SCALE, generator=generator).to(value.dtype)
            else:
                flat = torch.full((storage,), value.dtype is torch.bool, dtype=value.dtype, device=value.device)
            shape, strides = (_numbers(each, self.sizes) for each in (value.shape, value.stride()))
            # No view of `flat`, which would live on as its base: each input alone has its memory, as parameters do.
            made.append(
                torch.empty(0, dtype=flat.dtype, device=flat.device).set_(flat.untyped_storage(), 0, shape, strides)
            )
        return made


def readers_of(graph: fx.Graph, nodes: frozenset[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes outside of `nodes` that read one of them."""
    return tuple(node for node in graph.nodes if node not in nodes and nodes.intersection(node.all_input_nodes))


def part_of(graph: fx.Graph, outside: frozenset[fx.Node], readers: Sequence[fx.Node], sizes: HintedSizes) -> GraphPart:
    """Extract the nodes between `outside` and the inputs of `readers` as a graph.

    Raises `NotTimedError` where it reads anything but floating-point tensors and numbers: how long a kernel takes
    rests on what whole numbers and flags say (which expert, how far a cache is filled), and here they would be made up.
    """
    results = dict.fromkeys(
        node for reader in readers if not reader._erased for node in reader.all_input_nodes if node not in outside
    )
    wanted, read, pending = set(results), set(), list(results)
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in outside:
                read.add(node)
            elif node not in wanted:
                wanted.add(node)
                if not _is_number(node):
                    pending.append(node)
    part = fx.Graph()
    values: dict[fx.Node, fx.Node | float] = {}
    inputs = []
    for node in (each for each in graph.nodes if each in read or each in wanted):
        value = node.meta.get("val")
        if _is_number(node):
            values[node] = sizes.number(value)
        elif node in read:
            if not isinstance(value, torch.Tensor):
                raise NotTimedError(f"it reads a {type(value).__name__}")
            if not value.dtype.is_floating_point:
                raise NotTimedError(f"it reads {value.dtype} values, which its time may rest on")
            values[node] = part.placeholder(node.name)
            inputs.append(value)
    for node in graph.nodes:
        if node in wanted and node not in values:
            values[node] = part.node_copy(node, values.__getitem__)
    part.output(tuple(each for each in map(values.__getitem__, results) if isinstance(each, fx.Node)))
    return GraphPart(fx.GraphModule(torch.nn.Module(), part), tuple(inputs), sizes)


def whole_of(graph: fx.Graph, sizes: HintedSizes) -> GraphPart:
    """Copy a whole graph, numbers as constants, to be called with all of its tensors.

    Raises `NotTimedError` where it reads anything else.
    """
    whole = fx.Graph()
    values: dict[fx.Node, fx.Node | float] = {}
    inputs = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "output" and _is_number(node):
            values[node] = sizes.number(value)
        elif node.op == "placeholder":
            if not isinstance(value, torch.Tensor):
                raise NotTimedError(f"it reads a {type(value).__name__}")
            values[node] = whole.placeholder(node.name)
            inputs.append(value)
        elif node.op == "output":
            results = [each for each in map(values.__getitem__, node.all_input_nodes) if isinstance(each, fx.Node)]
            whole.output(tuple(results))
        else:
            values[node] = whole.node_copy(node, values.__getitem__)
    root = graph.owning_module
    return GraphPart(fx.GraphModule(torch.nn.Module() if root is None else root, whole), tuple(inputs), sizes)


def _is_number(node: fx.Node) -> bool:
    number = torch.SymInt | torch.SymFloat | torch.SymBool | bool | int | float
    return isinstance(node.meta.get("val"), number)


def _storage(value: torch.Tensor, sizes: HintedSizes) -> int:
    shape, strides = _numbers(value.shape, sizes), _numbers(value.stride(), sizes)
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _numbers(values: Sequence[int | torch.SymInt], sizes: HintedSizes) -> list[int]:
    return [int(sizes.number(value)) for value in values]
