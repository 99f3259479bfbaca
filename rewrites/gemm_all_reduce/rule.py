"""GEMM -> all-reduce -> (+ residual) -> norm in one operation that exchanges rows while the GEMM makes others.

Unfused, on every rank of a group::

    partial = x @ weight.t()               # or x @ weight
    total = all_reduce(partial)            # then optionally + bias, * scale
    total = post_norm(total)               # post-norm families only
    total = residual + total               # absent after the embedding
    normalized = rms_norm(total) * weight  # or LayerNorm, (1 + w), ...; absent where a post-norm family ends here

Fused: `weave::gemm_all_reduce_norm`. Rows go in chunks: while one is exchanged, the GEMM of the next runs
(FlashOverlap, section 4). Or they go in tiles: one kernel computes the GEMM and sends every tile as it is finished.
Only a GEMM that nothing else reads is taken, without a bias of its own. Chunks are divided among ranks one by one, so
their sum is returned unsharded if anything reads it, and their residual is read unsharded: neighbouring sites that
would share a sharded one keep theirs unsharded on this side. Rows that go in tiles are divided as by any two-shot
exchange of a graph of one size, and may stay sharded. Where FP8 linears read the normalized rows, the quantization
stays in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as with_fields

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.graph.pattern import describe, skip_shapes
from weaveopt.graph.splice import call_after, current, erase_dead, last_of
from weaveopt.ops.gemm_comm.all_reduce.call import GemmReductionCall, WeightLayout, results_in_arena
from weaveopt.ops.reduction.call import FEATURES, SumOut
from weaveopt.records.candidate import Candidate, Rejection
from weaveopt.records.inductor_hooks import ReuseHook
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.gemm_all_reduce.candidates import (
    RULE,
    GemmAllReducePlan,
    GemmAllReduceTerms,
    candidates,
    tile_notes,
)
from weaveopt.rewrites.gemm_all_reduce.tiles import form_rejections
from weaveopt.rewrites.reduction.aliasing import aliasing_of_groups, is_read_in_place
from weaveopt.rewrites.reduction.eligible import norms_refused, refused_anywhere
from weaveopt.rewrites.reduction.lowering import memory_of, whole_call
from weaveopt.rewrites.reduction.sharding import SharedSum, residual_of, sharded_values, shared_sums, total_of
from weaveopt.rewrites.reduction.splice import made_by, operand_nodes, rounding, splice_results
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.reduction.matcher import KIND, Reduction, ReductionFacts
from weaveopt.sites.shared.epilogue import Reduced
from weaveopt.sites.shared.linear import MatchedGemm, gemm_at


class GemmAllReduce:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, structure = found.facts, found.structure
        assert isinstance(facts, ReductionFacts) and isinstance(structure, Reduction), f"{found.site.id}: no reduction"
        refused = (*refused_anywhere(facts, structure), *_gemm_refused(facts, structure))
        norm_refused = norms_refused(structure.reduced)
        if refused or (norm_refused and structure.reduced.post is not None):
            reasons = (*refused, *norm_refused)
            return () if usable_only else (Proposal(Candidate(RULE, rejections=reasons)),)
        fused, unfused = (_tiles_refused(found, structure, takes_norm) for takes_norm in (True, False))
        norm = structure.reduced.norm
        known = GemmAllReduceTerms(
            context.topologies[facts.group], context.machine, bool(norm_refused), fused, unfused,
            copies_rows=norm is not None and not is_read_in_place(norm.output),
        )  # fmt: skip
        taken_in = (Proposal(Candidate(RULE, rejections=norm_refused)),) if norm_refused and not usable_only else ()
        return (
            *taken_in,
            *(
                Proposal(candidate, _consumed(structure, lowered), lowered, () if lowered is None else lowered.tasks)
                for candidate, lowered in candidates(facts, tokens, known, usable_only)
            ),
        )

    def interactions(self, sites: Sequence[FoundSite]) -> Sequence[SharedSum]:
        """Interactions of sites in tiles, with each other and other rules' sites, through a sum that stays sharded by
        tokens."""
        return shared_sums(sites)

    def settle(self, chosen: Sequence[Chosen], context: Context) -> Mapping[str, Proposal]:
        """Which residuals and sums are sharded, and which normalized rows are read in the arena."""
        sharded, aliasing = sharded_values(chosen), aliasing_of_groups(chosen)
        settled = {}
        for each in chosen:
            lowered, structure = each.proposal.plan, each.found.structure
            if (
                isinstance(lowered, GemmAllReducePlan)
                and isinstance(structure, Reduction)
                and lowered.division is not None
            ):
                norm = structure.reduced.norm
                plan = with_fields(
                    lowered,
                    residual_sharded=residual_of(each.found) in sharded,
                    sum_sharded=total_of(each.found) in sharded,
                    aliases_arena=lowered.may_alias_arena and norm is not None and norm.output in aliasing,
                )
                candidate = with_fields(each.proposal.candidate, notes=tile_notes(plan))
                settled[each.found.site.id] = with_fields(each.proposal, candidate=candidate, plan=plan)
        return settled

    def inductor_hooks(self) -> Sequence[ReuseHook]:
        """Peers write to normalized rows that alias the arena: Inductor must not put anything of its own there."""
        return (ReuseHook(torch.ops.weave.gemm_all_reduce_norm.default, results_in_arena),)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        lowered = _lowered(chosen)
        return memory_of(lowered, lowered.max_tokens)  # chunks follow one another on one channel

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        structure, lowered = chosen.found.structure, _lowered(chosen)
        assert isinstance(structure, Reduction), f"{chosen.found.site.id}: no reduction"
        gemm = gemm_at(structure.gemm)
        assert gemm is not None, f"{chosen.found.site.id}: {structure.gemm} is no GEMM"
        reduced = with_fields(structure.reduced, norm=None) if lowered.unfused_norm else structure.reduced
        sum_used = structure.sum_is_read or reduced.norm is None
        call = _call_of(chosen, lowered, reduced, placement, sum_used, context)
        weight, layout = _stored(gemm)
        leading = (current(gemm.a), current(weight), layout.value)
        operands = tuple(current(each) for each in operand_nodes(graph, reduced))
        args = (*leading, *operands)
        position = last_of(graph, [each for each in args if isinstance(each, fx.Node)])
        target = torch.ops.weave.gemm_all_reduce_norm.default
        fused = call_after(graph, position, target, (*args, call.encode()), like=reduced.collectives[0])
        splice_results(graph, reduced, None, fused, sum_used)
        views = frozenset() if weight is gemm.b else frozenset({gemm.b})
        erase_dead(graph, chosen.proposal.consumes | reduced.passed | structure.gemm_nodes | views)
        return rounding(RULE, reduced, None)


def _call_of(
    chosen: Chosen, lowered: GemmAllReducePlan, reduced: Reduced, placement: Placement, sum_used: bool, context: Context
) -> GemmReductionCall:
    """The constants of the site's call, equal on all ranks."""
    whole = whole_call(chosen, lowered, reduced, placement, sum_used, context)
    exchange = with_fields(
        whole,
        residual_sharded=lowered.residual_sharded,
        sum_out=SumOut.SHARDED if sum_used and lowered.sum_sharded else whole.sum_out,
        normalized_aliases_arena=lowered.aliases_arena,
        in_pieces=FEATURES[lowered.fabric].tabled and bool(lowered.chunks),
    )
    return GemmReductionCall(exchange, lowered.variant, lowered.chunks, lowered.cut)


