"""Inductor's lowering: which values of a graph are stored, and which only live in the loops of those that read them.

A point-wise operation is inlined into every reader until something needs it in memory: a library kernel, an output,
a reduction, several readers of what is costly to compute again. Each stored value is one loop nest, which reads the
stored values under it. Loops over the same elements are joined later (`weaveopt.inductor.fused`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch.fx as fx

from weaveopt.graph.values import (
    argument,
    bytes_of,
    has_rows,
    layout_of,
    num_elements,
    shape_of,
    tensor_inputs,
    tensors_of,
    touched_bytes,
)
from weaveopt.inductor.calls import ATTENTION, kind_of, name_of
from weaveopt.inductor.loops import (
    GATHERS,
    HEAVY,
    IN_LOOPS,
    MAX_OPS,
    MAX_READS,
    MAX_READS_OF_REUSED,
    REDUCTIONS,
    SCATTERS,
    UNROLLED,
    LoweredStep,
    Reads,
    Value,
    View,
    dies_in,
    is_alias,
    is_masked,
    is_written_back,
)


class GraphLowering:
    """Walks a graph's nodes in order and collects `steps`. `device` is the machine's, whatever the fake tensors' is."""

    def __init__(self, device: str) -> None:
        self.steps: list[LoweredStep] = []
        self.escaping: set[int] = set()
        """Stored values that outlive the graph."""
        self.sizes: dict[int, int] = {}
        """Value -> bytes."""
        self._elements: dict[int, int] = {}
        self.device = device
        self._views: dict[fx.Node, View] = {}
        self._num_values = 0
        self._made_by: dict[int, fx.Node] = {}

    def scaling(self, tokens: int) -> frozenset[int]:
        """Values that grow with the token count, which is `tokens` in this graph."""
        return frozenset(
            number
            for number, node in self._made_by.items()
            if any(has_rows(value, tokens) for value in tensors_of(node))
        )

    def keep(self, node: fx.Node) -> None:
        """A value that is read later, by whoever: it has to be in memory."""
        if node in self._views:
            self.escaping.add(self._store(self._views[node].value))

    def lower(self, node: fx.Node) -> None:
        """One node that belongs to no site."""
        if node.op == "output":
            for each in node.all_input_nodes:
                self.keep(each)
        elif node.op != "call_function":
            self.hold(node)
        elif is_alias(node.target):
            self._alias(node)
        elif kind_of(node.target) is not None:
            self.call(node)
        elif name_of(node.target)[1] == "copy_":
            self._copy_into(node)
        elif tensors_of(node):
            self._lower_loops(node)
        if node.op == "call_function":
            self._store_what_is_reused(node)

    def hold(self, node: fx.Node) -> None:
        """A value that is in memory already: an input, or what a site or a call makes."""
        if tensors_of(node):
            self._views[node] = self._whole(self._new(node, stored=True))

    def call(self, node: fx.Node) -> None:
        """A library's kernel, which reads and writes memory."""
        copied = kind_of(node.target) == ATTENTION
        masks = {argument(node, name) for name in ("attn_mask", "attn_bias")} if copied else set()
        reads: Reads = {}
        for each, value in tensor_inputs(node):
            view = self._views.get(each)
            if view is None:
                continue
            if copied and each not in masks and view.num_bytes < bytes_of(value):
                # Keys and values that were repeated by a view are written out: the kernel wants them dense.
                view = self._whole(self._loops(each, [view], 1))
            reads[(self._store(view.value), view.layout)] = view.num_bytes
        self.hold(node)
        made = (self._views[node].value.number,) if node in self._views else ()
        self.steps.append(LoweredStep(node, reads, made, 0, 0, 1, call=True))

    def site(self, node: fx.Node, inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> None:
        """A site as one call: what it reads is stored (but for weights' vectors, which its kernel computes again)."""
        reads: Reads = {}
        for each in inputs:
            view = self._views.get(each)
            if view is not None and any(value.ndim >= 2 for value in tensors_of(each)):
                reads[(self._store(view.value), view.layout)] = view.num_bytes
        made = []
        for each in outputs:
            self.hold(each)
            if each in self._views:
                made.append(self._views[each].value.number)
        self.steps.append(LoweredStep(node, reads, tuple(made), 0, 0, 1, call=True))

    def _new(self, node: fx.Node, stored: bool) -> Value:
        self._num_values += 1
        self._made_by[self._num_values] = node
        values = tensors_of(node)
        num_bytes = self.sizes[self._num_values] = sum(bytes_of(value) for value in values)
        elements = self._elements[self._num_values] = max(map(num_elements, values), default=0)
        return Value(self._num_values, num_bytes, elements, node, stored)

    def _whole(self, value: Value) -> View:
        return View(value, None, value.num_bytes)

    def _alias(self, node: fx.Node) -> None:
        source = next((each for each in node.all_input_nodes if each in self._views), None)
        values = tensors_of(node)
        if source is None:
            return
        view = self._views[source]
        if len(values) != 1:
            self._views[node] = view
            return
        layout = layout_of(values[0])
        touched = touched_bytes(values[0], layout)
        # A view of all elements in their order reads the same; of another one, only its share.
        same = view.layout is None and touched == bytes_of(values[0]) == view.num_bytes and values[0].is_contiguous()
        self._views[node] = view if same else View(view.value, layout, min(touched, view.num_bytes))

    def _reads_of(self, view: View) -> Reads:
        value = view.value
        if value.stored:
            return {(value.number, view.layout): view.num_bytes}
        if view.layout is None:
            return value.reads
        share = min(1.0, view.num_bytes / value.num_bytes) if value.num_bytes else 1.0
        repeated = 0 in view.layout[2]
        reads: Reads = {}
        for (number, which), size in value.reads.items():
            if size < value.elements and not repeated:
                reads[number, which] = size  # one number for many results: a part of them reads it too
            else:
                reads[number, (which, view.layout)] = math.ceil(size * share)
        return reads

    def _loops(self, node: fx.Node, inputs: Iterable[View], reduced: int) -> Value:
        """`node` as loops over what it reads, not stored yet."""
        made = self._new(node, stored=False)
        name = name_of(node.target)[1]
        made.reduced, made.heavy, made.num_ops = reduced, name in HEAVY, 1
        for view in inputs:
            made.reads.update(self._reads_of(view))
            made.num_ops += 1 if view.value.stored else view.value.num_ops
            made.heavy = made.heavy or (view.value.heavy and not view.value.stored)
        return made

    def _lower_loops(self, node: fx.Node) -> None:
        name = name_of(node.target)[1]
        inputs = [self._views[each] for each in node.all_input_nodes if each in self._views]
        if name in SCATTERS and inputs and not is_masked(node):
            if name not in IN_LOOPS or is_written_back(node):
                self._scatter(node)
                return
            if name_of(node.all_input_nodes[0].target)[1] == "empty":
                inputs = inputs[1:]
        if name in ("cat", "stack") and self.device == "cpu" and inputs:
            self._concatenate(node, inputs)
            return
        if name == "empty" or name.startswith("new_empty"):
            self.hold(node)
            return
        if name.endswith("_like"):
            inputs = []
        if name in GATHERS and inputs:
            # As many of the table's elements as there are results, at places that no other node reads.
            table, wanted = inputs[0], bytes_of(tensors_of(node)[0])
            inputs[0] = View(table.value, (0, (self._num_values,), ()), min(table.num_bytes, wanted))
        reduced = 1
        if name in REDUCTIONS and inputs:
            results = max(num_elements(tensors_of(node)[0]), 1)
            reduced = max(1, num_elements(tensors_of(node.all_input_nodes[0])[0]) // results)
        unrolled = 1 < reduced < UNROLLED
        made = self._loops(node, inputs, 1 if unrolled else reduced)
        if unrolled:
            made.num_ops *= reduced
        self._views[node] = self._whole(made)
        if made.reduced > 1 or is_masked(node) or name.startswith("native_") or name in ("_softmax", "_log_softmax"):
            self._store(made)

    def _concatenate(self, node: fx.Node, inputs: list[View]) -> None:
        """Lower a concatenation; on CPUs each part is written in place, by separate loops."""
        made = self._new(node, stored=True)
        parts = argument(node, "tensors")
        for each in parts if isinstance(parts, list | tuple) else ():
            if isinstance(each, fx.Node) and each in self._views:
                loops = self._loops(each, [self._views[each]], 1)
                self._write(loops, into=made.number, num_bytes=loops.num_bytes)
        self._views[node] = self._whole(made)

    def _scatter(self, node: fx.Node) -> None:
        """Lower a scatter: in place if the base is not read later (a cache that is written back), else after a copy
        of it."""
        base = node.all_input_nodes[0]
        if not self._views[base].value.stored or not dies_in(base, node):
            copied = self._new(base, stored=False)
            copied.reads = dict(self._reads_of(self._views[base]))
            into = self._store(copied)
        else:
            copied, into = self._views[base].value, self._views[base].value.number
        inputs = [self._views[each] for each in node.all_input_nodes[1:] if each in self._views]
        loops = self._loops(node, inputs, 1)
        source = next((v for n in ("values", "source", "src") if (v := argument(node, n)) is not None), None)
        values = tensors_of(source) if isinstance(source, fx.Node) else ()
        if values:
            loops.elements, loops.num_bytes = num_elements(values[0]), bytes_of(values[0])
        self._write(loops, into=into, num_bytes=loops.num_bytes, scattered=True)
        self._views[node] = self._whole(copied)

    def _copy_into(self, node: fx.Node) -> None:
        target, source = node.args[0], node.args[1]
        if not (isinstance(target, fx.Node) and isinstance(source, fx.Node) and source in self._views):
            return
        into, view = self._views[target].value, self._views[source]
        if view.value is not into:
            self._write(self._loops(source, [view], 1), into=into.number, num_bytes=view.num_bytes)
        self.escaping.add(into.number)

    def _store_what_is_reused(self, node: fx.Node) -> None:
        view = self._views.get(node)
        if view is None or view.value.stored:
            return
        value, users = view.value, list(node.users)
        large = value.num_ops > MAX_OPS.get(self.device, 30)
        if large or len(value.reads) > MAX_READS.get(self.device, 8):
            self._store(value)
        elif len(users) > 1:
            costly = len(value.reads) > MAX_READS_OF_REUSED or (value.heavy and self.device == "cpu")
            called = len(value.reads) > 1 and any(kind_of(user.target) is not None for user in users)
            if costly or called or any(user.op == "output" for user in users):
                self._store(value)

    def _store(self, value: Value) -> int:
        if not value.stored:
            self._write(value, into=value.number, num_bytes=value.num_bytes)
            value.stored, value.reads = True, {}
        return value.number

    def _write(self, loops: Value, into: int, num_bytes: int, scattered: bool = False) -> None:
        in_order = loops.reduced == 1 and all(
            layout is None and self._elements[number] == loops.elements for number, layout in loops.reads
        )
        rows = (loops.elements,) if in_order else _loops_over(loops.node)
        self.steps.append(
            LoweredStep(
                loops.node, loops.reads, (into,), num_bytes, loops.elements, loops.reduced, False, scattered, rows
            )
        )


def _loops_over(node: fx.Node) -> tuple[int, ...]:
    values = tensors_of(node)
    return tuple(size for size in shape_of(values[0]) if size != 1) if values else ()
