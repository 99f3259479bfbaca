"""Random movements of elements around collectives, in graphs that run on simulated ranks: every rank in this process.

A movement is made of steps that a list of parts of every dimension allows, so that views never cut across a part.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import Tensor

from weaveopt.rule import CapturedGraph

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Parts = list[list[int]]
"""For each dimension, the factors of its size."""


class Ranks:
    """A graph with the values of every rank at every node."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.graph = fx.Graph()
        self.values: dict[fx.Node, list[object]] = {}

    def input(self, values: Sequence[Tensor]) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        return self._made(node, list(values))

    def call(self, target: object, *args: object, **kwargs: object) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        found = []
        for rank in range(self.world):
            own = fx.map_arg(args, lambda each, rank=rank: self.values[each][rank])
            found.append(target(*own, **kwargs))  # type: ignore[operator]
        return self._made(node, found)

    def all_gather(self, shard: fx.Node) -> fx.Node:
        whole = torch.cat([value for value in self.values[shard] if isinstance(value, Tensor)])
        return self._collective(c10d.all_gather_into_tensor.default, (shard, self.world, "0"), [whole] * self.world)

    def reduce_scatter(self, partial: fx.Node, op: str = "sum") -> fx.Node:
        total = torch.stack([value for value in self.values[partial] if isinstance(value, Tensor)]).sum(0)
        total = total / self.world if op == "avg" else total
        shards = list(total.chunk(self.world))
        return self._collective(c10d.reduce_scatter_tensor.default, (partial, op, self.world, "0"), shards)

    def captured(self, *results: fx.Node) -> CapturedGraph:
        self.graph.output(results)
        self.graph.lint()
        return CapturedGraph("graph", "inference", 0, ("0",), self.graph)

    def tensors(self, node: fx.Node) -> list[Tensor]:
        return [value for value in self.values[node] if isinstance(value, Tensor)]

    def _collective(self, target: object, args: tuple[object, ...], values: list[Tensor]) -> fx.Node:
        node = self._made(self.graph.call_function(target, args), list(values))  # type: ignore[arg-type]
        return self._made(self.graph.call_function(c10d.wait_tensor.default, (node,)), list(values))

    def _made(self, node: fx.Node, values: list[object]) -> fx.Node:
        self.values[node] = values
        node.meta["val"] = values[0]
        return node


@dataclass
class Mover:
    """Moves a value in random steps."""

    ranks: Ranks
    random: random.Random
    node: fx.Node
    parts: Parts

    def step(self) -> None:
        self.random.choice((self.merge, self.cut, self.permute, self.move_part, self.move_part, self.cast))()

    def merge(self) -> None:
        if len(self.parts) > 1:
            at = self.random.randrange(len(self.parts) - 1)
            self._view([*self.parts[:at], self.parts[at] + self.parts[at + 1], *self.parts[at + 2 :]])

    def cut(self) -> None:
        wide = [at for at, dim in enumerate(self.parts) if len(dim) > 1]
        if wide:
            at = self.random.choice(wide)
            where = self.random.randrange(1, len(self.parts[at]))
            self._view([*self.parts[:at], self.parts[at][:where], self.parts[at][where:], *self.parts[at + 1 :]])

    def permute(self) -> None:
        order = self.random.sample(range(len(self.parts)), len(self.parts))
        self._apply(aten.permute.default, order)
        self.parts = [self.parts[at] for at in order]
        if self.random.random() < 0.5:
            self.node = self.ranks.call(aten.clone.default, self.node, memory_format=torch.contiguous_format)

    def cast(self) -> None:
        self.node = self.ranks.call(torch.ops.prims.convert_element_type.default, self.node, torch.bfloat16)

    def move_part(self, wrongly: str = "") -> bool:
        """`cat(split(x, dim), other)`, in one of its spellings; `wrongly` says how it goes wrong, if it should."""
        source = self.random.choice([at for at, dim in enumerate(self.parts) if dim])
        num = self.parts[source][0]
        if num == 1:
            return False
        size = math.prod(self.parts[source]) // num
        rest = [*self.parts[:source], self.parts[source][1:], *self.parts[source + 1 :]]
        target = self.random.randrange(len(rest))
        spelling = self.random.choice(("split", "chunk", "slice", "unbind" if size == 1 else "sizes"))
        pieces = self._pieces(spelling, source, num, size)
        if spelling == "unbind":
            rest, target = rest[:source] + rest[source + 1 :], self.random.randrange(len(rest))
        if wrongly == "order":
            pieces = [*pieces[1:], pieces[0]]
        elif wrongly == "twice":
            pieces = [pieces[0]] * num
        elif wrongly == "missing":
            pieces = pieces[1:]
        if spelling == "unbind":
            self.node = self.ranks.call(aten.stack.default, pieces, target)
            self.parts = [*rest[:target], [len(pieces)], *rest[target:]]
        else:
            self.node = self.ranks.call(aten.cat.default, pieces, target)
            self.parts = [*rest[:target], [len(pieces), *rest[target]], *rest[target + 1 :]]
        return True

    def _pieces(self, spelling: str, dim: int, num: int, size: int) -> list[fx.Node]:
        if spelling == "slice":
            starts = [index * size for index in range(num)]
            return [self.ranks.call(aten.slice.Tensor, self.node, dim, start, start + size) for start in starts]
        target, args = {
            "split": (aten.split.Tensor, (size, dim)),
            "chunk": (aten.chunk.default, (num, dim)),
            "sizes": (aten.split_with_sizes.default, ([size] * num, dim)),
            "unbind": (aten.unbind.int, (dim,)),
        }[spelling]
        whole = self.ranks.call(target, self.node, *args)
        return [self.ranks.call(operator.getitem, whole, index) for index in range(num)]

    def break_rows(self) -> None:
        """A step that no arrangement says, or that loses elements."""
        wide = [at for at, dim in enumerate(self.parts) if math.prod(dim) > 1]
        if self.random.random() < 0.3:
            self._apply(aten.flip.default, [self.random.choice(wide)])
        elif not self.move_part(self.random.choice(("order", "twice", "missing"))):
            self._apply(aten.roll.default, [1], [self.random.choice(wide)])

    def to_rank(self, rank: int) -> None:
        """Merged or with dimensions of one element, so that there are `rank` of them."""
        while len(self.parts) > rank:
            self.merge()
        if len(self.parts) < rank:
            self._view([*self.parts, *([[]] * (rank - len(self.parts)))])

    def _view(self, parts: Parts) -> None:
        self.parts = parts
        target = self.random.choice((aten.view.default, aten.reshape.default))
        if not all(value.is_contiguous() for value in self.ranks.tensors(self.node)):
            target = aten.reshape.default
        self._apply(target, [math.prod(dim) for dim in parts])

    def _apply(self, target: object, *args: object) -> None:
        self.node = self.ranks.call(target, self.node, *args)
