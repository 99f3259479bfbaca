"""GEMM -> reduce-scatter, in one operation on symmetric memory (the GEMM + reduce-scatter of FlashOverlap, 2.3.2).

Unfused, on every rank of a group::

    partial = a @ b                                    # several, where gradients of q, k and v are added
    shard = reduce_scatter(partial, scatter_dim, op)   # of rows, of each sequence's rows, or of columns

Fused: `weave::gemm_reduce_scatter` lets the GEMM write into the arena, where rows are stored in the GEMM's order
whatever the dimension that is cut: no copy is made for the collective. A mean, and a scale in front of the collective,
are part of it. What follows the shard (a scale, a cast, the residual, the norm) stays in the graph, where it is one
kernel anyway. Reduce-scatters whose results are added become one: their GEMMs are summed before anything is sent.

On GPUs one kernel may compute the GEMM and send its tiles while it goes on (`ops/gemm_comm/reduce_scatter/tiles.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model import Gemm
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.sizes import argument_of, find_shape, inputs_of, viewed_as
from weaveopt.graph.splice import call_after, current_node, erase_dead, last_of, replace_uses
from weaveopt.ops.gemm_comm.prices import GemmCommPlan
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall
from weaveopt.ops.gemm_comm.reduce_scatter.op import SITES
from weaveopt.ops.gemm_comm.reduce_scatter.prices import GemmReduceScatterWork, candidates
from weaveopt.records.candidate import Candidate
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.gemm_reduce_scatter.forms import GemmReduceScatterMatch, form_of, form_refused
from weaveopt.rule import BufferRequest, Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.sequence.scatter_epilogue import Scattered
from weaveopt.sites.sequence.scatter_matcher import KIND, ScatterFacts

aten = torch.ops.aten

RULE = "gemm_reduce_scatter"


class GemmReduceScatter:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, structure = _site(found)
        form = form_of(facts, structure)
        if not isinstance(form, GemmReduceScatterMatch):
            return () if usable_only else (Proposal(Candidate(RULE, rejections=form)),)
        whole = sum(1 for node in form.addends if (value := tensor_of(node)) is not None and value.ndim > 1)
        work = work_of(facts, [gemm.sizes[2] for gemm in form.gemms], tokens, whole, len(form.residuals))
        topology = context.topologies[facts.group]
        refused = form_refused(facts, form)
        offered = candidates(RULE, work, tokens, topology, context.machine, usable_only, refused)
        return tuple(Proposal(candidate, form.consumes, lowered, lowered.tasks) for candidate, lowered in offered)

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        call = _call(chosen, context)
        return Memory(tuple(BufferRequest(buffer) for buffer in SITES[call.fabric].buffers(call)))

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        facts, structure = _site(chosen.found)
        form = form_of(facts, structure)
        assert isinstance(form, GemmReduceScatterMatch), f"{chosen.found.site.id}: {form}"
        call = _call(chosen, context, placement.channel)
        first = structure.collectives[0]
        a = [current_node(gemm.a) for gemm in form.gemms]
        b = [current_node(gemm.b) for gemm in form.gemms]
        addends = [_rows(graph, current_node(node), form) for node in form.addends]
        outer = argument_of(graph, form.outer)
        operands = [*a, *b, *addends, *((outer,) if isinstance(outer, fx.Node) else ())]
        target = torch.ops.weave.gemm_reduce_scatter.default
        position = last_of(graph, operands)
        fused = call_after(graph, position, target, (a, b, addends, outer, call.encode()), like=first)
        result = viewed_as(graph, fused, form.shape, like=form.result)
        for residual in map(current_node, form.residuals):
            result = _added(graph, result, residual, form)
        replace_uses(graph, form.result, result)
        if any(user.op == "output" for user in first.users):  # a backward pass reads it, as it is before the wait
            replace_uses(graph, first, result)
        erase_dead(graph, chosen.proposal.consumes)
        return _rounding(facts)


def _site(found: FoundSite) -> tuple[ScatterFacts, Scattered]:
    facts, structure = found.facts, found.structure
    assert isinstance(facts, ScatterFacts) and isinstance(structure, Scattered), f"{found.site.id}: no reduce-scatter"
    return facts, structure


def _call(chosen: Chosen, context: Context, channel: int = 0) -> GemmReduceScatterCall:
    """The constants of the site's call, equal on all ranks."""
    facts, structure = _site(chosen.found)
    lowered, form = chosen.proposal.plan, form_of(facts, structure)
    assert isinstance(lowered, GemmCommPlan) and isinstance(form, GemmReduceScatterMatch), (
        f"{chosen.found.site.id}: {lowered}, {form}"
    )
    return GemmReduceScatterCall(
        site=chosen.found.site.id,
        group=facts.group,
        fabric=lowered.fabric,
        world=facts.world,
        hidden=facts.n,
        dtype=facts.dtype,
        max_tokens=lowered.max_tokens,
        timeout_s=context.config.timeout_s,
        channel=channel,
        scale=form.scale,
        columns=facts.dim == -1,
        cut=lowered.cut,
    )


def _rows(graph: fx.Graph, addend: fx.Node, form: GemmReduceScatterMatch) -> fx.Node:
    """A vector, or one row for all rows, as it is; anything else in the shape of what the GEMM makes."""
    value, gemm = tensor_of(addend), form.gemms[0].node
    assert value is not None, f"{addend.name} makes no tensor"
    if value.ndim == 1 or (value.ndim == 2 and value.shape[0] == 1):
        return addend
    shape = find_shape(gemm, [*inputs_of(graph), form.gemms[0].a, form.gemms[0].b])
    assert shape is not None, f"sizes of {gemm.name} are nowhere in the graph"
    return viewed_as(graph, addend, shape, like=gemm)


def _added(graph: fx.Graph, result: fx.Node, residual: fx.Node, form: GemmReduceScatterMatch) -> fx.Node:
    other = viewed_as(graph, residual, form.shape, like=form.result)
    return call_after(graph, max(result, other), aten.add.Tensor, (result, other), like=form.result)


def _rounding(facts: ScatterFacts) -> tuple[str, ...]:
    lines = [f"{RULE}: partial results are summed over the ranks in fp32, in their order, and rounded once"]
    if facts.num_gemms > 1:
        lines.append(f"{RULE}: GEMMs whose results are added are summed on each rank before the reduce-scatter")
    return tuple(lines)


def work_of(
    facts: ScatterFacts, depths: Sequence[int], tokens: TokenCounts, addends: int, residuals: int
) -> GemmReduceScatterWork:
    """`depths`: k of every GEMM."""
    gemms = tuple(Gemm(tokens.hint, depth, facts.n) for depth in depths)
    return GemmReduceScatterWork(gemms, facts.dtype, facts.world, facts.hosts, addends, residuals)
