"""GEMMs of one input as one GEMM: queries, keys and values; gate and up.

Unfused::

    q, k, v = x @ wq^T, x @ wk^T, x @ wv^T

Fused::

    q, k, v = merged_linear(x, [wq, wk, wv]).split(columns, dim=1)

Every GEMM takes time to start and to end, and one with few columns fills few of a GPU's processors: with few rows one
GEMM is faster than three. For that its weights have to be adjacent in memory. They are moved once, before the graph's
first call (`ops.merged_gemm.adjacent`), and stay the model's parameters; weights that cannot be moved are multiplied
one by one, as before, and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise

import torch
import torch.fx as fx
from torch.fx.node import map_arg

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model import Gemm
from weaveopt.graph.pattern import SHAPE_ONLY, is_call
from weaveopt.graph.splice import call_after, current_node, fake_mode_of, last_of, replace_uses
from weaveopt.inductor.calls import GEMM, MEMORY, GemmCall, MemoryCall
from weaveopt.inductor.kernels import KernelContext
from weaveopt.ops.merged_gemm.adjacent import adjoin, num_apart
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term
from weaveopt.records.inductor_hooks import InputHook
from weaveopt.records.site import DTYPE_BYTES, TokenCounts
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.projections.matcher import KIND, ProjectionFacts, Projections

RULE = "merged_gemm"
ALIGNED_BYTES = 16
"""Inductor copies inputs that begin at other addresses, in every call."""
aten = torch.ops.aten
MERGED = torch.ops.weave.merged_linear.default
_VIEWS = SHAPE_ONLY | {aten.permute.default, aten.transpose.int, aten.slice.Tensor}


class MergedGemm:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, structure = _site(found)
        if against := _against(facts):
            return () if usable_only else (Proposal(Candidate(RULE, Fabric.LIBRARY, rejections=against)),)
        surroundings = KernelContext.of(context.machine, context.topologies.values())
        columns = sum(facts.widths)
        gemm = Gemm(tokens.hint, facts.k, columns, "rc addmm" if facts.has_bias else "rc")
        estimate = Estimate((Term(GEMM, surroundings.us_of(GEMM, GemmCall(gemm, facts.dtype))),))
        returned = [
            columns for gemm, columns in zip(structure.gemms, facts.widths, strict=True) if _reaches_output(gemm.node)
        ]
        if returned:
            copied = MemoryCall(2 * tokens.hint * sum(returned) * DTYPE_BYTES[facts.dtype])
            estimate = estimate.plus(Estimate((Term("copy", surroundings.us_of(MEMORY, copied)),)))
        parameters = (("gemms", len(facts.widths)), ("columns", columns))
        candidate = Candidate(RULE, Fabric.LIBRARY, "one GEMM", parameters, estimate)
        return (Proposal(candidate, found.nodes),)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return None

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        facts, structure = _site(chosen.found)
        first = structure.gemms[0]
        x, biases = current_node(first.a), [each.bias for each in structure.gemms if each.bias is not None]
        position = last_of(graph, [x])
        merged = call_after(graph, position, MERGED, (x, list(structure.weights), biases), like=first.node)
        ends = (0, *accumulate(facts.widths))
        for gemm, (begin, end) in zip(structure.gemms, pairwise(ends), strict=True):
            part = call_after(graph, merged, aten.slice.Tensor, (merged, 1, begin, end), like=gemm.node)
            if not _reaches_output(gemm.node) and (values := _values_of_views(graph, gemm.node, part)) is not None:
                for node, value in values.items():
                    node.meta["val"] = value
            else:  # as the GEMM stored it
                part = call_after(
                    graph, part, aten.clone.default, (part,), like=gemm.node,
                    named={"memory_format": torch.contiguous_format},
                )  # fmt: skip
            replace_uses(graph, gemm.node, part)
            graph.erase_node(gemm.node)
        return (f"{RULE}: GEMMs of other sizes sum in another order",)

    def inductor_hooks(self) -> Sequence[InputHook]:
        return (InputHook(MERGED, _adjoin_operands, num_apart),)


def _adjoin_operands(arguments: Sequence[object], are_read: Callable[[], bool]) -> str:
    """Put the weights of a call one after the other, and its biases; returns why not, if so."""
    for operands in arguments[1:]:
        assert isinstance(operands, list | tuple), operands
        tensors = [each for each in operands if isinstance(each, torch.Tensor)]
        if tensors and (why := adjoin(tensors, are_read)):
            return why
    return ""


def _against(facts: ProjectionFacts) -> tuple[Rejection, ...]:
    """Reason against weights or biases of which some would not be aligned."""
    item_bytes, (*before_last, _) = DTYPE_BYTES[facts.dtype], facts.widths
    sizes = [columns * item_bytes * (1 if facts.has_bias else facts.k) for columns in before_last]
    if all(size % ALIGNED_BYTES == 0 for size in sizes):
        return ()
    message = f"weights and biases, one after the other, begin at multiples of {ALIGNED_BYTES} bytes"
    return (Rejection("not_aligned", message, (("columns", " + ".join(map(str, facts.widths))), ("k", facts.k))),)


def _reaches_output(node: fx.Node) -> bool:
    """True if the graph returns the value or a view of it, whose strides the caller sees."""
    return any(user.op == "output" or (is_call(user, _VIEWS) and _reaches_output(user)) for user in node.users)


def _values_of_views(graph: fx.Graph, node: fx.Node, part: fx.Node) -> dict[fx.Node, torch.Tensor] | None:
    """Values of all views of `node` where `part`, which has other strides, takes its place; None if one has none."""
    found = {node: part.meta["val"]}
    with fake_mode_of(graph) or nullcontext():
        for each in _views_of(node):
            try:
                found[each] = each.target(  # type: ignore[operator]
                    *map_arg(each.args, lambda one: found.get(one, one.meta["val"])), **each.kwargs
                )
            except RuntimeError:  # a view of these strides would need a copy
                return None
    del found[node]
    return found


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Views of a node, and views of them."""
    for user in node.users:
        if is_call(user, _VIEWS):
            yield user
            yield from _views_of(user)


def _site(found: FoundSite) -> tuple[ProjectionFacts, Projections]:
    facts, structure = found.facts, found.structure
    assert isinstance(facts, ProjectionFacts) and isinstance(structure, Projections), f"{found.site.id}: no GEMMs"
    return facts, structure
