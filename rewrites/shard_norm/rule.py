"""GEMM + reduce-scatter -> (+ residual) -> norm on this rank's rows -> all-gather + GEMMs, where a model all-reduces.

Unfused, on every rank of a group::

    partial = a @ b
    total = residual + all_reduce(partial)            # and all else that a reduction site may hold
    normalized = rms_norm(total) * weight             # or LayerNorm, (1 + w), ...
    q, k, v = normalized @ wq, normalized @ wk, normalized @ wv

Fused::

    own = gemm_reduce_scatter(a, b)                   # this rank's rows
    total = residual[own rows] + own
    normalized = rms_norm(total) * weight             # Inductor's kernel, on 1 / world of the rows
    q, k, v = all_gather_gemm(normalized, [wq, wk, wv])

or, where the kernel that sums can add and normalize too::

    normalized, total = gemm_reduce_scatter_norm(a, b, residual[own rows], weight)

An all-reduce is a reduce-scatter and an all-gather. Between two GEMMs each can overlap with one: the former while the
first GEMM goes on, the latter while the next ones do. The sum stays with the ranks that made its rows as long as the
sites that read it divide rows in the same way, whichever rule rewrites them; else it is gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.graph.sizes import argument_of, viewed_as
from weaveopt.graph.splice import current_node, erase_dead, replace_uses
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall
from weaveopt.ops.gemm_comm.all_gather.op import SITES as GATHERS
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, GemmReduceScatterNormCall
from weaveopt.ops.gemm_comm.reduce_scatter.op import SITES as SCATTERS
from weaveopt.records.candidate import Candidate, Rejection
from weaveopt.records.memory import Buffer
from weaveopt.records.norm import NormSpec
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.reduction.sharding import SharedSum, plan_of, residual_of, sharded_values, shared_sums, total_of
from weaveopt.rewrites.shard_norm.candidates import RULE, Chain, ShardNormPlan, candidates, notes_of
from weaveopt.rewrites.shard_norm.forms import ShardNormMatch, against_norm, form_of
from weaveopt.rewrites.shard_norm.shards import Shards
from weaveopt.rule import BufferRequest, Chosen, Context, FoundSite, Memory, Placement, PricedSite, Proposal
from weaveopt.sites.reduction.matcher import KIND, Reduction, ReductionFacts
from weaveopt.sites.shared.epilogue import Reduced

aten, weave = torch.ops.aten, torch.ops.weave


@dataclass(frozen=True)
class WidenedSum:
    """Cost of a sharded sum that another rule's operation reads, since it expects this rank's rows in a full-size
    buffer."""

    shared: SharedSum

    @property
    def sites(self) -> tuple[int, ...]:
        return self.shared.sites

    @property
    def term(self) -> str:
        return "unshard_copy"

    @property
    def key(self) -> Hashable:
        return (self.term, self.shared.covered)

    def terms(self, members: Sequence[PricedSite]) -> Mapping[tuple[int, ...], float]:
        found = {}
        for choices in self.shared.terms(members):
            made, *read = (plan_of(member.proposal(choice)) for member, choice in zip(members, choices, strict=True))
            if isinstance(made, ShardNormPlan) and any(
                each is not None and not isinstance(each, ShardNormPlan) for each in read
            ):
                found[choices] = made.unshard_copy_us
        return found


class ShardNorm:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, structure = _site(found)
        form = form_of(facts, structure)
        if not isinstance(form, ShardNormMatch):
            return () if usable_only else (Proposal(Candidate(RULE, rejections=form)),)
        chain = _chain(found, facts, structure, form, tokens)
        offered = candidates(chain, context.topologies[facts.group], context.machine, usable_only)
        return tuple(
            Proposal(candidate, form.consumes if lowered is not None else frozenset(), lowered)
            for candidate, lowered in offered
        )

    def interactions(self, sites: Sequence[FoundSite]) -> Sequence[SharedSum | WidenedSum]:
        """Interactions with each other and other rules' sites through a sum that stays sharded by tokens."""
        shared = shared_sums(sites)
        return (*shared, *map(WidenedSum, shared))

    def settle(self, chosen: Sequence[Chosen], context: Context) -> Mapping[str, Proposal]:
        """Which residuals and sums are sharded."""
        sharded = sharded_values(chosen)
        settled = {}
        for each in chosen:
            lowered, facts = each.proposal.plan, each.found.facts
            if isinstance(lowered, ShardNormPlan) and isinstance(facts, ReductionFacts):
                plan = with_fields(
                    lowered,
                    residual_sharded=residual_of(each.found) in sharded,
                    sum_sharded=total_of(each.found) in sharded,
                )
                candidate = with_fields(each.proposal.candidate, notes=notes_of(plan, facts))
                settled[each.found.site.id] = with_fields(each.proposal, candidate=candidate, plan=plan)
        return settled

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        calls = _calls(chosen, context)
        wanted = [*SCATTERS[calls.scatter.fabric].buffers(calls.scatter)]
        whole_sum = _site(chosen.found)[1].sum_is_read and not _lowered(chosen).sum_sharded
        for gather in (calls.gather, *((calls.sum_gather,) if whole_sum else ())):
            wanted += GATHERS[gather.fabric].buffers(gather)
        largest: dict[str, Buffer] = {}
        for buffer in wanted:
            known = largest.get(buffer.name)
            largest[buffer.name] = buffer if known is None or known.num_bytes < buffer.num_bytes else known
        return Memory(tuple(map(BufferRequest, largest.values())))

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        facts, structure = _site(chosen.found)
        form, lowered = _form(chosen), _lowered(chosen)
        calls = _calls(chosen, context, placement.channel)
        reduced = structure.reduced
        like = reduced.collectives[0]
        rank = context.topologies[facts.group].group.rank
        tokens = argument_of(graph, form.tokens)
        shards = Shards.of(graph, like, rank, facts.world, facts.hidden, tokens, lowered.is_padded)
        residuals = [shards.local_rows(current_node(residual)) for residual in reduced.residuals]

        same = [current_node(node) for _, node in _replicated(reduced, lowered)]
        x, rows = _first_half(shards, reduced, form, calls, residuals, same)

        weights = [current_node(gemm.b) for gemm in form.readers]
        biases = [None if each is None else current_node(each) for each in form.biases]
        made = shards.call(weave.all_gather_gemm.default, rows, weights, biases, 1, calls.gather.encode())
        for index, gemm in enumerate(form.readers, start=1):
            replace_uses(graph, gemm.node, shards.cut(shards.call(operator.getitem, made, index)))
        if structure.sum_is_read:
            if lowered.sum_sharded:
                whole = x if lowered.takes_norm else shards.full_size(x)
            else:
                gathered = shards.call(weave.all_gather_gemm.default, x, [], [], 1, calls.sum_gather.encode())
                whole = shards.cut(shards.call(operator.getitem, gathered, 0))
            replace_uses(graph, reduced.total, viewed_as(graph, whole, form.shape, like=reduced.total))
        erase_dead(graph, chosen.proposal.consumes | reduced.passed | structure.gemm_nodes)
        for residual in reduced.residuals:
            shards.drop_full_size(current_node(residual))
        return _rounding(facts, structure, lowered)


