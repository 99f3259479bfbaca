"""Rules that are nothing but overlap, which exist in tests alone; see `toys` for the others.

row_halves      a variant of a whole graph, of whatever size: every operation on rows runs for each half of the rows,
                one half's all-reduce under the other's computation. Other rules rewrite the sites of the halves
joined_halves   the same with an operator of its own, which joins the halves in the arena of the group
fetched_ahead   `x * w` of weights that a copy engine fetches into symmetric memory a layer ahead
"""

from __future__ import annotations

import copy
import json
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.fx as fx
from torch import Tensor

from tests.house.toys import Shape, estimate
from weaveopt.fabrics.arena import transport
from weaveopt.graph.facts import count_tokens, groups_in, module_of
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.splice import call_after, current, erase_dead, fake_mode_of, replace_uses
from weaveopt.records.candidate import Candidate, Fabric, Rejection
from weaveopt.records.memory import Buffer, Lifetime
from weaveopt.records.order import Order
from weaveopt.records.site import Site, TokenCounts
from weaveopt.records.task import Stream, Task
from weaveopt.rule import (
    BufferRequest,
    CapturedGraph,
    Chosen,
    Context,
    Exposure,
    FoundSite,
    Memory,
    Placement,
    Proposal,
)

aten = torch.ops.aten
_library = torch.library.Library("house", "FRAGMENT")

# --- a variant of a whole graph ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowHalves:
    """Knows graphs of operations that are local to rows: every input with as many rows as tokens is cut in two."""

    refuses: bool = False
    name: str = "row_halves"

    def variants(self, captured: CapturedGraph, exposure: Exposure, context: Context) -> Sequence[CapturedGraph]:
        if exposure.us <= 0.0 or self.refuses:
            why = Rejection("nothing_exposed", "no communication of the graph is exposed")
            return (replace(captured, variant=self.name, rejections=(why,)),)
        halved = _Halved(captured)
        rows = captured.tokens if captured.symbolic_tokens is None else str(captured.symbolic_tokens)
        parameters = (("cut", f"{rows} in two"),)
        return (
            replace(captured, graph=halved.graph, variant=self.name, parameters=parameters, order=Order(halved.order)),
        )


class _Halved:
    """Builds the graph: stages between collectives, each for the first half and then for the second."""

    def __init__(self, captured: CapturedGraph) -> None:
        self.graph = fx.Graph()
        self.graph._codegen = copy.copy(captured.graph._codegen)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._halves: tuple[dict[fx.Node, fx.Node | int], dict[fx.Node, fx.Node | int]] = ({}, {})
        self._cut_inputs(captured)
        stages: list[list[fx.Node]] = [[]]
        for node in captured.graph.nodes:
            if node.op == "call_function":
                stages[-1].append(node)
                if "_c10d_functional" in str(node.target) and "wait" not in str(node.target):
                    stages.append([])
        starts: list[str] = []
        waits: list[str] = []
        for stage in stages:
            for half in self._halves:
                for node in stage:
                    args = fx.map_arg(node.args, lambda n, half=half: half[n])
                    half[node] = made = self._call(node.target, args, node)
                    if "_c10d_functional" in str(node.target):
                        (waits if "wait" in str(node.target) else starts).append(made.name)
        # Each wait comes after the other half's next start, which what lies between them precedes.
        self.order = tuple(zip(waits, starts[1:], strict=False))
        output = captured.graph.output_node()
        self.graph.output(fx.map_arg(output.args[0], self._joined)).meta.update(output.meta)
        self.graph.lint()

    def _cut_inputs(self, captured: CapturedGraph) -> None:
        inputs = captured.graph.find_nodes(op="placeholder")
        for node in inputs:
            self._copies[node] = self.graph.node_copy(node)
        count = captured.symbolic_tokens
        whole: fx.Node | int = captured.tokens
        if count is not None:
            whole = next(self._copies[n] for n in inputs if str(n.meta["val"]) == str(count))
        first = self._call(operator.floordiv, (whole, 2), None) if isinstance(whole, fx.Node) else whole // 2
        second = self._call(operator.sub, (whole, first), None) if isinstance(whole, fx.Node) else whole - first
        for node in inputs:
            value, new = node.meta["val"], self._copies[node]
            for half, (begin, end, size) in zip(self._halves, ((0, first, first), (first, whole, second)), strict=True):
                half[node] = new
                if not isinstance(value, Tensor):
                    half[node] = size if str(value) == str(count) else new
                elif value.dim() == 2 and str(value.shape[0]) == str(captured.tokens if count is None else count):
                    half[node] = self._call(aten.slice.Tensor, (new, 0, begin, end), node)

    def _call(self, target: object, args: tuple[object, ...], like: fx.Node | None) -> fx.Node:
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        if like is not None:
            node.meta.update({key: each for key, each in like.meta.items() if key != "val"})
        mode = fake_mode_of(self.graph)
        assert mode is not None
        with mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))  # type: ignore[operator]
        return node

    def _joined(self, node: fx.Node) -> fx.Node:
        if node in self._copies:
            return self._copies[node]
        return self._call(aten.cat.default, ([half[node] for half in self._halves],), node)


