"""Rules that exist in tests alone, one of each kind. None of them is known to any other file.

fast_tanh       a local rewrite: `tanh(x * c)` in one operation
library_sum     a second candidate at reductions: the library's all-reduce and one kernel after it
kept_relu       a block with buffers of different lifetimes: `relu(all_reduce(x))` through symmetric memory
two_halves      a variant of a whole graph: rows in two halves, one's all-reduce overlaps with the other's GEMM
"""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from tests.graphs.uncertain import estimate_of
from weaveopt.fabrics.arena import transport
from weaveopt.fabrics.topology import process_group
from weaveopt.graph.facts import count_tokens, group_of, module_of
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.splice import call_after, current, erase_dead, last_of, replace_uses
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Values
from weaveopt.records.memory import Buffer, Lifetime
from weaveopt.records.site import Site, TokenCounts
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
from weaveopt.sites.reduction.matcher import Reduction, ReductionFacts

aten = torch.ops.aten
_library = torch.library.Library("house", "FRAGMENT")


@dataclass(frozen=True)
class Shape:
    """Facts of the toys' own sites."""

    rows: int
    columns: int
    group: str = ""

    def values(self) -> Values:
        return (("rows", self.rows), ("columns", self.columns))


def estimate(us: float, name: str = "toy") -> Estimate:
    return estimate_of(0.01, (name, us))


# --- a local rewrite ------------------------------------------------------------------------------------------------

_library.define("scaled_tanh(Tensor x, float scale) -> Tensor")
_library.impl("scaled_tanh", lambda x, scale: torch.tanh(x * scale), "CompositeExplicitAutograd")
torch.library.register_fake("house::scaled_tanh", lambda x, scale: torch.empty_like(x), lib=_library)


class TanhMatcher:
    """`tanh(x * c)` of two dimensions; communicates in no group."""

    kind = "tanh"

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        found = []
        for node in graph.nodes:
            scaled = node.args[0] if is_call(node, frozenset({aten.tanh.default})) else None
            if isinstance(scaled, fx.Node) and is_call(scaled, frozenset({aten.mul.Tensor})) and len(scaled.users) == 1:
                value = tensor_of(node)
                assert value is not None
                hint, most = count_tokens(value, context.config.max_tokens)
                facts = Shape(hint, int(value.shape[-1]))
                site = Site(
                    node.name, self.kind, (), module_of(node), (), "tanh(x * c)", TokenCounts(hint, most=most),
                    facts.values(),
                )  # fmt: skip
                found.append(FoundSite(site, frozenset({node, scaled}), facts, (scaled, node), token_value=node))
        return tuple(found)


@dataclass(frozen=True)
class FastTanh:
    """`us`: what the operation is said to take, whatever its size."""

    us: float = 0.0
    name: str = "fast_tanh"
    kinds: frozenset[str] = frozenset({"tanh"})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        return (Proposal(Candidate(self.name, estimate=estimate(self.us)), found.nodes),)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return None

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        assert isinstance(chosen.found.structure, tuple) and not placement.buffers
        scaled, node = chosen.found.structure
        x, factor = scaled.args
        fused = call_after(graph, node, torch.ops.house.scaled_tanh.default, (current(x), factor), like=node)
        replace_uses(graph, node, fused)
        erase_dead(graph, chosen.proposal.consumes)
        return ()


# --- a second candidate at reductions ---------------------------------------------------------------------------------

_library.define("sum_norm(Tensor partial, Tensor residual, Tensor weight, float eps, str group) -> (Tensor, Tensor)")


def _sum_norm(partial: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> tuple[Tensor, Tensor]:
    total = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group(group))
    total = total.view(residual.shape).float() + residual.float()
    normalized = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (normalized * weight.float()).to(partial.dtype), total.to(partial.dtype)


_library.impl("sum_norm", _sum_norm, "CPU")
torch.library.register_fake(
    "house::sum_norm", lambda partial, residual, *_: (torch.empty_like(residual), torch.empty_like(residual)),
    lib=_library,
)  # fmt: skip


@dataclass(frozen=True)
class LibrarySum:
    """Takes `fixed_us`, whatever the token count; knows sums with a residual, an RMS norm and a weight alone."""

    fixed_us: float
    name: str = "library_sum"
    kinds: frozenset[str] = frozenset({"reduction"})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, structure = found.facts, found.structure
        assert isinstance(facts, ReductionFacts) and isinstance(structure, Reduction)
        reduced = structure.reduced
        fits = len(reduced.residuals) == len(reduced.collectives) == 1 and reduced.norm is not None
        reasons = () if fits else (Rejection("form_not_known", "the toy knows one form"),)
        candidate = Candidate(self.name, Fabric.LIBRARY, "flat", (), estimate(self.fixed_us), reasons)
        return (Proposal(candidate, structure.interior),)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return None

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        structure = chosen.found.structure
        assert isinstance(structure, Reduction) and structure.reduced.norm is not None
        reduced, norm = structure.reduced, structure.reduced.norm
        args = tuple(map(current, (reduced.partials[0], reduced.residuals[0], norm.weight)))
        position = last_of(graph, [each for each in args if isinstance(each, fx.Node)])
        rest = (float(norm.form.eps), chosen.found.site.groups[0])
        op = torch.ops.house.sum_norm.default
        fused = call_after(graph, position, op, (*args, *rest), like=reduced.collectives[0])
        for index, old in ((0, norm.output), (1, reduced.total)):
            result = call_after(graph, fused, operator.getitem, (fused, index), like=old)
            replace_uses(graph, old, result)
        erase_dead(graph, chosen.proposal.consumes)
        return ("library_sum: the sum is not rounded before the residual is added",)


