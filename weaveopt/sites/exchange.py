"""Sites of the kind `expert_exchange`: mixtures whose tokens travel to the ranks of their experts, as one operation.

    y = weave::expert_exchange(x, experts, weights, gate_up, gate_up_bias, down, down_bias, call)

The operation stands in graphs of models with `ep_implementation="weave"`, and runs through the library there. Ranks
that may hold other numbers of tokens compile other graphs: such a site is left, since no decision could be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.cost_model.exchange import Mixture
from weaveopt.graph.exchange import Exchange, exchange_of, sizes_of
from weaveopt.graph.facts import count_tokens, module_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.records.candidate import Fabric, Rejection, Values, values_of
from weaveopt.records.site import DTYPE_BYTES, Site, TokenCounts
from weaveopt.rule import Context, FoundSite

KIND = "expert_exchange"


@dataclass(frozen=True)
class ExchangeFacts:
    """What the operation computes on every rank."""

    group: str
    world: int
    hosts: int
    hidden: int
    gates: int
    inner: int
    experts: int
    """Of a rank."""
    choices: int
    activation: str
    gated: bool
    dtype: str

    def values(self) -> Values:
        return values_of(self)

    def mixture(self, tokens: int) -> Mixture:
        """Of so many tokens on each rank."""
        return Mixture(
            tokens, self.choices, self.experts, self.hidden, self.gates, self.inner, self.dtype,
            self.hidden * DTYPE_BYTES[self.dtype], self.world,
        )  # fmt: skip


class ExchangeMatcher:
    """See the module's docstring."""

    kind = KIND

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        found = ((node, exchange_of(node)) for node in graph.nodes)
        return tuple(
            _found(node, exchange, context)
            for node, exchange in found
            if exchange is not None and exchange.fabric == Fabric.LIBRARY
        )


def _found(node: fx.Node, exchange: Exchange, context: Context) -> FoundSite:
    tokens, choices, gates, inner = sizes_of(node)
    topology = context.topologies.get(exchange.group)
    reasons: tuple[Rejection, ...] = ()
    if not exchange.same_tokens:
        message = "ranks may hold other numbers of tokens, so their graphs and decisions are not the same"
        reasons = (Rejection("tokens_differ", message, (("group", exchange.group),)),)
    elif topology is None or topology.world != exchange.world:
        reasons = (Rejection("group_not_known", "the process group is not known in this process"),)
    elif exchange.world == 1:
        reasons = (Rejection("one_rank", "the group has one rank: nothing travels"),)
    if reasons or topology is None:
        return FoundSite(_site(node, exchange, "", TokenCounts(tokens), (), reasons), frozenset((node,)))
    facts = ExchangeFacts(
        exchange.group, exchange.world, topology.num_hosts, exchange.hidden, gates, inner, exchange.num_experts,
        choices, exchange.activation, exchange.gated, exchange.dtype,
    )  # fmt: skip
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    hint, most = count_tokens(value, context.config.max_tokens)
    text = f"exchange({facts.choices} of {facts.world} x {facts.experts} experts, {facts.activation})"
    site = _site(node, exchange, text, TokenCounts(hint, most=most), facts.values(), ())
    return FoundSite(site, frozenset((node,)), facts, node, token_value=node)


def _site(
    node: fx.Node,
    exchange: Exchange,
    description: str,
    tokens: TokenCounts,
    facts: Values,
    rejections: tuple[Rejection, ...],
) -> Site:
    return Site(
        id=node.name,
        kind=KIND,
        groups=(exchange.group,) if exchange.same_tokens else (),
        module=module_of(node),
        collectives=(node.name,),
        description=description,
        tokens=tokens,
        facts=facts,
        rejections=rejections,
    )
