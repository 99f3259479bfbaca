"""A mixture's tokens and results, pushed straight into the memory of the ranks that need them.

Unfused, on every rank of a group::

    y = weave::expert_exchange(x, experts, weights, gate_up, gate_up_bias, down, down_bias, call)   # all-to-all

Fused: the same operation with a fabric and its memory in `call`. One row is sent for each (token, destination), results
are stored into [token][choice] of the token's rank, and nothing is counted on the host first.

On GPUs of one host that reach each other's memory the same is done by kernels (`weaveopt/ops/experts/sharded/peer.py`).
How many rows come is known on the device alone, so a CUDA graph can hold the call.

Where ranks hold batches of their own, the call is the same in whatever graph a rank has compiled, and its memory is no
part of the graph's: all ranks reserve it in the first call, together. On GPUs their hosts exchange their token counts
in every call (`weaveopt/ops/experts/sharded/counts.py`), and CUDA graphs are made around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model import Machine
from weaveopt.cost_model.exchange import OP, GpuParts, PushedParts, ShardedMixture, gpu_parts, pushed_parts
from weaveopt.cost_model.mixture import fastest_kernels, few_rows, has_few_rows, rows_by_expert
from weaveopt.cost_model.token_grid import grid_of
from weaveopt.fabrics.fabric_eligibility import eligible_fabrics, not_measured
from weaveopt.fabrics.rows_call import decode
from weaveopt.fabrics.topology import Topology
from weaveopt.graph.splice import call_after, erase_dead, replace_uses
from weaveopt.inductor.calls import window_of
from weaveopt.ops.experts.call import ExpertsKernel
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.gpu import has_triton
from weaveopt.ops.experts.hopper import lacks_hopper
from weaveopt.ops.experts.sharded.op import SITES
from weaveopt.ops.experts.sharded.peer import refusal
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term, Values
from weaveopt.records.site import DTYPE_BYTES, TokenCounts
from weaveopt.rule import BufferRequest, Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.mixture.exchange_matcher import KIND, ExchangeFacts, is_transposed
from weaveopt.solver.boundaries import runs

RULE = "moe_sharded"
KERNELS, HOPPER = "kernels", "hopper"
CURVES = {KERNELS: "", HOPPER: HOPPER}
"""Variants on GPUs: whose kernels the experts run, and what those are called in a profile."""
HALVES = ("bfloat16", "float16")
ROW_MULTIPLE = 8
"""Elements: rows begin at multiples of 16 bytes."""
BATCHES = (1, 2)
"""Wait for all rows, or begin with this rank's own: which reads the weights twice."""


@dataclass(frozen=True)
class MoeShardedPlan:
    """Plan of a candidate, as the rule keeps it until the rewrite."""

    fabric: Fabric
    max_tokens: int
    batches: int = ExpertExchangeCall.batches
    kernels: str = ExpertExchangeCall.kernels
    few_tokens: int = 0


class MoeSharded:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, node = _site(found)
        return tuple(
            Proposal(candidate, frozenset((node,)), lowered)
            for candidate, lowered in _candidates(facts, node, tokens, context, usable_only)
        )

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        facts, _ = _site(chosen.found)
        if not facts.same_tokens:
            return None
        call = _call(chosen, context)
        return Memory(tuple(BufferRequest(buffer) for buffer in SITES[call.fabric].buffers(call)))

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        _, node = _site(chosen.found)
        call = _call(chosen, context, placement.channel)
        exchange = torch.ops.weave.expert_exchange
        can_capture = call.fabric is Fabric.PEER and call.same_tokens
        target = exchange.capturable if can_capture else exchange.default
        fused = call_after(graph, node, target, (*node.args[:-1], call.encode()), like=node)
        replace_uses(graph, node, fused)
        erase_dead(graph, chosen.proposal.consumes)
        return ()