def _first_half(
    shards: Shards,
    reduced: Reduced,
    form: ShardNormMatch,
    calls: Calls,
    residuals: Sequence[fx.Node],
    same: list[fx.Node],
) -> tuple[fx.Node, fx.Node]:
    """The sum, of this rank's rows or as the kernel with the norm returns it, and this rank's rows normalized;
    `residuals`: this rank's rows of each."""
    a = [shards.filled(current_node(gemm.a)) for gemm in form.gemms]
    b = [current_node(gemm.b) for gemm in form.gemms]
    if calls.normed is not None:
        [left], [right], [residual] = a, b, residuals
        weight = None if form.norm.weight is None else current_node(form.norm.weight)
        op, text = weave.gemm_reduce_scatter_norm.default, calls.normed.encode()
        made = shards.call(op, left, right, residual, weight, text, same)
        return shards.call(operator.getitem, made, 1), shards.call(operator.getitem, made, 0)
    addends = [current_node(each) for each in form.addends]
    x = shards.call(weave.gemm_reduce_scatter.default, a, b, addends, 1, calls.scatter.encode(), same)
    for bias in reduced.biases:
        x = shards.call(aten.add.Tensor, x, current_node(bias))
    if reduced.scale != 1.0:
        x = shards.call(aten.mul.Tensor, x, reduced.scale)
    if reduced.scale_tensor is not None:
        x = shards.call(aten.mul.Tensor, x, current_node(reduced.scale_tensor))
    if reduced.post is not None:
        x = shards.normalized(reduced.post, x)
    for residual in residuals:
        x = shards.call(aten.add.Tensor, x, residual)
    return x, shards.normalized(form.norm, x)


def _site(found: FoundSite) -> tuple[ReductionFacts, Reduction]:
    facts, structure = found.facts, found.structure
    assert isinstance(facts, ReductionFacts) and isinstance(structure, Reduction), f"{found.site.id}: no reduction"
    return facts, structure


def _form(chosen: Chosen) -> ShardNormMatch:
    form = form_of(*_site(chosen.found))
    assert isinstance(form, ShardNormMatch), f"{chosen.found.site.id}: {form}"
    return form


def _lowered(chosen: Chosen) -> ShardNormPlan:
    assert isinstance(chosen.proposal.plan, ShardNormPlan), f"{chosen.found.site.id} was lowered by another rule"
    return chosen.proposal.plan


def _calls(chosen: Chosen, context: Context, channel: int = 0) -> Calls:
    facts, structure = _site(chosen.found)
    lowered, form = _lowered(chosen), _form(chosen)
    names = [name for name, _ in _replicated(structure.reduced, lowered)]
    timeout_s = context.config.timeout_s
    return calls_of(chosen.found.site.id, facts, lowered, form.norm.form, form.rows_dtype, names, channel, timeout_s)


