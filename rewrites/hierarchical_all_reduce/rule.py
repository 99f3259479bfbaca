"""GEMM -> all-reduce among several hosts -> (+ residual) -> norm, in one operation (NVRAR, section 4).

Unfused, on every rank of a group whose ranks are on several hosts::

    partial = a @ b
    total = all_reduce(partial)            # then optionally + bias, * scale
    total = post_norm(total)               # post-norm families only
    total = residual + total               # absent after the embedding
    normalized = rms_norm(total) * weight  # or LayerNorm, (1 + w), ...; absent where none follows

Fused: ranks of a host share the rows out among each other, rank l of each host exchanges its share with rank l of other
hosts, adds the residual and normalizes, and ranks of a host exchange their shares. Between hosts the price decides, by
token count: every host to every other one (once, or partial results and then finished sums), recursive doubling, or
recursive halving and doubling. All-reduces without a norm after them are taken too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.reduction import fused
from weaveopt.rewrites.reduction.begun import may_overlap
from weaveopt.rewrites.reduction.candidates import FusedReductionPlan
from weaveopt.rewrites.reduction.lowering import memory_of
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.reduction.matcher import KIND


class HierarchicalAllReduce:
    """The rule; see the module's docstring."""

    name = "hierarchical_all_reduce"
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        return tuple(
            proposal
            for begun in ((False, True) if may_overlap(found) else (False,))
            for proposal in fused.propose(
                self.name, found, tokens, context, usable_only, between_hosts=True, begun=begun
            )
        )

    def settle(self, chosen: Sequence[Chosen], context: Context) -> Mapping[str, Proposal]:
        """Adds the notes of each choice; its sum stays unsharded."""
        settled = {}
        for each in chosen:
            lowered = each.proposal.plan
            if each.proposal.candidate.choice == self.name and isinstance(lowered, FusedReductionPlan):
                notes = fused.notes_of(lowered, each.found.facts)
                settled[each.found.site.id] = replace(
                    each.proposal, candidate=replace(each.proposal.candidate, notes=notes)
                )
        return settled

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        lowered = fused.lowered_of(chosen)
        return memory_of(lowered, begun=lowered.begun)

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        return fused.replace(self.name, graph, chosen, placement, context)