def _candidates(
    facts: ExchangeFacts, node: fx.Node, tokens: TokenCounts, context: Context, usable_only: bool
) -> Iterator[tuple[Candidate, MoeShardedPlan]]:
    machine = context.machine
    window_us = _window_us(machine, facts, node, context.topologies)
    for fabric, unreachable in eligible_fabrics(context.topologies[facts.group], machine, SITES):
        on_fabric = _between_gpus if fabric is Fabric.PEER else _in_batches
        for variant, lowered, own, parts in on_fabric(machine, fabric, facts, node, tokens, window_us):
            reasons = (*unreachable, *_against_ranks(facts), *own)
            if parts is None and not reasons:
                reasons = (not_measured(machine, fabric, OP if fabric is Fabric.PEER else "all_gather"),)
            if reasons and usable_only:
                continue
            parameters = _parameters(facts, tokens, machine, lowered)
            if not reasons:
                buffers = SITES[fabric].buffers(_with_fabric(_given(node), facts, lowered))
                parameters = (*parameters, ("arena_bytes", sum(buffer.num_bytes for buffer in buffers)))
            estimate = None if parts is None else _estimate(machine, parts, facts)
            yield Candidate(RULE, fabric, variant, parameters, estimate, reasons), lowered


Way = tuple[str, MoeShardedPlan, tuple[Rejection, ...], PushedParts | GpuParts | None]
"""The candidate's variant, what the rule remembers of it, what speaks against it, and what it takes."""


def _against_ranks(facts: ExchangeFacts) -> Iterator[Rejection]:
    if facts.independent:
        yield Rejection("ranks_independent", "ranks promise no common calls, and here each waits for all others")


def _window_us(machine: Machine, facts: ExchangeFacts, node: fx.Node, topologies: Mapping[str, Topology]) -> float:
    """Work on a rank's own tokens before the call, where ranks differ in it."""
    if facts.same_tokens or not machine.imbalance:
        return 0.0
    return window_of(node, topologies).us(machine, machine.batch_tokens)


def _in_batches(
    machine: Machine, fabric: Fabric, facts: ExchangeFacts, node: fx.Node, tokens: TokenCounts, window_us: float
) -> Iterator[Way]:
    sharded = facts.sharded(tokens.hint, machine.skew)
    for batches in BATCHES:
        yield (
            "",
            MoeShardedPlan(fabric, tokens.most, batches),
            (),
            pushed_parts(machine, fabric, sharded, batches, window_us),
        )


def _between_gpus(
    machine: Machine, fabric: Fabric, facts: ExchangeFacts, node: fx.Node, tokens: TokenCounts, window_us: float
) -> Iterator[Way]:
    transposed = is_transposed(node)
    against = tuple(_against(facts, tokens))
    for variant, kernels in ((KERNELS, ExpertsKernel.TRITON), (HOPPER, ExpertsKernel.HOPPER)):
        few = 0
        if variant == HOPPER:
            against = (*against, *_against_hopper(facts))
            few = 0 if against or tokens.is_static else _few_tokens(machine, facts, tokens, transposed)
        lowered = MoeShardedPlan(fabric, tokens.most, kernels=kernels.value, few_tokens=few)
        runs_now = CURVES[KERNELS if tokens.hint <= few else variant]
        sharded = facts.sharded(tokens.hint, machine.skew)
        if has_few_rows(sharded.of_busiest, runs_now):
            against = (*against, few_rows(sharded.of_busiest, runs_now))
        parts = None
        if not against:
            own = not facts.same_tokens
            parts = gpu_parts(machine, fabric, sharded, runs_now, transposed, own, window_us)
        yield variant, lowered, against, parts


def _few_tokens(machine: Machine, facts: ExchangeFacts, tokens: TokenCounts, transposed: bool) -> int:
    """Up to how many Triton's kernels are the faster ones, by their curves."""

    def fastest(count: int) -> str | None:
        mixture = replace(facts.sharded(count, machine.skew).of_busiest, transposed=transposed)
        return fastest_kernels(machine, mixture, tuple(CURVES.values()))

    found = list(runs(fastest, grid_of((tokens.hint,), tokens.most, max(tokens.least, 1))))
    others = [first for first, name in found if name != CURVES[KERNELS]]
    return others[0] - 1 if others else tokens.most


def _against(facts: ExchangeFacts, tokens: TokenCounts) -> Iterator[Rejection]:
    if facts.dtype not in HALVES:
        yield Rejection("dtype_not_supported", "the kernels support bfloat16 and float16", (("dtype", facts.dtype),))
    if facts.hidden % ROW_MULTIPLE:
        message = f"rows are of a multiple of {ROW_MULTIPLE} elements"
        yield Rejection("rows_not_aligned", message, (("hidden", facts.hidden),))
    why = refusal(facts.world, tokens.most, facts.choices, facts.experts, facts.hidden)
    if why:
        values = (("max_tokens", tokens.most), ("choices", facts.choices), ("experts", facts.experts))
        yield Rejection("too_many", why, values)
    if not has_triton():
        yield Rejection("triton_missing", "Triton, which compiles the kernels, is not installed")