def _lowered(chosen: Chosen) -> GemmAllReducePlan:
    assert isinstance(chosen.proposal.plan, GemmAllReducePlan), f"{chosen.found.site.id} was lowered by another rule"
    return chosen.proposal.plan


def _consumed(structure: Reduction, lowered: GemmAllReducePlan | None) -> frozenset[fx.Node]:
    """Nodes that a candidate removes from the graph."""
    if lowered is None:
        return frozenset()
    rows = structure.reduced.passed if lowered.unfused_norm else structure.interior
    return rows | frozenset(made_by(structure))


def _tiles_refused(found: FoundSite, structure: Reduction, takes_norm: bool) -> tuple[Rejection, ...]:
    gemm = gemm_at(structure.gemm) if structure.gemm is not None else None
    layout = WeightLayout.NK if gemm is None else _stored(gemm)[1]
    return form_rejections(structure.reduced, layout, found.is_symbolic, takes_norm)


def _stored(gemm: MatchedGemm) -> tuple[fx.Node, WeightLayout]:
    """The weight as it is stored, of which the GEMM's right operand may be the transposed view."""
    weight = gemm.transposed_b
    return (gemm.b, WeightLayout.KN) if weight is None else (weight, WeightLayout.NK)


def _gemm_refused(facts: ReductionFacts, structure: Reduction) -> tuple[Rejection, ...]:
    """Why the site's GEMM cannot be taken in; facts decide, so that sites of one kind agree."""
    partials = structure.reduced.partials
    if facts.num_partials > 1:
        message = "all-reduces whose results are added have no single GEMM"
        return (Rejection("several_partials", message, (("num_partials", facts.num_partials),)),)
    if facts.gemm_depth == 0:
        source = skip_shapes(partials[0])
        gemm = gemm_at(source)
        if gemm is None:
            message = "no plain GEMM makes the partial result"
            return (Rejection("no_gemm", message, (("made_by", describe(source)),)),)
        if gemm.is_scaled:
            return (Rejection("gemm_is_quantized", "the GEMM's operands have scales", (("gemm", source.name),)),)
        if gemm.has_factors:
            return (Rejection("gemm_is_scaled", "alpha or beta of the GEMM are not 1", (("gemm", source.name),)),)
        values = (("gemm", source.name),)
        return (Rejection("read_by_others", "the partial result is read in addition to its sum", values),)
    if facts.gemm_has_bias:
        message = "the GEMM adds a bias before the reduction, which the operation does not take"
        return (Rejection("bias_not_supported", message),)
    return ()
