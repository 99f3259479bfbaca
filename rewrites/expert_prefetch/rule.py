"""A mixture whose experts' weights travel to the tokens, not the tokens to the experts: DWDP, section 2.

Unfused, on every rank of a group::

    y = weave::expert_exchange(x, experts, weights, gate_up, gate_up_bias, down, down_bias, call)   # all-to-all

Fused::

    y = weave::expert_prefetch(x, experts, weights, gate_up, gate_up_bias, down, down_bias, call)

Placement and arguments are the same: each rank has some experts, and computes its own tokens with those of all ranks,
which it reads in their memory. No rank is the busiest and none waits, so it pays where ranks differ: in routing, in
tokens, in the number of calls. Where they do not, every rank reads all experts for what others would have read a part
of, and exchanging tokens, which another rule does at the same sites, is the faster.

Weights are shared when the graph is bound (`weaveopt/fabrics/exported.py`). The experts' kernels read them in place, or
on GPUs copy engines pull them a layer ahead: one operation a layer waits for its own experts, computes, and enqueues
the pull for the layer after next, so there is nothing in the graph that Inductor could move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.fabrics.rows_call import decode
from weaveopt.graph.splice import call_after, erase_dead, replace_uses
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall, SpreadExpertsCall
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.expert_prefetch.candidates import RULE, PrefetchPlan, candidates
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.mixture.exchange_matcher import KIND, ExchangeFacts


class ExpertPrefetch:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, node = _site(found)
        return tuple(
            Proposal(candidate, frozenset((node,)), plan)
            for candidate, plan in candidates(facts, node, tokens, context)
            if candidate.allowed or not usable_only
        )

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return Memory(reads_exported=True)

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        facts, node = _site(chosen.found)
        plan = chosen.proposal.plan
        assert isinstance(plan, PrefetchPlan), f"{chosen.found.site.id}: {plan}"
        call = _call(node, facts, plan, chosen.found.site.id if facts.same_tokens else "")
        arguments = (*node.args[:-1], call.encode())
        fused = call_after(graph, node, torch.ops.weave.expert_prefetch.default, arguments, like=node)
        replace_uses(graph, node, fused)
        erase_dead(graph, chosen.proposal.consumes)
        return ()


def _call(node: fx.Node, facts: ExchangeFacts, plan: PrefetchPlan, site: str) -> ExpertPrefetchCall:
    """The constants of the site's call. Graphs of other batches have the same one, so it names no site of this graph
    where ranks hold batches of their own."""
    text = node.args[-1]
    assert isinstance(text, str), f"{node.name}: {text}"
    given = decode(ExpertExchangeCall, text)
    shared = {field.name: getattr(given, field.name) for field in fields(SpreadExpertsCall)}
    shared |= {"fabric": plan.fabric, "choices": facts.choices, "site": site or given.site}
    chosen = {field.name: getattr(plan, field.name) for field in fields(PrefetchPlan) if field.name != "fabric"}
    return ExpertPrefetchCall(**shared, **chosen, last=not _is_read_again(node))


def _is_read_again(node: fx.Node) -> bool:
    """True if a later mixture of the graph has the same weights, as the other half of a batch has."""
    weight, each = _stored(node.args[3]), node.next
    while each.op != "root":
        if each.target in _MIXTURES and _stored(each.args[3]) is weight:
            return True
        each = each.next
    return False


_MIXTURES = (torch.ops.weave.expert_exchange.default, torch.ops.weave.expert_prefetch.default)


def _stored(weight: object) -> object:
    """The graph's input that a weight is, or is a view of."""
    while isinstance(weight, fx.Node) and weight.op == "call_function" and weight.args:
        weight = weight.args[0]
    return weight


def _site(found: FoundSite) -> tuple[ExchangeFacts, fx.Node]:
    facts, node = found.facts, found.structure
    assert isinstance(facts, ExchangeFacts) and isinstance(node, fx.Node), f"{found.site.id}: no exchange"
    return facts, node