def _against_hopper(facts: ExchangeFacts) -> Iterator[Rejection]:
    if facts.width % ROW_MULTIPLE:
        message = f"rows of the Hopper kernels' operands are of a multiple of {ROW_MULTIPLE} elements"
        yield Rejection("rows_not_aligned", message, (("width", facts.width),))
    if lacks_hopper():
        message = "the Hopper kernels are for GPUs of compute capability 9.0, in a build with the CUDA part"
        yield Rejection("hopper_kernels_missing", message)


def _parameters(facts: ExchangeFacts, tokens: TokenCounts, machine: Machine, lowered: MoeShardedPlan) -> Values:
    sharded: ShardedMixture = facts.sharded(tokens.hint, machine.skew)
    busiest = sharded.of_busiest
    how: Values = (("batches", lowered.batches),)
    if lowered.fabric is Fabric.PEER:
        # Between the GEMMs there is room for whatever comes.
        rows = facts.world * lowered.max_tokens * facts.choices
        how = (("few_tokens", lowered.few_tokens),) if lowered.few_tokens else ()
        how = (*how, ("temporary_bytes", rows * facts.width * DTYPE_BYTES[facts.dtype]))
    return (
        *how,
        ("max_tokens", lowered.max_tokens),
        ("rows", busiest.rows),
        ("active_experts", busiest.active),
        *rows_by_expert(busiest, sharded.skew),
        ("wire_bytes", sharded.wire_bytes),
    )


def _estimate(machine: Machine, parts: PushedParts | GpuParts, facts: ExchangeFacts) -> Estimate:
    slowdown = machine.oversubscription(facts.world, facts.hosts)
    if isinstance(parts, GpuParts):
        terms = tuple(Term(name, us * slowdown) for name, us in asdict(parts).items() if us)
        return Estimate(terms)
    us = {name: value if name == "synchronize" else value * slowdown for name, value in asdict(parts).items()}
    experts = Term("experts", us.pop("experts"))
    estimate = Estimate(tuple(Term(name, value) for name, value in us.items())).plus(Estimate((experts,)))
    return replace(estimate, terms=tuple(sorted(estimate.terms, key=lambda term: term.name != "experts")))


def _site(found: FoundSite) -> tuple[ExchangeFacts, fx.Node]:
    facts, node = found.facts, found.structure
    assert isinstance(facts, ExchangeFacts) and isinstance(node, fx.Node), f"{found.site.id}: no exchange"
    return facts, node


def _call(chosen: Chosen, context: Context, channel: int = 0) -> ExpertExchangeCall:
    """The constants of the site's call, equal on all ranks."""
    facts, node = _site(chosen.found)
    lowered, config = chosen.proposal.plan, context.config
    assert isinstance(lowered, MoeShardedPlan), f"{chosen.found.site.id}: {lowered}"
    call = replace(_with_fabric(_given(node), facts, lowered), channel=channel)
    if facts.same_tokens:
        return replace(call, site=chosen.found.site.id, timeout_s=config.timeout_s)
    # Between its calls a rank may synchronize with one that compiles for another batch.
    timeout_s = max(config.timeout_s, config.compile_timeout_s)
    return replace(call, timeout_s=timeout_s, arena_bytes=config.arena_bytes)


def _given(node: fx.Node) -> ExpertExchangeCall:
    """The call as it stands in the graph."""
    text = node.args[-1]
    assert isinstance(text, str), f"{node.name}: {text}"
    return decode(ExpertExchangeCall, text)


def _with_fabric(call: ExpertExchangeCall, facts: ExchangeFacts, lowered: MoeShardedPlan) -> ExpertExchangeCall:
    return replace(
        call,
        fabric=lowered.fabric,
        max_tokens=lowered.max_tokens,
        choices=facts.choices,
        batches=lowered.batches,
        kernels=lowered.kernels,
        few_tokens=lowered.few_tokens,
    )
