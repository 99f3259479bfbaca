"""All-gather -> GEMMs, in one operation on symmetric memory.

Unfused, on every rank of a group::

    whole = all_gather(shard, gather_dim)          # of rows, or of each sequence's rows; several of one shard
    q, k, v = whole @ wq, whole @ wk, whole @ wv

Fused: `weave::all_gather_gemm` gathers once, into the order in which the GEMMs read rows: no copy follows the
collective, whatever the dimension that is gathered. Where something else reads the gathered rows (the gradient of a
weight, a backward pass), they are returned too. On GPUs the GEMMs may begin before all rows are here (`form_refused`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.graph.sizes import argument_of, viewed_as
from weaveopt.graph.splice import call_after, current_node, erase_dead, last_of, replace_uses
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall
from weaveopt.ops.gemm_comm.all_gather.op import SITES
from weaveopt.ops.gemm_comm.all_gather.prices import candidates
from weaveopt.ops.gemm_comm.prices import GemmCommPlan
from weaveopt.records.candidate import Candidate
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.all_gather_gemm.forms import RULE, AllGatherGemmMatch, form_of, form_refused, work_of
from weaveopt.rule import BufferRequest, Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.sequence.gather_consumers import Gathered
from weaveopt.sites.sequence.gather_matcher import KIND, GatherFacts


class AllGatherGemm:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, structure = _site(found)
        form = form_of(facts, structure, facts.world)
        if not isinstance(form, AllGatherGemmMatch):
            return () if usable_only else (Proposal(Candidate(RULE, rejections=form)),)
        widths = [gemm.sizes[1] for gemm in form.gemms]
        topology = context.topologies[facts.group]
        refused = form_refused(facts, form)
        work = work_of(facts, widths, tokens)
        offered = candidates(RULE, work, tokens, topology, context.machine, usable_only, refused)
        return tuple(Proposal(candidate, form.consumes, lowered, lowered.tasks) for candidate, lowered in offered)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        call = _call(chosen, context)
        return Memory(tuple(BufferRequest(buffer) for buffer in SITES[call.fabric].buffers(call)))

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        facts, structure = _site(chosen.found)
        form = form_of(facts, structure, facts.world)
        assert isinstance(form, AllGatherGemmMatch), f"{chosen.found.site.id}: {form}"
        call = _call(chosen, context, placement.channel)
        shard = current_node(structure.shard)
        b = [current_node(gemm.b) for gemm in form.gemms]
        added = [gemm.bias if gemm.bias is not None else gemm.addend for gemm in form.gemms]
        addends = [None if each is None else current_node(each) for each in added]
        outer = argument_of(graph, form.outer)
        operands = [shard, *b, *(each for each in addends if each is not None)]
        position = last_of(graph, [*operands, *((outer,) if isinstance(outer, fx.Node) else ())])
        target = torch.ops.weave.all_gather_gemm.default
        like = structure.gathers[0]
        fused = call_after(graph, position, target, (shard, b, addends, outer, call.encode()), like=like)
        for index, gemm in enumerate(form.gemms, start=1):
            replace_uses(graph, gemm.node, call_after(graph, fused, operator.getitem, (fused, index), like=gemm.node))
        if form.wholes:
            rows = call_after(graph, fused, operator.getitem, (fused, 0), like=like)
            for whole in form.wholes:
                replace_uses(graph, whole.node, viewed_as(graph, rows, whole.shape, like=whole.node))
        erase_dead(graph, chosen.proposal.consumes)
        return ()


def _site(found: FoundSite) -> tuple[GatherFacts, Gathered]:
    facts, structure = found.facts, found.structure
    assert isinstance(facts, GatherFacts) and isinstance(structure, Gathered), f"{found.site.id}: no all-gather"
    return facts, structure


def _call(chosen: Chosen, context: Context, channel: int = 0) -> AllGatherGemmCall:
    """The constants of the site's call, equal on all ranks."""
    facts, _ = _site(chosen.found)
    lowered = chosen.proposal.plan
    assert isinstance(lowered, GemmCommPlan), f"{chosen.found.site.id} was lowered by another rule"
    return AllGatherGemmCall(
        site=chosen.found.site.id,
        group=facts.group,
        fabric=lowered.fabric,
        world=facts.world,
        hidden=facts.k,
        dtype=facts.dtype,
        max_tokens=lowered.max_tokens,
        timeout_s=context.config.timeout_s,
        channel=channel,
        returns_rows=facts.gathered_is_read,
        cut=lowered.cut,
    )
