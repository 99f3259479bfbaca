"""The transform: a captured graph, interpreted with values that are whole or in parts along one axis.

A node whose operands are in parts is computed for each part if it is local to the axis (`local`, `shapes`), if it
belongs to a found site that is a block (`attention`, `blocks`) or writes into a cache (`cache`). Any other joins its
operands and stays whole: a barrier, which costs overlap and is never a wrong number. A whole value that is read
together with parts is sliced (`slices`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Size, size_of
from weaveopt.graph.facts import module_of
from weaveopt.graph.pattern import is_call
from weaveopt.rewrites.token_split.attention import AttentionParts
from weaveopt.rewrites.token_split.blocks import mixture_parts
from weaveopt.rewrites.token_split.builder import Builder
from weaveopt.rewrites.token_split.copies import AxisRange, Copied, Copier, NotCopied
from weaveopt.rewrites.token_split.local import STARTS, WAIT, follow, operands
from weaveopt.rewrites.token_split.order import SHARED, StageOrder
from weaveopt.rewrites.token_split.shapes import Place
from weaveopt.rewrites.token_split.slices import Slices
from weaveopt.rewrites.token_split.values import Cut, Mark, Parts, Value
from weaveopt.rule import FoundSite
from weaveopt.sites.attention.matcher import AttentionNodes
from weaveopt.sites.mixture.experts import Experts

aten = torch.ops.aten
_AXIS = "axis"
_LAST = 1 << 30
"""Stage of nodes that change an input of the graph: after all that read it."""
BARRIER = "barrier"


@dataclass(frozen=True)
class Join:
    """A place where parts are joined in the middle of a graph."""

    node: str
    """The node of the captured graph that needs all tokens."""
    module: str
    code: str
    """`barrier`, or why an attention needs the keys of later parts."""


class Interpreter:
    """State of one transform."""

    def __init__(self, captured: fx.Graph, cut: Cut, seeds: dict[fx.Node, Mark], sites: Sequence[FoundSite]) -> None:
        self.builder = Builder(captured)
        self.layout = StageOrder()
        self.joins: list[tuple[Join, fx.Node | None]] = []
        """Joins, and the whole node that needs one; what nothing reads after all is no join."""
        self.whole_collectives: list[fx.Node] = []
        """All-reduces of all tokens at once."""
        self._cut, self._seeds = cut, seeds
        self._slices = Slices(self.builder)
        self._values: dict[fx.Node, Value] = {}
        self._wholes: dict[fx.Node, fx.Node] = {}
        spans = [AxisRange(cut.length, *cut.bounds[part : part + 2]) for part in range(cut.num_parts)]
        self._copiers = [Copier(self.builder, self._slices, {_AXIS: span}) for span in spans]
        self._attention = AttentionParts(self.builder, self._slices, cut, self._values.__getitem__, self._whole)
        self._blocks: dict[fx.Node, FoundSite] = {}
        self._inside: dict[fx.Node, fx.Node] = {}
        for found in sites:
            self._find_block(found)
        self._num_left = sum(is_call(node, STARTS) for node in captured.nodes)
        self._last_waits: set[fx.Node] = set()
        self._stage = 0

    def _find_block(self, found: FoundSite) -> None:
        if isinstance(found.structure, AttentionNodes) and self._cut.name == "sequence":
            output, nodes = found.structure.form.output, found.structure.interior
        elif isinstance(found.structure, Experts):
            output, nodes = found.structure.output, found.structure.nodes
        else:
            return
        if any(node in self._inside for node in nodes):
            return
        if any(user not in nodes for node in nodes if node is not output for user in node.users):
            return  # such as scores that a sink's scale is made of besides: they are needed by themselves
        self._blocks[output] = found
        self._inside.update((node, output) for node in nodes if node is not output)

    # --- one node ---------------------------------------------------------------------------------------------------

    def visit(self, node: fx.Node) -> None:
        """Make what stands for a node in the new graph."""
        if node in self._inside:
            return
        begun = len(self.builder.made)
        if node in self._blocks:
            value = self._block(node)
        else:
            value = self._computed(node)
        self._values[node] = value
        place = (_LAST if changes_input(node) else self._stage, SHARED)
        for made in self.builder.made[begun:]:
            self.layout.places.setdefault(made, place)
        self._note_collective(node, value)

    def _computed(self, node: fx.Node) -> Value:
        if node.op == "output":
            return self._output(node)
        if node.op != "call_function":
            made = self.builder.copied(node, lambda each: each)
            self._wholes[node] = made
            return self._seeded(made, self._seeds[node]) if node in self._seeds else made
        if is_call(node, frozenset({aten.sym_size.int})) and isinstance(self._values[node.args[0]], Parts):  # type: ignore[index]
            return self.builder.size(_symbol(node))  # type: ignore[return-value]
        if is_call(node, frozenset({aten.slice.Tensor})):
            source = self._values[node.args[0]]  # type: ignore[index]
            taken = self._slices.taken(node, source, self._cut) if isinstance(source, Parts) else None
            if isinstance(taken, fx.Node):
                self._wholes[node] = taken
            if taken is not None:
                return taken
        if is_call(node, frozenset({aten.index_put.default})) and self._cut.name == "sequence":
            written = self._attention.caches.write(node)
            if written is not None:
                self._wholes[node] = written
                return written
        mark, joined = self._mark(node)
        if mark is not None:
            try:
                nodes = tuple(self._part(node, index, joined) for index in range(self._cut.num_parts))
            except NotCopied:
                return self._as_whole(node)
            if joined and self._num_left:
                self.joins.append((Join(node.name, module_of(node), BARRIER), None))
            return Parts(nodes, mark)
        return self._as_whole(node)

    def _seeded(self, made: fx.Node, mark: Mark) -> Parts:
        bounds = self._cut.bounds
        return Parts(tuple(self._slices.of(made, mark, a, b, self._cut.length) for a, b in pairwise(bounds)), mark)

    def _part(self, node: fx.Node, index: int, joined: frozenset[Place]) -> fx.Node:
        begun = len(self.builder.made)
        wholes = {each for place, each in operands(node) if place in joined}

        def read(each: fx.Node) -> Copied:
            value = self._values[each]
            if isinstance(value, Parts) and each not in wholes:
                return Copied(value.nodes[index], {_AXIS: value.mark})
            return Copied(self._whole(each))

        made = self._copiers[index].copy(node, read)
        if _AXIS not in made.marks:
            raise NotCopied(node, "the axis is lost")
        self._place(begun, index)
        return made.node

    def _place(self, begun: int, part: int) -> None:
        """Nodes made since `begun` belong to a part: what several of them read does not, and is among earlier ones."""
        for each in self.builder.made[begun:]:
            self.layout.places.setdefault(each, (self._stage, part))

    def _mark(self, node: fx.Node) -> tuple[Mark | None, frozenset[Place]]:
        """Place of the axis in a node that is local to it, and the operands that have to be joined for that."""
        found: Mark | None = None
        joined: set[Place] = set()
        # Results of several tensors stay in parts as they are; whoever reads one of them may join it.
        late = not self._num_left and not self._reads_last(node) and node.target is not operator.getitem
        for place, each in operands(node):
            value = self._values[each]
            if not isinstance(value, Parts):
                continue
            moved = follow(node, place, value.mark, self._cut.length)
            if late or moved.mark is None or not moved.is_local or found not in (None, moved.mark):
                joined.add(place)
            else:
                found = moved.mark
        return found, frozenset(joined)

    def _reads_last(self, node: fx.Node) -> bool:
        """True for what reads a result of the last collective, which a part may do while another's is in flight."""
        return bool(self._last_waits.intersection(node.all_input_nodes))

    def _as_whole(self, node: fx.Node) -> fx.Node:
        parts = [each for each in node.all_input_nodes if isinstance(self._values[each], Parts)]
        made = self.builder.copied(node, self._whole)
        if parts and self._num_left:
            self.joins.append((Join(node.name, module_of(node), BARRIER), made))
        self._wholes[node] = made
        return made

    def _whole(self, node: fx.Node) -> fx.Node:
        """A value as one node; parts are joined, once."""
        if node not in self._wholes:
            value = self._values[node]
            if isinstance(value, Parts):
                lengths = [self._cut.part(part) for part in range(self._cut.num_parts)]
                value = self.builder.joined(value.nodes, value.mark, lengths, node)
            self._wholes[node] = value
        return self._wholes[node]

    def _output(self, node: fx.Node) -> fx.Node:
        made: fx.Node = self.builder.graph.output(fx.map_arg(node.args[0], self._whole))
        made.meta.update(node.meta)
        self.builder.made.append(made)
        self.layout.places[made] = (2 * _LAST, SHARED)
        return made

    # --- blocks, collectives ----------------------------------------------------------------------------------------

    def _block(self, node: fx.Node) -> Value:
        found = self._blocks[node]
        begun = len(self.builder.made)
        try:
            if isinstance(found.structure, AttentionNodes):
                code = self._attention.reason(found.structure)
                value = self._attention.parts(found.structure)
                if code:
                    self.joins.append((Join(node.name, found.site.module, code), None))
            else:
                assert isinstance(found.structure, Experts)
                value = mixture_parts(
                    self.builder, self._slices, self._cut, self._values.__getitem__, self._whole, found.structure
                )
        except NotCopied:
            return self._unblocked(node)
        self._place_by_part(begun, value)
        return value

    def _place_by_part(self, begun: int, value: Parts) -> None:
        """Nodes that lead to one part alone are that part's."""
        fresh = set(self.builder.made[begun:])
        owners: dict[fx.Node, set[int]] = {}
        for part, node in enumerate(value.nodes):
            pending = [node]
            while pending:
                each = pending.pop()
                if each in fresh and part not in owners.setdefault(each, set()):
                    owners[each].add(part)
                    pending.extend(each.all_input_nodes)
        for each, parts in owners.items():
            self.layout.places.setdefault(each, (self._stage, min(parts)))

    def _unblocked(self, node: fx.Node) -> Value:
        """The nodes of a block, each by itself."""
        inside = [each for each, output in self._inside.items() if output is node]
        del self._blocks[node]
        for each in inside:
            del self._inside[each]
        for each in (each for each in node.graph.nodes if each in set(inside)):
            self.visit(each)
        return self._computed(node)

    def _note_collective(self, node: fx.Node, value: Value) -> None:
        if is_call(node, STARTS):
            self._num_left -= 1
            if not isinstance(value, Parts):
                self.whole_collectives.append(node)
            else:
                self.layout.starts.append(value.nodes)
                self._stage += 1
                if not self._num_left:
                    self._last_waits.add(node)
        elif is_call(node, WAIT) and isinstance(value, Parts):
            source = self._values[node.args[0]]  # type: ignore[index]
            assert isinstance(source, Parts)
            self.layout.waits.update(zip(source.nodes, value.nodes, strict=True))
            if node.args[0] in self._last_waits:
                self._last_waits.add(node)
                self._last_waits.update(user for user in node.users if user.target in _VIEWED)


_VIEWED = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


def _symbol(node: fx.Node) -> Size:
    value = node.meta["val"]
    return value if isinstance(value, int) else size_of(value)


def changes_input(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