# --- a block with buffers ---------------------------------------------------------------------------------------------

_library.define("kept_relu(Tensor x, str call) -> Tensor")
COUNT, SCRATCH, RESULT = "house count", "house scratch", "house result"
FILL = 7


def _kept_relu(x: Tensor, call: str) -> Tensor:
    """Through the arena: the sum in the scratch buffer, the result in one of its own, a call counted in a third."""
    known = json.loads(call)
    arena = transport(Fabric.SHM).of(known["group"])
    count = arena.tensor(arena.buffer(COUNT).offset, (1,), torch.int32)
    assert int(count) >= FILL, f"the arena was not filled: {int(count)}"
    count += 1
    scratch, result = (
        arena.tensor(arena.transient_begin + known[name], tuple(x.shape), x.dtype) for name in (SCRATCH, RESULT)
    )
    scratch.copy_(x)
    dist.all_reduce(scratch, group=process_group(known["group"]))
    torch.clamp(scratch, min=0, out=result)
    scratch.fill_(float("nan"))  # whoever reads it after the call reads nonsense
    return result.clone()


_library.impl("kept_relu", _kept_relu, "CPU")
torch.library.register_fake("house::kept_relu", lambda x, call: torch.empty_like(x), lib=_library)


class ReluMatcher:
    """`relu(all_reduce(x))`."""

    kind = "summed_relu"

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        found = []
        for node in graph.nodes:
            wait = node.args[0] if is_call(node, frozenset({aten.relu.default})) else None
            if not isinstance(wait, fx.Node) or len(wait.users) != 1 or "wait_tensor" not in str(wait.target):
                continue
            collective = wait.args[0]
            value = tensor_of(node)
            assert isinstance(collective, fx.Node) and value is not None
            hint, most = count_tokens(value, context.config.max_tokens)
            facts = Shape(hint, int(value.shape[-1]), group_of(collective))
            site = Site(
                node.name, self.kind, (facts.group,), module_of(node), (collective.name,), "relu(all_reduce(x))",
                TokenCounts(hint, most=most), facts.values(),
            )  # fmt: skip
            nodes = frozenset({node, wait, collective})
            found.append(FoundSite(site, nodes, facts, (collective, node), token_value=node))
        return tuple(found)


@dataclass(frozen=True)
class KeptRelu:
    name: str = "kept_relu"
    kinds: frozenset[str] = frozenset({"summed_relu"})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        candidate = Candidate(self.name, Fabric.SHM, "", (), estimate(1.0))
        return (Proposal(candidate, found.nodes),)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        assert isinstance(chosen.found.structure, tuple)
        _, node = chosen.found.structure
        value = tensor_of(node)
        assert value is not None
        num_bytes = value.numel() * value.dtype.itemsize
        return Memory(
            (
                BufferRequest(Buffer(COUNT, 4, Lifetime.ARENA, fill=FILL)),
                BufferRequest(Buffer(SCRATCH, num_bytes)),
                BufferRequest(Buffer(RESULT, num_bytes, Lifetime.UNTIL_READ), last_reader=max(node.users)),
            )
        )

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        assert isinstance(chosen.found.structure, tuple)
        collective, node = chosen.found.structure
        call = {name: placement.buffers[name].offset_in_zone for name in (SCRATCH, RESULT)}
        text = json.dumps({**call, "group": chosen.found.site.groups[0]})
        args = (current(collective.args[0]), text)
        fused = call_after(graph, node, torch.ops.house.kept_relu.default, args, like=node)
        replace_uses(graph, node, fused)
        erase_dead(graph, chosen.proposal.consumes)
        return ()


# --- a variant of a whole graph ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoHalves:
    """Variant of a graph whose first GEMM is followed by an all-reduce: both run in two halves of the rows."""

    name: str = "two_halves"

    def variants(self, captured: CapturedGraph, exposure: Exposure, context: Context) -> Sequence[CapturedGraph]:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(captured.graph, val_map=copies, return_output_node=True)
        assert isinstance(output, tuple)
        value, output_node = output
        graph.output(value).meta.update(output_node.meta)
        graph._codegen = copy.copy(captured.graph._codegen)
        for node in list(graph.nodes):
            if is_call(node, frozenset({torch.ops._c10d_functional.wait_tensor.default})):
                return (self._halved(captured, graph, node),)
        return ()

    def _halved(self, captured: CapturedGraph, graph: fx.Graph, wait: fx.Node) -> CapturedGraph:
        collective = wait.args[0]
        assert isinstance(collective, fx.Node) and isinstance(collective.args[0], fx.Node)
        gemm = collective.args[0]
        made = replace(captured, graph=graph, variant="two_halves")
        rows = tensor_of(gemm)
        if not is_call(gemm, frozenset({aten.mm.default})) or rows is None or rows.shape[0] % 2:
            odd = Rejection("odd_rows", "the rows cannot be halved")
            return replace(made, rejections=(odd,))
        half = rows.shape[0] // 2
        a, b = gemm.args
        position, sums = wait, []
        for start in (0, half):
            part = call_after(graph, position, aten.slice.Tensor, (a, 0, start, start + half), like=gemm)
            product = call_after(graph, part, aten.mm.default, (part, b), like=gemm)
            position = call_after(graph, product, collective.target, (product, *collective.args[1:]), like=collective)
            sums.append(position)
        waits = []
        for each in sums:
            position = call_after(graph, position, wait.target, (each,), like=wait)
            waits.append(position)
        whole = call_after(graph, position, aten.cat.default, (waits,), like=wait)
        replace_uses(graph, wait, whole)
        erase_dead(graph, frozenset({wait, collective, gemm}))
        graph.lint()
        return made
