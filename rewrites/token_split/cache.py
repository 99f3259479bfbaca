"""Keys and values as of a part: its own and those of the parts before it, in caches of every form.

none      the parts before and the part itself, concatenated
grows     `cat(cache, keys)`: the cache, and those
static    `index_put(cache, [None, None, positions], keys)`: one write for each part, in turn
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Size
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.values import argument
from weaveopt.rewrites.token_split.builder import Builder
from weaveopt.rewrites.token_split.causality import Bound, is_at_most, positions
from weaveopt.rewrites.token_split.values import Cut, Mark, Parts, Value, simplified, sizes_of

aten = torch.ops.aten
ROWS = 2
"""Dimension of keys `[batch, heads, keys, head_dim]`."""


@dataclass(frozen=True)
class Available:
    """Keys that a part may read: of all of them those up to `size`."""

    node: fx.Node
    size: Size


class Caches:
    """Keys and values of a graph that is cut along the sequence."""

    def __init__(
        self, builder: Builder, cut: Cut, value_of: Callable[[fx.Node], Value], whole: Callable[[fx.Node], fx.Node]
    ) -> None:
        self._builder, self._cut, self._value_of, self._whole = builder, cut, value_of, whole
        self._writes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._known: dict[tuple[fx.Node, int], Available] = {}

    def write(self, node: fx.Node) -> fx.Node | None:
        """`index_put(cache, [None, None, positions], keys)` with keys in parts: a write for each part in turn.

        Returns the last state; None for any other form.
        """
        keys, place = node.args[2], _written_dim(node)
        value = self._value_of(keys) if isinstance(keys, fx.Node) else None
        if place is None or not isinstance(value, Parts) or not value.mark.is_plain or value.mark.dim != place:
            return None
        cache, indices = node.args[:2]
        assert isinstance(cache, fx.Node) and isinstance(indices, list | tuple)
        at = self._whole(indices[place])  # type: ignore[arg-type]
        state, states = self._whole(cache), []
        for part, each in enumerate(value.nodes):
            begin, end = self._cut.bounds[part : part + 2]
            where = self._builder.sliced(at, Mark(0), begin, end, self._cut.length)
            placed = [*indices[:place], where, *indices[place + 1 :]]
            state = self._builder.call(node.target, (state, placed, each, *node.args[3:]), node)  # type: ignore[arg-type]
            states.append(state)
        self._writes[node] = tuple(states)
        return state

    def is_bounded(self, keys: fx.Node, bound: Bound) -> bool:
        """True if no query of a part sees a key that `available` leaves out."""
        if keys in self._writes:
            written = positions(keys.args[1][ROWS])  # type: ignore[index]
            if written is None or written.dim != -1 or not _count_alike(written.root, bound.root):
                return False
            return is_at_most(bound.high, written.offset)
        value = self._value_of(keys)
        if isinstance(value, Parts):
            return value.mark == Mark(ROWS) and bound.root is None and is_at_most(bound.high, 0)
        before = self._before(keys)
        return before is not None and bound.root is None and is_at_most(bound.high, before)

    def available(self, keys: fx.Node, part: int) -> Available:
        """The keys that a part may read, where `is_bounded`."""
        key = (keys, part)
        if key not in self._known:
            self._known[key] = self._made(keys, part)
        return self._known[key]

    def _made(self, keys: fx.Node, part: int) -> Available:
        length = sizes_of(keys.meta["val"])[ROWS]
        if keys in self._writes:
            return Available(self._writes[keys][part], length)
        value, end = self._value_of(keys), self._cut.bounds[part + 1]
        if isinstance(value, Parts):
            if part == 0:
                return Available(value.nodes[0], end)
            return Available(self._builder.call(aten.cat.default, (list(value.nodes[: part + 1]), ROWS), keys), end)
        before = self._before(keys)
        assert before is not None, f"{keys.name} is no cache of a known form"
        *earlier, last = keys.all_input_nodes
        own = self._value_of(last)
        assert isinstance(own, Parts), f"{last.name} is whole"
        pieces = [*map(self._whole, earlier), *own.nodes[: part + 1]]
        return Available(self._builder.call(aten.cat.default, (pieces, ROWS), keys), simplified(before + end))

    def _before(self, keys: fx.Node) -> Size | None:
        """Keys that a growing cache held before: of `cat([cache, ..., keys], 2)` with keys in parts."""
        if not is_call(keys, frozenset({aten.cat.default})) or argument(keys, "dim") not in (ROWS, ROWS - 4):
            return None
        *earlier, last = [self._value_of(each) for each in keys.all_input_nodes]
        if not isinstance(last, Parts) or last.mark != Mark(ROWS):
            return None
        if any(isinstance(each, Parts) for each in earlier):
            return None
        return simplified(sizes_of(keys.meta["val"])[ROWS] - self._cut.length)


def _written_dim(node: fx.Node) -> int | None:
    """The one dimension in which an `index_put` places vectors."""
    indices = node.args[1]
    assert isinstance(indices, list | tuple), node.args
    given = [at for at, each in enumerate(indices) if isinstance(each, fx.Node)]
    index = tensor_of(indices[given[0]]) if len(given) == 1 else None  # type: ignore[arg-type]
    return given[0] if index is not None and index.ndim == 1 and index.dtype is not torch.bool else None


def _count_alike(a: fx.Node | None, b: fx.Node | None) -> bool:
    """True for one counter, or for two that the graph advances by the same number.

    Static caches count the tokens of each layer by itself, and the mask is made from one layer's count. Layers of one
    cache are filled together.
    """
    if a is b:
        return True
    return a is not None and b is not None and (step := _advance(a)) is not None and step == _advance(b)


def _advance(counter: fx.Node) -> object:
    """Step of a counter that the graph gets as an input and advances."""
    for change in counter.users:
        if is_call(change, frozenset({aten.copy_.default})) and change.args[0] is counter:
            total = change.args[1]
            if is_call(total, frozenset({aten.add.Tensor})) and total.args[0] is counter:  # type: ignore[union-attr]
                step = total.args[1]  # type: ignore[union-attr]
                return str(step.meta["val"]) if isinstance(step, fx.Node) else step
    return None
