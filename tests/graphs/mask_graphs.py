"""Graphs of attention masks for tests: written op by op as AOTAutograd leaves them, with their values."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch.fx.node import Argument

from weaveopt.sites.shared.masks import MaskReading, read_mask

aten = torch.ops.aten
prims = torch.ops.prims


class MaskGraph:
    """An FX graph under construction. Nodes carry meta tensors, as compiled graphs carry fakes; `value` computes."""

    def __init__(self) -> None:
        self.graph = fx.Graph(torch.nn.Module())  # type: ignore[arg-type]
        self.values: dict[fx.Node, torch.Tensor] = {}
        self._positions: dict[tuple[int, int, int, int], fx.Node] = {}

    def call(self, target: object, *args: Argument, **kwargs: Argument) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        known = fx.map_arg((args, kwargs), lambda each: self.values[each])
        self._note(node, target(*known[0], **known[1]))  # type: ignore[operator]
        return node

    def constant(self, value: torch.Tensor) -> fx.Node:
        name = f"constant_{len(self.values)}"
        setattr(self.graph.owning_module, name, value)
        node = self.graph.create_node("get_attr", name)
        self._note(node, value)
        return node

    def input(self, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.values)}")
        self._note(node, value)
        return node

    def value(self, node: fx.Node) -> torch.Tensor:
        return self.values[node]

    def _note(self, node: fx.Node, value: torch.Tensor) -> None:
        self.values[node] = value
        node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    def positions(self, size: int, dim: int, rank: int = 4, start: int = 0) -> fx.Node:
        """`arange(start, start + size)` along `dim` of a tensor of `rank` dimensions; the same again if asked again."""
        key = (size, dim, rank, start)
        if key not in self._positions:
            cpu = torch.device("cpu")
            node = self.call(
                prims.iota.default, size, start=0, step=1, dtype=torch.int64, device=cpu, requires_grad=False
            )
            node = self.call(aten.add.Tensor, node, start)
            shape = [size if at == dim % rank else 1 for at in range(rank)]
            self._positions[key] = self.call(aten.view.default, node, shape)
        return self._positions[key]

    def both(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.bitwise_and.Tensor, a, b)

    def scalar(self, value: float | bool, dtype: torch.dtype) -> fx.Node:
        return self.call(aten.full.default, [], value, dtype=dtype, device=torch.device("cpu"), pin_memory=False)

    def bias(self, admitted: fx.Node, dtype: torch.dtype = torch.bfloat16, fill: float = -65536.0) -> fx.Node:
        zero, never = self.scalar(0.0, dtype), self.scalar(fill, dtype)
        return self.call(aten.where.self, admitted, zero, never)

    def masked(self, num_queries: int, num_keys: int, *, offset: int = 0, window: int = 0, chunk: int = 0,
               num_filled: int | None = None) -> fx.Node:  # fmt: skip
        """As transformers writes it: `[1, 1, queries, keys]`, from comparisons of positions."""
        query, key = self.positions(num_queries, -2, start=offset), self.positions(num_keys, -1)
        node = self.scalar(True, torch.bool)
        if window:
            node = self.both(node, self.call(aten.gt.Tensor, key, self.call(aten.sub.Tensor, query, window)))
        if chunk:
            own, other = (self.call(aten.div.Tensor_mode, each, chunk, rounding_mode="floor") for each in (query, key))
            node = self.both(node, self.call(aten.eq.Tensor, other, own))
        node = self.both(node, self.call(aten.le.Tensor, key, query))
        if num_filled is not None:
            node = self.both(node, self.call(aten.lt.Scalar, key, num_filled))
        return node

    def flipped(self, node: fx.Node, batch: int, head: int, query: int, key: int) -> fx.Node:
        """With the bit at one place the other way round, and the result of the size of all indices."""
        size = self.value(node).shape
        at = (batch, head, query, key)
        here = self.call(aten.eq.Scalar, self.positions(size[-1], -1), key)
        for dim in range(3):
            own = self.call(aten.eq.Scalar, self.positions(size[dim], dim), at[dim])
            here = self.both(here, own)
        return self.call(aten.bitwise_xor.Tensor, node, here)


def read(graph: MaskGraph, node: fx.Node) -> MaskReading:
    shape = graph.value(node).shape
    return read_mask(node, False, shape[-2], shape[-1])


def admits(graph: MaskGraph, node: fx.Node) -> torch.Tensor:
    value = graph.value(node)
    return value if value.dtype is torch.bool else value == 0


def assert_sound(graph: MaskGraph, node: fx.Node) -> MaskReading:
    """A reading is the mask, bit for bit, or has a reason; and `admitted` is what the mask is made from."""
    reading, truth = read(graph, node), admits(graph, node)
    assert (reading.mask is None) == (reading.reason is not None)
    if reading.mask is not None:
        expanded = reading.mask.admitted(truth.shape[-2], truth.shape[-1])
        assert torch.equal(expanded.expand(truth.shape), truth), reading
    if reading.admitted is not None:
        assert torch.equal((graph.value(reading.admitted) != reading.is_inverted).expand(truth.shape), truth)
    return reading
