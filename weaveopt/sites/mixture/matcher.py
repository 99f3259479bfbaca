"""Matcher of the kind `mixture`: the experts of a mixture, between the router's choice and the sum over it.

    chosen, weights = router(x)                                     # [tokens, choices]
    out[t] = sum over j: weights[t, j] * (act(x[t] @ up[chosen[t, j]].T) @ down[chosen[t, j]].T)

A site consists of the nodes that compute `out` from the others, in whatever form the graph holds it
(`sites.mixture.forms`). The router and shared experts stay as they are, and so does the all-reduce that follows, which
is a separate site. Every rank sees all tokens; with expert parallelism it computes the choices of the experts that it
stores, and all others add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.graph.facts import DTYPE_NAMES, module_of
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.values import num_elements, shape_of
from weaveopt.ops.experts.activation import Activation
from weaveopt.records.candidate import Rejection, Values, values_of
from weaveopt.records.site import Site, TokenCounts
from weaveopt.rule import Context, FoundSite
from weaveopt.sites.mixture.experts import Experts, Linear
from weaveopt.sites.mixture.forms import experts_of
from weaveopt.sites.mixture.routing import Routing, routing_of

KIND = "mixture"


@dataclass(frozen=True)
class MixtureFacts:
    """The computation of a mixture on every rank."""

    experts: int
    """Number of experts stored on this rank, whole or as a shard of each."""
    experts_in_all: int
    """Number of experts that tokens choose from; 0 if unknown."""
    choices: int
    """Number of experts chosen for each token."""
    hidden: int
    width: int
    """Intermediate width of an expert on this rank."""
    dtype: str
    weights_dtype: str
    form: str
    """`grouped_mm` or `batched_mm`: how the graph computes it."""
    activation: Activation
    has_biases: bool
    has_remote_experts: bool
    """True if the input includes choices of other ranks' experts, which are masked."""
    scores: str
    groups: int

    def values(self) -> Values:
        return (*values_of(self, "activation"), ("activation", str(self.activation)))

    @property
    def choices_here(self) -> float:
        """Choices of a token, on average, that are experts of this rank."""
        return self.choices * self.experts / self.experts_in_all if self.has_remote_experts else float(self.choices)


class MixtureMatcher:
    """See the module's docstring."""

    kind = KIND

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        return tuple(_found(last, experts, context) for last, experts in experts_of(graph))


def _found(last: fx.Node, experts: Experts | Rejection, context: Context) -> FoundSite:
    if isinstance(experts, Rejection):
        site = Site(id=last.name, kind=KIND, groups=(), module=module_of(last), rejections=(experts,))
        return FoundSite(site, frozenset({last}))
    facts = _facts(experts)
    refused = facts if isinstance(facts, Rejection) else None
    known = facts if isinstance(facts, MixtureFacts) else None
    value = tensor_of(experts.x)
    assert value is not None, f"{experts.x.name} makes no tensor"
    tokens = shape_of(value)[0]
    most = tokens if isinstance(value.shape[0], int) else max(tokens, context.config.max_tokens)
    site = Site(
        id=experts.output.name,
        kind=KIND,
        groups=(),
        module=module_of(last),
        description=_text(experts),
        tokens=TokenCounts(tokens, most=most),
        facts=() if known is None else known.values(),
        rejections=() if refused is None else (refused,),
    )
    return FoundSite(site, experts.nodes, known, experts, experts.numbers, experts.output)


def _facts(experts: Experts) -> MixtureFacts | Rejection:
    values = [tensor_of(each) for each in (experts.x, experts.up.weight, experts.down.weight, experts.output)]
    x, up, down, out = values
    weights, chosen = tensor_of(experts.weights), tensor_of(experts.experts)
    if chosen is None or x is None or up is None or down is None or out is None or weights is None:
        return Rejection("shape_not_known", "an operand is no tensor")
    if x.ndim != 2 or up.ndim != 3 or down.ndim != 3:
        return Rejection("shape_not_known", "rows are not [tokens, hidden], or weights not [experts, out, in]")
    if x.dtype not in DTYPE_NAMES:
        dtype = (("dtype", str(x.dtype).removeprefix("torch.")),)
        return Rejection("dtype_not_supported", "the kernels support bfloat16, float16 and float32", dtype)
    if {up.dtype, down.dtype, out.dtype} != {x.dtype} or weights.dtype not in DTYPE_NAMES:
        return Rejection("dtype_not_supported", "rows, weights and result differ in dtype")
    num_experts, wide, hidden = _sizes(experts.up)
    _, out_hidden, width = _sizes(experts.down)
    per_row = 2 * width if experts.activation.gated else width
    if (hidden, out_hidden, wide) != (shape_of(x)[1], hidden, per_row):
        sizes = (("hidden", hidden), ("width", width), ("up", wide), ("down", out_hidden))
        return Rejection("shape_not_known", "the weights of the two projections do not fit each other", sizes)
    num_chosen = shape_of(x)[0] * experts.num_choices
    if shape_of(out) != shape_of(x) or any(num_elements(each) != num_chosen for each in (chosen, weights)):
        counts = (("tokens", shape_of(x)[0]), ("choices", experts.num_choices), ("weights", num_elements(weights)))
        return Rejection("shape_not_known", "choices and weights are not those of the tokens", counts)
    routing = routing_of(experts.experts, experts.weights)
    return MixtureFacts(
        experts=num_experts,
        experts_in_all=max(routing.num_experts, num_experts),
        choices=experts.num_choices,
        hidden=hidden,
        width=width,
        dtype=DTYPE_NAMES[x.dtype],
        weights_dtype=DTYPE_NAMES[weights.dtype],
        form=experts.form,
        activation=experts.activation,
        has_biases=experts.up.bias is not None or experts.down.bias is not None,
        has_remote_experts=experts.has_remote_experts,
        scores=routing.scores,
        groups=routing.groups,
    )


def _sizes(linear: Linear) -> tuple[int, int, int]:
    """Experts, outputs, inputs."""
    value = tensor_of(linear.weight)
    assert value is not None, f"{linear.weight.name} makes no tensor"
    experts, out, into = shape_of(value)
    return (experts, into, out) if linear.transposed else (experts, out, into)


def _text(experts: Experts) -> str:
    bias = " + bias" if experts.up.bias is not None else ""
    inside = f"z = x @ up[e]^T{bias}; {experts.activation} @ down[e]^T{bias}"
    return f"sum over {experts.num_choices} of weight * ({inside})"


__all__ = ["KIND", "MixtureFacts", "MixtureMatcher", "Routing"]
