"""GEMM -> all-reduce -> (+ residual) -> norm, in one operation on symmetric memory (TokenWeave, 4.2 and 4.3).

Unfused, on every rank of a group::

    partial = a @ b
    total = all_reduce(partial)            # then optionally + bias, * scale
    total = post_norm(total)               # post-norm families only
    total = residual + total               # absent after the embedding
    normalized = rms_norm(total) * weight  # or LayerNorm, (1 + w), ...; absent where a post-norm family ends here

Fused: `weave::mm_all_reduce_norm` lets the GEMM write into the arena and does the rest in one pass. On `peer` the
kernel sends rows from wherever they are: there the GEMM stays in the graph, where Inductor picks its kernel, and
`weave::all_reduce_norm` does the rest. Where only FP8 linears read the normalized rows, on GPUs the op quantizes them
too (`weave::all_reduce_norm_quant`). Two all-reduces that meet in one sum become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as with_fields

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.graph.splice import call_after, current, erase_dead, last_of
from weaveopt.records.candidate import Candidate
from weaveopt.records.site import TokenCounts
from weaveopt.reductions import call as op
from weaveopt.reductions.aliasing import aliasing_of_groups
from weaveopt.reductions.eligible import norms_refused, refused_anywhere
from weaveopt.reductions.sharding import SharedSum, residual_of, sharded_values, shared_sums, total_of
from weaveopt.reductions.splice import made_by, operand_nodes, rounding, splice_results, summed
from weaveopt.reductions.variant import Algorithm
from weaveopt.rewrites.all_reduce_rms_norm.calls import call_of, memory_of
from weaveopt.rewrites.all_reduce_rms_norm.candidates import (
    FP8_ROW_ALIGNMENT,
    RULE,
    Lowered,
    Terms,
    candidates,
)
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal, ReuseHook
from weaveopt.sites.quantization import stored_scale
from weaveopt.sites.reduction import KIND, Reduction, ReductionFacts

aten = torch.ops.aten


class AllReduceRMSNorm:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, structure = found.facts, found.structure
        assert isinstance(facts, ReductionFacts) and isinstance(structure, Reduction), f"{found.site.id}: no reduction"
        refused = refused_anywhere(facts, structure)
        norm_refused = norms_refused(structure.reduced)
        if refused or (norm_refused and structure.reduced.post is not None):
            reasons = (*refused, *norm_refused)
            return () if usable_only else (Proposal(Candidate(RULE, rejections=reasons)),)
        against_library = RULE not in context.config.force
        known = Terms(context.topologies[facts.group], context.machine, against_library, bool(norm_refused))
        taken_in = (Proposal(Candidate(RULE, rejections=norm_refused)),) if norm_refused and not usable_only else ()
        return (
            *taken_in,
            *(
                Proposal(candidate, _consumed(structure, lowered), lowered)
                for candidate, lowered in candidates(facts, tokens, known, usable_only)
            ),
        )

    def interactions(self, sites: Sequence[FoundSite]) -> Sequence[SharedSum]:
        """Consecutive sites hand a sum that stays sharded by tokens to each other."""
        return shared_sums(sites)

    def settle(self, chosen: Sequence[Chosen], context: Context) -> Mapping[str, Proposal]:
        """Which residuals and sums are sharded, and which normalized rows are read in the arena."""
        sharded, aliasing = sharded_values(chosen), aliasing_of_groups(chosen)
        settled = {}
        for each in chosen:
            lowered, structure = each.proposal.plan, each.found.structure
            if isinstance(lowered, Lowered) and isinstance(structure, Reduction):
                norm = structure.reduced.norm
                plan = with_fields(
                    lowered,
                    residual_sharded=residual_of(each.found) in sharded,
                    sum_sharded=total_of(each.found) in sharded,
                    aliases_arena=norm is not None and norm.output in aliasing,
                )
                candidate = with_fields(each.proposal.candidate, notes=_notes(plan, each.found.facts))
                settled[each.found.site.id] = with_fields(each.proposal, candidate=candidate, plan=plan)
        return settled

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return memory_of(_lowered(chosen))

    def inductor_hooks(self) -> Sequence[ReuseHook]:
        """Peers write to normalized rows that alias the arena: Inductor must not put anything of its own there."""
        return (ReuseHook(torch.ops.weave.all_reduce_norm.default, op.results_in_arena),)

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        structure, lowered = chosen.found.structure, _lowered(chosen)
        assert isinstance(structure, Reduction), f"{chosen.found.site.id}: no reduction"
        reduced = with_fields(structure.reduced, norm=None) if lowered.norm_apart else structure.reduced
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
        args = tuple(current(argument) for argument in (*leading, *operands))  # type: ignore[arg-type]
        position = last_of(graph, [argument for argument in args if isinstance(argument, fx.Node)])
        fused = call_after(graph, position, target, (*args, call.encode()), like=first)
        splice_results(graph, reduced, quantized, fused, sum_used)
        erase_dead(graph, chosen.proposal.consumes | reduced.passed | structure.gemm_nodes)
        return rounding(RULE, reduced, quantized)


def _notes(lowered: Lowered, facts: object) -> tuple[str, ...]:
    notes = []
    if isinstance(facts, ReductionFacts) and facts.quantization != "none" and not lowered.quantizes:
        why = f"{lowered.fabric.value} has no kernel that does"
        features = op.FEATURES.get(lowered.fabric)
        if features is not None and features.quantizes:
            why = f"the kernels take rows of a multiple of {FP8_ROW_ALIGNMENT} elements (hidden {facts.hidden})"
        notes.append(f"e4m3 rows are made of the normalized ones in the graph: {why}")
    if lowered.norm_apart:
        notes.append("norm apart: the sum is handed out whole and alone, and every rank normalizes it in the graph")
    elif _gathers(lowered):
        notes.append("gather: two-shot hands out the whole sum too, which others read")
    if lowered.aliases_arena:
        notes.append("no copy: normalized rows that come in bulk are read in the arena, where peers write them")
    return tuple(notes)


def _gathers(lowered: Lowered) -> bool:
    """Whether rows of the sum are handed out beside normalized ones."""
    both = lowered.workload.has_norm and lowered.workload.sum_is_used and not lowered.sum_sharded
    return both and lowered.algorithm is Algorithm.TWO_SHOT


def _lowered(chosen: Chosen) -> Lowered:
    assert isinstance(chosen.proposal.plan, Lowered), f"{chosen.found.site.id} was lowered by another rule"
    return chosen.proposal.plan


def _consumed(structure: Reduction, lowered: Lowered) -> frozenset[fx.Node]:
    """What disappears from the graph with a candidate."""
    consumed = structure.reduced.passed if lowered.norm_apart else structure.interior
    if lowered.quantizes and structure.quantized is not None:
        consumed |= structure.quantized.nodes
    if lowered.takes_gemm and structure.gemm is not None:
        consumed |= frozenset(made_by(structure))
    return consumed
