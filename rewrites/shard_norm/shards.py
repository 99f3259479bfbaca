"""Values of this rank's rows, in a graph whose values have all rows.

Ranks have `own` rows each, one after the other: rows `rank * own` and on. Where the token count does not divide by the
ranks, or is a symbol, rows of zeros fill up the last ones.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.fx as fx
from torch.fx.node import Argument

from weaveopt.graph.pattern import is_call, skip_shapes, tensor_of
from weaveopt.graph.splice import call_after, current, last_of
from weaveopt.rewrites.shard_norm.forms import reduces_over
from weaveopt.sites.shared.norms import Norm

aten = torch.ops.aten
_PAD, _SLICE = aten.constant_pad_nd.default, aten.slice.Tensor


@dataclass(frozen=True)
class Shards:
    """How one site's rows are divided, and where its calls go."""

    graph: fx.Graph
    like: fx.Node
    """Whose provenance new nodes have."""
    rank: int
    world: int
    hidden: int
    tokens: Argument
    """A number, or the node that is it."""
    own: Argument
    """Rows of a rank."""
    is_padded: bool

    @staticmethod
    def of(
        graph: fx.Graph, like: fx.Node, rank: int, world: int, hidden: int, tokens: Argument, is_padded: bool
    ) -> Shards:
        if isinstance(tokens, int):
            return Shards(graph, like, rank, world, hidden, tokens, -(-tokens // world), is_padded)
        assert isinstance(tokens, fx.Node), tokens
        raised = call_after(graph, last_of(graph, [tokens]), operator.add, (tokens, world - 1), like)
        own = call_after(graph, raised, operator.floordiv, (raised, world), like)
        return Shards(graph, like, rank, world, hidden, tokens, own, is_padded)

    def call(self, target: object, *args: Argument, named: Mapping[str, Argument] = MappingProxyType({})) -> fx.Node:
        """Inserts a call after all nodes that it reads."""
        position = last_of(self.graph, [*_nodes(args), *_nodes(tuple(named.values()))])
        return call_after(self.graph, position, target, args, self.like, named)

    def filled(self, rows: fx.Node) -> fx.Node:
        """`rows` [tokens, n] with as many rows as all ranks have together."""
        if not self.is_padded:
            return rows
        if isinstance(self.tokens, int) and isinstance(self.own, int):
            return self.call(_PAD, rows, [0, 0, 0, self.own * self.world - self.tokens])
        every = self.call(operator.mul, self.own, self.world)
        return self.call(_PAD, rows, [0, 0, 0, self.call(operator.sub, every, self.tokens)])

    def cut(self, rows: fx.Node) -> fx.Node:
        """Without those that `filled` added."""
        return self.call(_SLICE, rows, 0, 0, self.tokens) if self.is_padded else rows

    def local_rows(self, whole: fx.Node) -> fx.Node:
        """This rank's rows [own, hidden] of a value `[..., hidden]`; the shard itself if `full_size` made the value of
        it."""
        sharded = self._narrowed(whole)
        if sharded is not None:
            return sharded
        value = tensor_of(whole)
        assert value is not None, f"{whole.name} makes no tensor"
        rows = whole if value.ndim == 2 else self.call(aten.view.default, whole, [self.tokens, self.hidden])
        by_rank = self.call(aten.view.default, self.filled(rows), [self.world, self.own, self.hidden])
        return self.call(aten.select.int, by_rank, 0, self.rank)

    def full_size(self, shard: fx.Node) -> fx.Node:
        """[tokens, hidden] in which this rank's rows are those of `shard` and all others 0."""
        before, after = self._around()
        return self.cut(self.call(_PAD, shard, [0, 0, before, after]))

    def _narrowed(self, whole: fx.Node) -> fx.Node | None:
        """The shard that `full_size` made `whole` of, through views; None for any other value."""
        node = skip_shapes(whole)
        if self.is_padded and is_call(node, frozenset({_SLICE})) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        if not is_call(node, frozenset({_PAD})) or len(node.args) != 2 or not isinstance(node.args[0], fx.Node):
            return None
        shard, pads = node.args[0], node.args[1]
        assert isinstance(pads, list | tuple), pads
        shape = [self.own, self.hidden]
        value = tensor_of(shard)
        sizes: Sequence[object] = () if value is None else value.shape
        if len(pads) != 4 or list(pads[:2]) != [0, 0] or len(sizes) != 2:
            return None
        as_expected = [str(_value(each)) for each in (pads[2], pads[3], *sizes)]
        before, after = (self.rank, self.world - 1 - self.rank)
        own = _value(self.own)
        wanted = [str(before * own), str(after * own), *(str(_value(each)) for each in shape)]  # type: ignore[operator]
        return shard if as_expected == wanted else None

    def drop_full_size(self, whole: fx.Node) -> None:
        """Erases what `full_size` made if nothing reads it, since every reader took its own rows."""
        shard = self._narrowed(whole)
        node = whole
        while shard is not None and node is not shard and not node.users:
            before = node.args[0]
            assert isinstance(before, fx.Node), node.args
            self.graph.erase_node(node)
            node = before

    def _around(self) -> tuple[Argument, Argument]:
        """Numbers of rows before this rank's, and after them."""
        counts = (self.rank, self.world - 1 - self.rank)
        if isinstance(self.own, int):
            before, after = (count * self.own for count in counts)
            return before, after
        first, last = (0 if count == 0 else self.call(operator.mul, count, self.own) for count in counts)
        return first, last

    def normalized(self, norm: Norm, x: fx.Node) -> fx.Node:
        """`norm` of the rows `x` [own, hidden], by the operations that the graph has for it."""
        made: dict[fx.Node, fx.Node] = {norm.source: x}

        def here(argument: Argument) -> Argument:
            return fx.map_arg(argument, lambda node: made[node] if node in made else current(node))

        for node in norm.nodes:
            args = [here(argument) for argument in node.args]
            if reduces_over(node):
                args[1] = [-1]
            named = {name: here(argument) for name, argument in node.kwargs.items()}
            made[node] = self.call(node.target, *args, named=named)
        return made[norm.output]


def _nodes(arguments: Sequence[Argument]) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(tuple(arguments), lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return found


def _value(argument: object) -> object:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument
