"""A mixture's tokens and results, pushed straight into the memory of the ranks that need them.

Unfused, on every rank of a group::

    y = weave::expert_exchange(x, experts, weights, gate_up, gate_up_bias, down, down_bias, call)   # all-to-all

Fused: the same operation with a fabric and its memory in `call`. One row travels for each (token, destination), results
go into [token][choice] at home, and nothing is counted on the host first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model import Machine, host_us, memory_us
from weaveopt.cost_model.exchange import Mixture, combine_us, experts_us, gather_us, pushed_us, synchronize_us
from weaveopt.fabrics.reaching import not_measured, reaching
from weaveopt.fabrics.rows_call import decode
from weaveopt.graph.splice import call_after, erase_dead, replace_uses
from weaveopt.ops.moe_sharded.call import ExpertExchangeCall
from weaveopt.ops.moe_sharded.op import SITES
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Term
from weaveopt.records.site import TokenCounts
from weaveopt.rule import BufferRequest, Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.exchange import KIND, ExchangeFacts

RULE = "moe_sharded"
BATCHES = (1, 2)
"""Wait for all rows, or begin with this rank's own: which reads the weights twice."""
_NATIVE_CALLS = 8
"""Into native code and out of torch in a call, each as dear for the host as a kernel."""


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
            for candidate, lowered in _candidates(facts, tokens, context, usable_only)
        )

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
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
    facts: ExchangeFacts, tokens: TokenCounts, context: Context, usable_only: bool
) -> Iterator[tuple[Candidate, Lowered]]:
    machine, mixture = context.machine, facts.mixture(tokens.hint)
    for fabric, unreachable in reaching(context.topologies[facts.group], machine, SITES):
        synchronize = synchronize_us(machine, fabric, mixture)
        unknown = synchronize is None and not unreachable
        reasons = (not_measured(machine, fabric, "all_gather"),) if unknown else unreachable
        if reasons and usable_only:
            continue
        for batches in BATCHES:
            estimate = None if synchronize is None else _estimate(machine, mixture, synchronize, batches, facts.hosts)
            parameters = (("batches", batches), ("max_tokens", tokens.most))
            yield Candidate(RULE, fabric, "", parameters, estimate, reasons), Lowered(fabric, tokens.most, batches)


def _estimate(machine: Machine, mixture: Mixture, synchronize: float, batches: int, hosts: int) -> Estimate:
    """`experts` (as without a rewrite, so their error cancels in a saving), `weights` (read once more for a second
    batch), `push`, `gather`, `combine`, `synchronize`, `host`."""
    slowdown = machine.oversubscription(mixture.world, hosts)
    # With rows enough for each expert its weights are read once for several tiles of rows anyway; what is charged is
    # the whole of them, for a wait that nobody has measured: the second batch has to be asked for.
    again = memory_us(machine, mixture.weight_bytes) if batches > 1 else 0.0
    uncertain = (
        Term("synchronize", synchronize),
        Term("weights", again * slowdown),
        Term("push", pushed_us(machine, mixture) * slowdown),
        Term("gather", gather_us(machine, mixture) * slowdown),
        Term("combine", combine_us(machine, mixture) * slowdown),
        Term("host", _NATIVE_CALLS * host_us(machine) * slowdown),
    )
    experts = Term("experts", experts_us(machine, mixture) * slowdown)
    estimate = Estimate(uncertain, machine.relative_error).plus(Estimate((experts,)))
    return replace(estimate, terms=tuple(sorted(estimate.terms, key=lambda term: term.name != "experts")))


def _site(found: FoundSite) -> tuple[ExchangeFacts, fx.Node]:
    facts, node = found.facts, found.structure
    assert isinstance(facts, ExchangeFacts) and isinstance(node, fx.Node), f"{found.site.id}: no exchange"
    return facts, node


def _call(chosen: Chosen, context: Context, channel: int = 0) -> ExpertExchangeCall:
    """The constants of the site's call, equal on all ranks."""
    facts, node = _site(chosen.found)
    lowered, text = chosen.proposal.plan, node.args[-1]
    assert isinstance(lowered, Lowered) and isinstance(text, str), f"{chosen.found.site.id}: {lowered}, {text}"
    return replace(
        decode(ExpertExchangeCall, text),
        site=chosen.found.site.id,
        fabric=lowered.fabric,
        max_tokens=lowered.max_tokens,
        timeout_s=context.config.timeout_s,
        channel=channel,
        choices=facts.choices,
        batches=lowered.batches,
    )
