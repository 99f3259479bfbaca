"""A mixture's tokens and results, pushed straight into the memory of the ranks that need them.

Unfused, on every rank of a group::

    y = weave::expert_exchange(x, experts, weights, gate_up, gate_up_bias, down, down_bias, call)   # all-to-all

Fused: the same operation with a fabric and its memory in `call`. One row travels for each (token, destination), results
go into [token][choice] at home, and nothing is counted on the host first.

Where ranks hold batches of their own, the call is the same in whatever graph a rank has compiled, and its memory is no
part of the graph's: all ranks reserve it in the first call, together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model import Machine
from weaveopt.cost_model.exchange import PushedParts, pushed_parts
from weaveopt.cost_model.mixture import rows_by_expert
from weaveopt.fabrics.reaching import not_measured, reaching
from weaveopt.fabrics.rows_call import decode
from weaveopt.graph.splice import call_after, erase_dead, replace_uses
from weaveopt.ops.moe_sharded.call import ExpertExchangeCall
from weaveopt.ops.moe_sharded.op import SITES
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Term, Values
from weaveopt.records.site import TokenCounts
from weaveopt.rule import BufferRequest, Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.exchange import KIND, ExchangeFacts

RULE = "moe_sharded"
BATCHES = (1, 2)
"""Wait for all rows, or begin with this rank's own: which reads the weights twice."""


@dataclass(frozen=True)
class Lowered:
    """What the rule remembers of a candidate."""

    fabric: Fabric
    max_tokens: int
    batches: int


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
            for candidate, lowered in _candidates(facts, _given(node), tokens, context, usable_only)
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
        target = torch.ops.weave.expert_exchange.default
        fused = call_after(graph, node, target, (*node.args[:-1], call.encode()), like=node)
        replace_uses(graph, node, fused)
        erase_dead(graph, chosen.proposal.consumes)
        return ()


def _candidates(
    facts: ExchangeFacts, given: ExpertExchangeCall, tokens: TokenCounts, context: Context, usable_only: bool
) -> Iterator[tuple[Candidate, Lowered]]:
    machine, sharded = context.machine, facts.sharded(tokens.hint, context.machine.skew)
    busiest = sharded.of_busiest
    sizes = (
        ("rows", busiest.rows),
        ("active_experts", busiest.active),
        *rows_by_expert(busiest, sharded.skew),
        ("wire_bytes", sharded.wire_bytes),
    )
    for fabric, unreachable in reaching(context.topologies[facts.group], machine, SITES):
        for batches in BATCHES:
            parts = pushed_parts(machine, fabric, sharded, batches)
            unknown = parts is None and not unreachable
            reasons = (not_measured(machine, fabric, "all_gather"),) if unknown else unreachable
            if reasons and usable_only:
                continue
            lowered = Lowered(fabric, tokens.most, batches)
            parameters: Values = (("batches", batches), ("max_tokens", tokens.most), *sizes)
            if not reasons:
                buffers = SITES[fabric].buffers(_with_fabric(given, facts, lowered))
                parameters = (*parameters, ("arena_bytes", sum(buffer.num_bytes for buffer in buffers)))
            estimate = None if parts is None else _estimate(machine, parts, facts)
            yield Candidate(RULE, fabric, "", parameters, estimate, reasons), lowered


def _estimate(machine: Machine, parts: PushedParts, facts: ExchangeFacts) -> Estimate:
    """`experts` as without a rewrite, so their error cancels in a saving."""
    slowdown = machine.oversubscription(facts.world, facts.hosts)
    us = {name: value if name == "synchronize" else value * slowdown for name, value in asdict(parts).items()}
    experts = Term("experts", us.pop("experts"))
    uncertain = Estimate(tuple(Term(name, value) for name, value in us.items()), machine.relative_error)
    estimate = uncertain.plus(Estimate((experts,)))
    return replace(estimate, terms=tuple(sorted(estimate.terms, key=lambda term: term.name != "experts")))


def _site(found: FoundSite) -> tuple[ExchangeFacts, fx.Node]:
    facts, node = found.facts, found.structure
    assert isinstance(facts, ExchangeFacts) and isinstance(node, fx.Node), f"{found.site.id}: no exchange"
    return facts, node


def _call(chosen: Chosen, context: Context, channel: int = 0) -> ExpertExchangeCall:
    """The constants of the site's call, equal on all ranks."""
    facts, node = _site(chosen.found)
    lowered, config = chosen.proposal.plan, context.config
    assert isinstance(lowered, Lowered), f"{chosen.found.site.id}: {lowered}"
    call = replace(_with_fabric(_given(node), facts, lowered), channel=channel)
    if facts.same_tokens:
        return replace(call, site=chosen.found.site.id, timeout_s=config.timeout_s)
    # In the middle of its calls a rank may meet one that compiles for another batch.
    timeout_s = max(config.timeout_s, config.compile_timeout_s)
    return replace(call, timeout_s=timeout_s, arena_bytes=config.arena_bytes)


def _given(node: fx.Node) -> ExpertExchangeCall:
    """The call as it stands in the graph."""
    text = node.args[-1]
    assert isinstance(text, str), f"{node.name}: {text}"
    return decode(ExpertExchangeCall, text)


def _with_fabric(call: ExpertExchangeCall, facts: ExchangeFacts, lowered: Lowered) -> ExpertExchangeCall:
    return replace(
        call,
        fabric=lowered.fabric,
        max_tokens=lowered.max_tokens,
        choices=facts.choices,
        batches=lowered.batches,
    )