def _replicated(reduced: Reduced, lowered: ShardNormPlan) -> list[tuple[str, fx.Node]]:
    """Inputs of a rank's rows other than partial results, with names. They must be equal on all ranks, or
    rows differ."""
    found = [("bias", bias) for bias in reduced.biases]
    if not lowered.residual_sharded:
        found += [("residual", residual) for residual in reduced.residuals]
    for name, norm in (("post_norm", reduced.post), ("norm", reduced.norm)):
        parameters = () if norm is None else (("weight", norm.weight), ("bias", norm.bias))
        found += [(f"{name}_{part}", node) for part, node in parameters if node is not None]
    return found


def _chain(
    found: FoundSite, facts: ReductionFacts, structure: Reduction, form: ShardNormMatch, tokens: TokenCounts
) -> Chain:
    return Chain(
        facts=facts,
        tokens=tokens,
        depths=tuple(gemm.sizes[2] for gemm in form.gemms),
        widths=tuple(gemm.sizes[1] for gemm in form.readers),
        rows_dtype=form.rows_dtype,
        num_residuals=len(structure.reduced.residuals),
        is_symbolic=found.is_symbolic,
        tiles_refused=tuple(_against_tiles(found, form)),
        pushed_refused=tuple(_against_pushed(found, form)),
        norm_refused=tuple(against_norm(facts, structure.reduced, form, _against_tiles(found, form))),
    )


def _against_tiles(found: FoundSite, form: ShardNormMatch) -> Sequence[Rejection]:
    """Rejections for what the kernel that sends its tiles does not support, whatever the sizes."""
    reasons = [_SYMBOLIC] if found.is_symbolic else []
    if len(form.gemms) != 1:
        values = (("gemms", len(form.gemms)),)
        reasons.append(Rejection("several_gemms", "the kernel computes one GEMM, and several are added", values))
    if form.addends:
        reasons.append(Rejection("addend_not_supported", "the kernel adds nothing to what its GEMM makes"))
    if any(gemm.transposed_b is None for gemm in form.gemms):
        reasons.append(Rejection("weight_layout", "the kernel reads weights that are stored [hidden, k]"))
    return reasons


def _against_pushed(found: FoundSite, form: ShardNormMatch) -> Sequence[Rejection]:
    """Rejections for what GEMMs that start before all rows have arrived do not support, whatever the sizes."""
    reasons = [_SYMBOLIC] if found.is_symbolic else []
    if any(gemm.transposed_b is None for gemm in form.readers):
        reasons.append(Rejection("weight_layout", "the kernel reads weights that are stored [n, hidden]"))
    return reasons


_SYMBOLIC = Rejection("symbolic_tokens", "the kernel is planned for one token count, and this graph's is symbolic")


def _rounding(facts: ReductionFacts, structure: Reduction, lowered: ShardNormPlan) -> tuple[str, ...]:
    once = "and rounded once, with the residual in them" if lowered.takes_norm else "and rounded once"
    lines = [f"{RULE}: partial results are summed over the ranks in fp32, in their order, {once}"]
    if facts.num_partials > 1:
        lines.append(
            f"{RULE}: results of GEMMs that are added to one sum are added on each rank before the reduce-scatter"
        )
    return tuple(lines)


@dataclass(frozen=True)
class Calls:
    """Calls of the operations of one site."""

    scatter: GemmReduceScatterCall
    normed: GemmReduceScatterNormCall | None
    """In place of `scatter`: with the addition and the norm. Its buffers are the same."""
    gather: AllGatherGemmCall
    """All-gather of the normalized rows, with the GEMMs that read them."""
    sum_gather: AllGatherGemmCall
    """All-gather of the rows of the sum, if every rank needs them."""


def calls_of(
    site: str,
    facts: ReductionFacts,
    lowered: ShardNormPlan,
    norm: NormSpec,
    rows_dtype: str,
    replicated: Sequence[str],
    channel: int,
    timeout_s: float,
) -> Calls:
    """`rows_dtype`: of the normalized rows; `replicated`: names of what all ranks have to have alike."""
    group, fabric, world, hidden = facts.group, lowered.fabric, facts.world, facts.hidden
    scatter = GemmReduceScatterCall(
        site, group, fabric, world, hidden, facts.dtype, lowered.max_tokens, timeout_s, channel,
        cut=lowered.tiles_cut, replicated=" ".join(replicated),
    )  # fmt: skip
    normed = GemmReduceScatterNormCall(
        site, group, fabric, world, hidden, facts.dtype, lowered.max_tokens, timeout_s, channel,
        cut=lowered.tiles_cut, replicated=" ".join(replicated), eps=norm.eps, weight_offset=norm.weight_offset,
        cast_before_weight=norm.cast_before_weight, full_size_sum=lowered.sum_sharded,
    ) if lowered.takes_norm else None  # fmt: skip
    gather = AllGatherGemmCall(
        site, group, fabric, world, hidden, rows_dtype, lowered.max_tokens, timeout_s, channel, cut=lowered.pushed_cut
    )
    sum_gather = AllGatherGemmCall(
        site, group, fabric, world, hidden, facts.dtype, lowered.max_tokens, timeout_s, channel, returns_rows=True
    )
    return Calls(scatter, normed, gather, sum_gather)
