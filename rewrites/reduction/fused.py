"""Candidates and rewrite shared by the rules that fuse all-reduce, addition and norm.

A rule says which fabrics it is for. The operations are `weave::mm_all_reduce_norm`, which lets the GEMM write into the
arena, `weave::all_reduce_norm`, and where FP8 linears alone read the rows `weave::all_reduce_norm_quant`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as with_fields

import torch
import torch.fx as fx

from weaveopt.graph.splice import call_after, current, erase_dead, last_of
from weaveopt.ops.reduction import call as op
from weaveopt.ops.reduction.variant import Algorithm
from weaveopt.records.candidate import Candidate, Rejection
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.reduction.aliasing import may_be_split
from weaveopt.rewrites.reduction.begun import begun_tasks, end_before_readers, names_of
from weaveopt.rewrites.reduction.candidates import (
    FP8_ROW_ALIGNMENT,
    FusedReductionPlan,
    FusedReductionTerms,
    candidates,
)
from weaveopt.rewrites.reduction.eligible import norms_refused, refused_anywhere
from weaveopt.rewrites.reduction.lowering import call_of
from weaveopt.rewrites.reduction.splice import made_by, operand_nodes, rounding, splice_results, summed
from weaveopt.rule import Chosen, Context, FoundSite, Placement, Proposal
from weaveopt.sites.reduction.matcher import Reduction, ReductionFacts
from weaveopt.sites.shared.quantization import stored_scale

GRAPH_MAY_SPLIT = Rejection(
    "graph_may_split",
    "Inductor may make several CUDA graphs of this one, and no call in flight can cross between them",
)


def propose(
    rule: str, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool, *, between_hosts: bool,
    begun: bool = False,
) -> Sequence[Proposal]:  # fmt: skip
    """Candidates of `rule` on the fabrics that join ranks of several hosts, or on those that stay within one.

    Those that are `begun` let other work of the graph run while rows are exchanged (`weave::all_reduce_norm_begin`).
    """
    facts, structure = found.facts, found.structure
    assert isinstance(facts, ReductionFacts) and isinstance(structure, Reduction), f"{found.site.id}: no reduction"
    topology = context.topologies[facts.group]
    refused = refused_anywhere(facts, structure)
    if begun and topology.device == "cuda" and may_be_split(structure.reduced.collectives[0]):
        refused = (*refused, GRAPH_MAY_SPLIT)
    norm_refused = norms_refused(structure.reduced)
    if refused or (norm_refused and structure.reduced.post is not None):
        reasons = (*refused, *norm_refused)
        return () if usable_only else (Proposal(Candidate(rule, rejections=reasons)),)
    against_library = rule not in context.config.force
    known = FusedReductionTerms(
        rule, between_hosts, topology, context.machine, against_library, begun, bool(norm_refused)
    )
    taken_in = (Proposal(Candidate(rule, rejections=norm_refused)),) if norm_refused and not usable_only else ()
    return (
        *taken_in,
        *(
            Proposal(candidate, _consumed(structure, lowered), lowered, begun_tasks(candidate, lowered, structure))
            for candidate, lowered in candidates(facts, tokens, known, usable_only)
        ),
    )


def replace(rule: str, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
    """Puts the operation in place of the site; what changes rounding, a line each."""
    structure, lowered = chosen.found.structure, lowered_of(chosen)
    assert isinstance(structure, Reduction), f"{chosen.found.site.id}: no reduction"
    reduced = with_fields(structure.reduced, norm=None) if lowered.unfused_norm else structure.reduced
    sum_used = structure.sum_is_read or reduced.norm is None
    quantized = structure.quantized if lowered.quantizes else None
    call = call_of(chosen, lowered, reduced, placement, quantized, sum_used, context)
    first = reduced.collectives[0]
    operands = operand_nodes(graph, reduced)
    if lowered.takes_gemm and structure.gemm is not None:
        *bias, a, b = structure.gemm.args
        addend = structure.addend if structure.addend is not None else (bias[0] if bias else None)
        target: object = torch.ops.weave.mm_all_reduce_norm.default
        leading: tuple[object, ...] = (a, b, addend)
    else:
        target = torch.ops.weave.all_reduce_norm.default
        leading = (summed(graph, reduced.partials),)
        if quantized is not None:
            target = torch.ops.weave.all_reduce_norm_quant.default
            operands = (*operands, stored_scale(graph, quantized))
    if lowered.begun:
        target = torch.ops.weave.all_reduce_norm_begin.default
        operands = operands if quantized is not None else (*operands, None)
    args = tuple(current(argument) for argument in (*leading, *operands))  # type: ignore[arg-type]
    before = [argument for argument in args if isinstance(argument, fx.Node)]
    position = last_of(graph, [*before, first] if lowered.begun else before)
    fused = call_after(graph, position, target, (*args, call.encode()), like=first)
    splice_results(graph, reduced, quantized, fused, sum_used)
    names = names_of(first) if lowered.begun else None
    erase_dead(graph, chosen.proposal.consumes | reduced.passed | structure.gemm_nodes)
    if names is not None:
        end_before_readers(graph, fused, names)
    return rounding(rule, reduced, quantized)


def lowered_of(chosen: Chosen) -> FusedReductionPlan:
    """Plan of the chosen candidate of such a rule."""
    assert isinstance(chosen.proposal.plan, FusedReductionPlan), f"{chosen.found.site.id} was lowered by another rule"
    return chosen.proposal.plan


def _consumed(structure: Reduction, lowered: FusedReductionPlan) -> frozenset[fx.Node]:
    """Nodes that a candidate removes from the graph."""
    consumed = structure.reduced.passed if lowered.unfused_norm else structure.interior
    if lowered.quantizes and structure.quantized is not None:
        consumed |= structure.quantized.nodes
    if lowered.takes_gemm and structure.gemm is not None:
        consumed |= frozenset(made_by(structure))
    return consumed


def notes_of(lowered: FusedReductionPlan, facts: object) -> tuple[str, ...]:
    """Notes of the report on a candidate, in addition to its price."""
    notes = []
    if isinstance(facts, ReductionFacts) and facts.quantization != "none" and not lowered.quantizes:
        why = f"{lowered.fabric.value} has no kernel that does"
        features = op.FEATURES.get(lowered.fabric)
        if features is not None and features.quantizes:
            why = f"the kernels support rows of a multiple of {FP8_ROW_ALIGNMENT} elements (hidden {facts.hidden})"
        notes.append(f"e4m3 rows are made of the normalized ones in the graph: {why}")
    if lowered.unfused_norm:
        notes.append(
            "norm apart: the kernel returns the unsharded sum alone, and every rank normalizes it in the graph"
        )
    elif _gathers(lowered):
        notes.append("gather: two-shot returns the unsharded sum too, which other nodes read")
    if lowered.aliases_arena:
        notes.append("no copy: normalized rows that come in bulk are read in the arena, where peers write them")
    return tuple(notes)


def _gathers(lowered: FusedReductionPlan) -> bool:
    """True if rows of the sum are gathered in addition to normalized ones."""
    both = lowered.workload.has_norm and lowered.workload.sum_is_used and not lowered.sum_sharded
    return both and lowered.algorithm is Algorithm.TWO_SHOT
