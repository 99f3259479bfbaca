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
too (`weave::all_reduce_norm_quant`). Two all-reduces whose results are added become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as with_fields

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.ops.reduction import call as op
from weaveopt.records.inductor_hooks import ReuseHook
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.reduction import fused
from weaveopt.rewrites.reduction.aliasing import aliasing_of_groups
from weaveopt.rewrites.reduction.begun import may_overlap
from weaveopt.rewrites.reduction.candidates import FusedReductionPlan
from weaveopt.rewrites.reduction.lowering import memory_of
from weaveopt.rewrites.reduction.sharding import SharedSum, residual_of, sharded_values, shared_sums, total_of
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.reduction.matcher import KIND, Reduction


class AllReduceRMSNorm:
    """The rule; see the module's docstring."""

    name = "all_reduce_rms_norm"
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        return tuple(
            proposal
            for begun in ((False, True) if may_overlap(found) else (False,))
            for proposal in fused.propose(
                self.name, found, tokens, context, usable_only, between_hosts=False, begun=begun
            )
        )

    def interactions(self, sites: Sequence[FoundSite]) -> Sequence[SharedSum]:
        """Interactions of consecutive sites through a sum that stays sharded by tokens."""
        return shared_sums(sites)

    def settle(self, chosen: Sequence[Chosen], context: Context) -> Mapping[str, Proposal]:
        """Which residuals and sums are sharded, and which normalized rows are read in the arena."""
        sharded, aliasing = sharded_values(chosen), aliasing_of_groups(chosen)
        settled = {}
        for each in chosen:
            lowered, structure = each.proposal.plan, each.found.structure
            own = each.proposal.candidate.choice == self.name
            if own and isinstance(lowered, FusedReductionPlan) and isinstance(structure, Reduction):
                norm = structure.reduced.norm
                plan = with_fields(
                    lowered,
                    residual_sharded=residual_of(each.found) in sharded,
                    sum_sharded=total_of(each.found) in sharded,
                    aliases_arena=norm is not None and norm.output in aliasing,
                )
                candidate = with_fields(each.proposal.candidate, notes=fused.notes_of(plan, each.found.facts))
                settled[each.found.site.id] = with_fields(each.proposal, candidate=candidate, plan=plan)
        return settled

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        lowered = fused.lowered_of(chosen)
        return memory_of(lowered, begun=lowered.begun)

    def inductor_hooks(self) -> Sequence[ReuseHook]:
        """Peers write to normalized rows that alias the arena: Inductor must not put anything of its own there."""
        return (ReuseHook(torch.ops.weave.all_reduce_norm.default, op.results_in_arena),)

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        return fused.replace(self.name, graph, chosen, placement, context)