# --- a variant whose own operators need memory ------------------------------------------------------------------------

_library.define("joined(Tensor a, Tensor b, str call) -> Tensor")
JOINED = "house joined"


def _join(a: Tensor, b: Tensor, call: str) -> Tensor:
    known = json.loads(call)
    arena = transport(Fabric.SHM).of(known["group"])
    rows = arena.tensor(arena.transient_begin + known[JOINED], (len(a) + len(b), *a.shape[1:]), a.dtype)
    rows[: len(a)], rows[len(a) :] = a, b
    result = rows.clone()
    rows.fill_(float("nan"))  # whoever reads it after the call reads nonsense
    return result


_library.impl("joined", _join, "CPU")
torch.library.register_fake("house::joined", lambda a, b, call: torch.cat([a, b]), lib=_library)


class Failing(RowHalves):
    """A rule with a fault."""

    def variants(self, captured: CapturedGraph, exposure: Exposure, context: Context) -> NoReturn:
        raise KeyError("mul_10")


@dataclass(frozen=True)
class JoinedHalves(RowHalves):
    """Variants of graphs of one size; `settle_graph` gives its operators the offsets of their memory."""

    name: str = "joined_halves"

    def variants(self, captured: CapturedGraph, exposure: Exposure, context: Context) -> Sequence[CapturedGraph]:
        found = super().variants(captured, exposure, context)
        for each in found:
            for node in each.graph.find_nodes(op="call_function", target=aten.cat.default):
                node.target, node.args = torch.ops.house.joined.default, (*node.args[0], "")
        return found

    def graph_memory(self, variant: CapturedGraph, context: Context) -> Mapping[str, tuple[Fabric, Memory]]:
        values = [tensor_of(node) for node in _joins(variant)]
        num_bytes = max(value.numel() * value.dtype.itemsize for value in values if value is not None)
        memory = Memory((BufferRequest(Buffer(JOINED, num_bytes)),))
        return {groups_in(variant.graph)[0]: (Fabric.SHM, memory)}

    def settle_graph(
        self, variant: CapturedGraph, chosen: Sequence[Chosen], placements: Mapping[str, Placement], context: Context
    ) -> None:
        [(group, placement)] = placements.items()
        call = json.dumps({JOINED: placement.buffers[JOINED].offset_in_zone, "group": group})
        for node in _joins(variant):
            node.args = (*node.args[:2], call)


def _joins(variant: CapturedGraph) -> list[fx.Node]:
    return variant.graph.find_nodes(op="call_function", target=torch.ops.house.joined.default)


# --- work begun a layer ahead -----------------------------------------------------------------------------------------

_library.define("fetch_begin(Tensor w, str call) -> Tensor")
_library.define("fetch_end(Tensor x, Tensor w, Tensor started, str call) -> Tensor")
FETCHED, CHANNEL = "house fetched", "house copies"
_in_flight: dict[int, threading.Thread] = {}
begun: list[str] = []
"""Begins and ends of this process, in order."""


