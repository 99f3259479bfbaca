"""Sites of the kind `expert_exchange`: mixtures whose tokens travel to the ranks of their experts, as one operation.

    y = weave::expert_exchange(x, experts, weights, gate_up, gate_up_bias, down, down_bias, call)

The operation is part of the graphs of models with `ep_implementation="weave"`, and runs through the library there.
Ranks with different batches compile graphs of other sizes, at other times, and cannot compare them: such a site is
priced for the option `batch_tokens` on every rank, whatever this one has, so that all come to the same decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.cost_model.exchange import ShardedMixture
from weaveopt.cost_model.mixture import Mixture
from weaveopt.graph.exchange import Exchange, exchange_of, sharded_of
from weaveopt.graph.facts import count_tokens, module_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.records.candidate import Fabric, Rejection, Values, values_of
from weaveopt.records.site import Site, TokenCounts
from weaveopt.records.skew import Skew
from weaveopt.rule import Context, FoundSite

KIND = "expert_exchange"


@dataclass(frozen=True)
class ExchangeFacts:
    """The computation of the operation, equal on every rank."""

    group: str
    world: int
    hosts: int
    hidden: int
    width: int
    experts: int
    """Experts of one rank."""
    choices: int
    activation: str
    gated: bool
    dtype: str
    same_tokens: bool
    """True if all ranks have the same number of tokens, and so the same graph."""
    independent: bool = False
    """True if ranks promise no common calls."""

    def values(self) -> Values:
        return values_of(self)

    def sharded(self, tokens: int, skew: Skew) -> ShardedMixture:
        """Return the sharded mixture for `tokens` tokens on each rank and choices distributed as `skew` says."""
        of_rank = Mixture(tokens, self.choices, self.experts, self.hidden, self.width, self.gated, self.dtype)
        return ShardedMixture(of_rank, self.world, skew)


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
    of_rank, topology = sharded_of(node, exchange).of_rank, context.topologies.get(exchange.group)
    reasons: tuple[Rejection, ...] = ()
    if topology is None or topology.world != exchange.world:
        reasons = (Rejection("group_not_known", "the process group is not known in this process"),)
    elif exchange.world == 1:
        reasons = (Rejection("one_rank", "the group has one rank: nothing travels"),)
    if reasons or topology is None:
        return FoundSite(_site(node, exchange, "", TokenCounts(of_rank.tokens), (), reasons), frozenset((node,)))
    facts = ExchangeFacts(
        exchange.group, exchange.world, topology.num_hosts, of_rank.hidden, of_rank.width, of_rank.experts,
        round(of_rank.choices), exchange.activation, exchange.gated, exchange.dtype, exchange.same_tokens,
        exchange.independent,
    )  # fmt: skip
    batches = "" if exchange.same_tokens else ", batches of their own"
    if exchange.independent:
        batches = ", independent ranks"
    text = f"exchange({facts.choices} of {facts.world} x {facts.experts} experts, {facts.activation}{batches})"
    if not exchange.same_tokens:
        planned = context.machine.batch_tokens
        tokens = TokenCounts(planned, most=max(planned, context.config.max_tokens))
        site = _site(node, exchange, text, tokens, facts.values(), ())
        return FoundSite(site, frozenset((node,)), facts, node)
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    hint, most = count_tokens(value, context.config.max_tokens)
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
        groups=(exchange.group,),
        module=module_of(node),
        collectives=(node.name,),
        description=description,
        tokens=tokens,
        facts=facts,
        rejections=rejections,
    )


def is_transposed(node: fx.Node) -> bool:
    """True if the first weight is stored as `[experts, in, out]`."""
    weight = node.args[3]
    value = tensor_of(weight) if isinstance(weight, fx.Node) else None
    if value is None:
        return False
    # A symbol is no answer, and to ask for one would be a guard.
    of_row, of_depth = (stride if isinstance(stride, int) else 0 for stride in value.stride()[1:])
    return of_row == 1 != of_depth
