"""The experts of a mixture as one operation (FlashDMoE's operator on one rank, without its padding and capacity).

Unfused, on every rank, with tokens that all ranks have::

    ids, order = sort(experts.view(-1)); offsets = cumsum(histc(ids))
    y = grouped_mm(act(grouped_mm(x[order // k], gate_up^T, offsets)), down^T, offsets)
    out = (y * weights.view(-1)[order][:, None])[inverse(order)].view(T, k, H).sum(1)

or, as `generate` decodes, with `gate_up[experts]` and `down[experts]` gathered for every choice. Both become
`weave::moe_experts`, which reads the weights of every expert that was chosen once, and no others; choices of other
ranks' experts are not computed. The router stays, and so does the all-reduce after it, which is a site of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.fx as fx

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.mixture import WIDE
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.splice import call_after, current_node, erase_dead, last_of, replace_uses
from weaveopt.graph.values import shape_of
from weaveopt.inductor.kernels import KernelContext
from weaveopt.ops.experts.activation import Activation
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.gpu import has_triton
from weaveopt.ops.experts.hopper import lacks_hopper
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.moe_fused.candidates import HOPPER, KERNELS, ONE, RULE, Host, candidates
from weaveopt.rule import Chosen, Context, FoundSite, Memory, Placement, Proposal
from weaveopt.sites.mixture.experts import Experts, Linear
from weaveopt.sites.mixture.matcher import KIND, MixtureFacts

aten = torch.ops.aten


_KERNELS = {
    KERNELS: ExpertsKernel.TRITON,
    HOPPER: ExpertsKernel.HOPPER,
    ONE: ExpertsKernel.ONE,
    WIDE: ExpertsKernel.WIDE,
}


class MoeFused:
    """The rule; see the module's docstring."""

    name = RULE
    kinds = frozenset({KIND})

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        facts, experts = _site(found)
        surroundings = KernelContext.of(context.machine, context.topologies.values())
        host, transposed = Host(has_triton(), lacks_hopper()), experts.up.transposed or experts.down.transposed
        return tuple(
            Proposal(candidate, experts.nodes)
            for candidate in candidates(facts, transposed, tokens, surroundings, host, usable_only)
        )

    def memory(self, chosen: Chosen, context: Context) -> Memory | None:
        return None

    def replace(self, graph: fx.Graph, chosen: Chosen, placement: Placement, context: Context) -> tuple[str, ...]:
        facts, experts = _site(chosen.found)
        candidate = chosen.proposal.candidate
        call = dataclasses.replace(
            call_of(facts.activation),
            kernels=_KERNELS.get(
                candidate.table[-1].variant if candidate.table else candidate.variant, ExpertsKernel.TRITON
            ),
            table=tuple((row.max_tokens, _KERNELS[row.variant]) for row in candidate.table[:-1]),
        )
        x = current_node(experts.x)
        operands = [
            x,
            _by_token(graph, current_node(experts.experts), experts.num_choices),
            _by_token(graph, current_node(experts.weights), experts.num_choices),
            _weight(graph, experts.up),
            None if experts.up.bias is None else current_node(experts.up.bias),
            _weight(graph, experts.down),
            None if experts.down.bias is None else current_node(experts.down.bias),
        ]
        target = torch.ops.weave.moe_experts.default
        position = last_of(graph, [each for each in operands if each is not None])
        made = call_after(graph, position, target, (*operands, call.encode()), like=experts.output)
        replace_uses(graph, experts.output, made)
        erase_dead(graph, chosen.proposal.consumes)
        return (f"{RULE}: choices are weighted and summed in fp32, in their order, and rounded once",)


def call_of(act: Activation) -> ExpertsCall:
    """The operation's constants."""
    return ExpertsCall(act.name, act.gated, act.interleaved, act.alpha, act.limit)


def _site(found: FoundSite) -> tuple[MixtureFacts, Experts]:
    facts, experts = found.facts, found.structure
    assert isinstance(facts, MixtureFacts) and isinstance(experts, Experts), f"{found.site.id}: no mixture"
    return facts, experts


def _by_token(graph: fx.Graph, node: fx.Node, choices: int) -> fx.Node:
    """[tokens, choices] of what may have other dimensions."""
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    if value.ndim == 2 and shape_of(value)[1] == choices:
        return node
    return call_after(graph, last_of(graph, [node]), aten.view.default, (node, [-1, choices]), like=node)


def _weight(graph: fx.Graph, linear: Linear) -> fx.Node:
    """[experts, out, in], a view where the model keeps it transposed."""
    weight = current_node(linear.weight)
    if not linear.transposed:
        return weight
    return call_after(graph, last_of(graph, [weight]), aten.permute.default, (weight, [0, 2, 1]), like=weight)