def _buffer(w: Tensor, call: str) -> Tensor:
    known = json.loads(call)
    arena = transport(Fabric.SHM).of(known["group"])
    return arena.tensor(arena.transient_begin + known[FETCHED], tuple(w.shape), w.dtype)


def _begin(w: Tensor, call: str) -> Tensor:
    """A thread copies `w` into the arena; the result names the copy."""
    started = torch.tensor([len(begun)])
    thread = threading.Thread(target=_buffer(w, call).copy_, args=(w,))
    _in_flight[len(begun)] = thread
    begun.append("begin")
    thread.start()
    return started


def _end(x: Tensor, w: Tensor, started: Tensor, call: str) -> Tensor:
    _in_flight.pop(int(started)).join()
    begun.append("end")
    fetched = _buffer(w, call)
    result = x * fetched
    fetched.fill_(float("nan"))  # whoever reads it after the call reads nonsense
    return result


_library.impl("fetch_begin", _begin, "CPU")
_library.impl("fetch_end", _end, "CPU")
torch.library.register_fake(
    "house::fetch_begin", lambda w, call: torch.empty(1, dtype=torch.int64, device=w.device), lib=_library
)
torch.library.register_fake("house::fetch_end", lambda x, w, started, call: torch.empty_like(x), lib=_library)


class ScaleMatcher:
    """`x * w` of rows and an input of one row, behind some GEMM."""

    kind = "scaled_rows"

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        found = []
        for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            x, w = node.args
            if not (isinstance(x, fx.Node) and isinstance(w, fx.Node) and w.op == "placeholder"):
                continue
            value = tensor_of(node)
            assert value is not None
            hint, most = count_tokens(value, context.config.max_tokens)
            facts = Shape(hint, int(value.shape[-1]), groups_in(graph)[0])
            site = Site(
                node.name, self.kind, (facts.group,), module_of(node), (), "x * w", TokenCounts(hint, most=most),
                facts.values(),
            )  # fmt: skip
            found.append(FoundSite(site, frozenset({node}), facts, (x, w, node), token_value=node))
        return tuple(found)


@dataclass(frozen=True)
class FetchedAhead:
    """`fetch_us`: time of the copy, which begins behind the graph's first GEMM."""

    fetch_us: float
    name: str = "fetched_ahead"
    kinds: frozenset[str] = frozenset({"scaled_rows"})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        tasks = (
            Task(self.fetch_us, Stream.COPIES, name="fetch", begins_after=_first_gemm(found).name),
            Task(0.5, waits_for=(0,), name="kernel"),
        )
        candidate = Candidate(self.name, Fabric.SHM, "", (), estimate(self.fetch_us + 0.5))
        return (Proposal(candidate, found.nodes, tasks=tasks),)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        _, w, node = _parts(chosen.found)
        value = tensor_of(w)
        assert value is not None
        buffer = Buffer(FETCHED, value.numel() * value.dtype.itemsize, Lifetime.UNTIL_READ)
        asked = BufferRequest(buffer, last_reader=node, first_writer=_first_gemm(chosen.found))
        return Memory((asked,), CHANNEL)

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        x, w, node = _parts(chosen.found)
        call = json.dumps({FETCHED: placement.buffers[FETCHED].offset_in_zone, "group": chosen.found.site.groups[0]})
        started = call_after(
            graph, _first_gemm(chosen.found), torch.ops.house.fetch_begin.default, (w, call), like=node
        )
        args = (current(x), w, started, call)
        replace_uses(graph, node, call_after(graph, node, torch.ops.house.fetch_end.default, args, like=node))
        erase_dead(graph, chosen.proposal.consumes)
        return ()


def _parts(found: FoundSite) -> tuple[fx.Node, fx.Node, fx.Node]:
    assert isinstance(found.structure, tuple)
    x, w, node = found.structure
    return x, w, node


def _first_gemm(found: FoundSite) -> fx.Node:
    graph = _parts(found)[2].graph
    return next(node for node in graph.nodes if is_call(node, frozenset({aten.mm.default})))
