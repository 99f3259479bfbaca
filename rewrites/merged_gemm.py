"""GEMMs of one input as one GEMM: queries, keys and values; gate and up.

Unfused::

    q, k, v = x @ wq^T, x @ wk^T, x @ wv^T

Fused::

    q, k, v = merged_linear(x, [wq, wk, wv]).split(columns, dim=1)

Every GEMM takes a few microseconds to start and to end, and one with few columns fills few of a GPU's processors: with
few rows the three take two to three times as long as one. Its weights have to lie one after the other for that. They
are moved once, before the graph's first call (`ops.merged_gemm.adjacent`), and stay the model's parameters; weights
that cannot be moved are multiplied one by one, as before, and the report says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model import Gemm
from weaveopt.graph.pattern import SHAPE_ONLY, is_call, tensor_of
from weaveopt.graph.splice import call_after, current, last_of, replace_uses
from weaveopt.graph.values import bytes_of
from weaveopt.inductor.calls import GEMM, MEMORY, GemmCall, MemoryCall, kind_of
from weaveopt.inductor.kernels import KernelContext
from weaveopt.ops.merged_gemm.adjacent import adjoin, num_apart
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Term
from weaveopt.records.inductor_hooks import InputHook
from weaveopt.records.site import TokenCounts
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.projections.matcher import KIND, ProjectionFacts, Projections

RULE = "merged_gemm"
aten = torch.ops.aten
MERGED = torch.ops.weave.merged_linear.default
_VIEWS = SHAPE_ONLY | {aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.split.Tensor}


class MergedGemm:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, structure = _site(found)
        surroundings = KernelContext.of(context.machine, context.topologies.values())
        columns = sum(facts.widths)
        gemm = Gemm(tokens.hint, facts.k, columns, "rc addmm" if facts.has_bias else "rc")
        terms = [Term(GEMM, surroundings.us_of(GEMM, GemmCall(gemm, facts.dtype)))]
        per_token = sum(bytes_of(value) for value in _stored(structure)) / max(found.site.tokens.hint, 1)
        if per_token:
            copied = MemoryCall(round(2 * per_token * tokens.hint))
            terms.append(Term("copy", surroundings.us_of(MEMORY, copied)))
        parameters = (("gemms", len(facts.widths)), ("columns", columns))
        candidate = Candidate(RULE, Fabric.LIBRARY, "one GEMM", parameters, Estimate(tuple(terms)))
        return (Proposal(candidate, found.nodes),)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return None

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        facts, structure = _site(chosen.found)
        first = structure.gemms[0]
        x, biases = _node(first.a), [each.bias for each in structure.gemms if each.bias is not None]
        position = last_of(graph, [x])
        merged = call_after(graph, position, MERGED, (x, list(structure.weights), biases), like=first.node)
        ends = (0, *accumulate(facts.widths))
        for gemm, (begin, end) in zip(structure.gemms, pairwise(ends), strict=True):
            part = call_after(graph, merged, aten.slice.Tensor, (merged, 1, begin, end), like=gemm.node)
            # As the GEMM stored it. Kernels that compute with it read the slice, and nothing is copied.
            kept = call_after(
                graph, part, aten.clone.default, (part,), like=gemm.node,
                named={"memory_format": torch.contiguous_format},
            )  # fmt: skip
            replace_uses(graph, gemm.node, kept)
            graph.erase_node(gemm.node)
        return (f"{RULE}: GEMMs of other sizes sum in another order",)

    def inductor_hooks(self) -> Sequence[InputHook]:
        return (InputHook(MERGED, _adjoin_operands, num_apart),)


def _adjoin_operands(arguments: Sequence[object]) -> str:
    """Put the weights of a call one after the other, and its biases; returns why not, if so."""
    for operands in arguments[1:]:
        assert isinstance(operands, list | tuple), operands
        tensors = [each for each in operands if isinstance(each, torch.Tensor)]
        if tensors and (why := adjoin(tensors)):
            return why
    return ""


def _stored(structure: Projections) -> Iterator[torch.Tensor]:
    """Results that a library's kernel reads, or nobody in this graph: Inductor copies them out of the common one."""
    for gemm in structure.gemms:
        if _is_stored(gemm.node):
            value = tensor_of(gemm.node)
            assert value is not None, f"{gemm.node.name} makes no tensor"
            yield value


def _is_stored(node: fx.Node) -> bool:
    return any(
        _is_stored(user) if is_call(user, _VIEWS) else user.op == "output" or kind_of(user.target) is not None
        for user in node.users
    )


def _site(found: FoundSite) -> tuple[ProjectionFacts, Projections]:
    facts, structure = found.facts, found.structure
    assert isinstance(facts, ProjectionFacts) and isinstance(structure, Projections), f"{found.site.id}: no GEMMs"
    return facts, structure


def _node(node: fx.Node) -> fx.Node:
    found = current(node)
    assert isinstance(found, fx.Node)
    return found
