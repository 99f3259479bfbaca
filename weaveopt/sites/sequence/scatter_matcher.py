"""Matcher of the kind `reduce_scatter`: GEMM -> reduce-scatter (-> + residual -> norm of the shard).

    partial = a @ b                                         # several, where gradients of q, k and v are added
    shard = reduce_scatter(partial, scatter_dim)            # 0, 1 (within each sequence) or the last
    total = residual_shard + shard                          # absent in backward passes
    normalized = rms_norm(total) * weight                   # absent where none follows

Rows of the GEMM are [outer, world, inner], and each rank keeps [outer, inner] of them (`sites.sequence.rows`). Two
reduce-scatters whose results are added are one site. The gradient of a weight that ranks hold a part of each is a site
too. A reduce-scatter of what no GEMM makes (a vocabulary-parallel embedding) is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.graph.facts import DTYPE_NAMES, count_tokens, group_of, module_of
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.scalars import symbols_of
from weaveopt.graph.values import dtype_name
from weaveopt.records.candidate import Rejection, Values, values_of
from weaveopt.records.site import Site, TokenCounts
from weaveopt.rule import Context, FoundSite
from weaveopt.sites.sequence.rows import Rows, against_group, against_row_size, hint_of, scattered_rows
from weaveopt.sites.sequence.scatter_epilogue import Scattered, partial_of, scattered_at
from weaveopt.sites.sequence.scatter_producer import Partial
from weaveopt.sites.shared.epilogue import REDUCE_SCATTER, WAIT
from weaveopt.sites.shared.norms import find_norms

KIND = "reduce_scatter"


OWN_FACTS = ("k", "num_gemms", "has_addend", "has_bias")
"""Facts that concern one rank alone."""


@dataclass(frozen=True)
class ScatterFacts:
    """The computation of a GEMM and its reduce-scatter, equal on every rank; symbolic sizes are replaced by their
    hints."""

    group: str
    world: int
    hosts: int
    dim: int
    """0: whole activations are cut along their rows; 1: each of `outer` sequences is; -1: columns are."""
    outer: int
    m: int
    """Rows of the partial result."""
    n: int
    k: int
    """Sum of the contracted sizes of all GEMMs whose results are added."""
    dtype: str
    """Dtype of the communicated partial result."""
    gemm_dtype: str
    """Dtype of the GEMM's result."""
    out_dtype: str
    """Dtype of the shard after casts."""
    reduce_op: str = "sum"
    """`sum` or `avg`."""
    scale: float = 1.0
    """Factor of the sum before anything is added to it, applied before or after communication."""
    num_gemms: int = 1
    """GEMMs whose results are added, those of `num_partials` together."""
    num_partials: int = 1
    """Reduce-scatters whose results are added."""
    has_addend: bool = False
    """True if the partial result includes rows that no GEMM computes."""
    is_scaled: bool = False
    """True if the operands are FP8 with scales."""
    has_bias: bool = False
    """True if every rank adds a bias vector before the reduction."""
    has_bias_after: bool = False
    has_scale_after: bool = False
    """True if the sum with its bias is scaled before the residual is added."""
    has_post_norm: bool = False
    """True if the sum with its bias is normalized before the residual is added."""
    has_residual: bool = False
    has_norm: bool = False
    """True if the site ends with a norm of the shard."""
    shard_is_saved: bool = False
    """True if the shard before the residual is a graph output, which a backward pass reads."""
    sum_is_read: bool = True
    """True if the shard, with its residual, has a consumer other than the site's norm."""

    def values(self) -> Values:
        return values_of(self)


class ScatterMatcher:
    """See the module's docstring."""

    kind = KIND

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        collectives = [node for node in graph.nodes if is_call(node, REDUCE_SCATTER)]
        if not collectives:
            return ()
        norms = find_norms(graph)
        found: list[FoundSite] = []
        merged: set[fx.Node] = set()
        for node in collectives:
            partial = None if node in merged else partial_of(node)
            if partial is None:
                continue
            scattered = scattered_at(node, partial, norms) if isinstance(partial, Partial) else partial
            if isinstance(scattered, Scattered):
                merged.update(scattered.collectives)
            found.append(_found(node, scattered, context))
        return tuple(found)


def _found(node: fx.Node, scattered: Scattered | Rejection, context: Context) -> FoundSite:
    if isinstance(scattered, Rejection):
        exchanged = frozenset((node, *(user for user in node.users if is_call(user, WAIT))))
        return FoundSite(_site(node, (node,), "", None, TokenCounts(0), (scattered,)), exchanged)
    gemm = scattered.partials[0].gemms[0].node
    value = tensor_of(gemm)
    assert value is not None, f"{gemm.name} makes no tensor"
    hint, most = count_tokens(value, context.config.max_tokens)
    tokens = TokenCounts(hint, most=most)
    facts = _facts(scattered, context)
    if not isinstance(facts, ScatterFacts):
        return FoundSite(_site(node, scattered.collectives, "", None, tokens, facts), scattered.nodes)
    scalars = [scalar for partial in scattered.partials for scalar in partial.scalars]
    numbers = (*scalars, *scattered.scalars, *(() if scattered.after is None else scattered.after.scalars))
    own_text = "" if scattered.after is None else scattered.after.own_text
    site = _site(node, scattered.collectives, _text(facts, scattered) + own_text, facts, tokens, (), own_text)
    return FoundSite(site, scattered.nodes, facts, scattered, symbols_of(numbers), gemm)


def _site(
    node: fx.Node,
    collectives: tuple[fx.Node, ...],
    description: str,
    facts: ScatterFacts | None,
    tokens: TokenCounts,
    rejections: tuple[Rejection, ...],
    own_text: str = "",
) -> Site:
    return Site(
        id=node.name,
        kind=KIND,
        groups=(group_of(node),),
        module=module_of(node),
        collectives=tuple(each.name for each in collectives),
        description=description,
        own_text=own_text,
        tokens=tokens,
        facts=() if facts is None else facts.values(),
        own_facts=OWN_FACTS,
        rejections=rejections,
    )


def _facts(scattered: Scattered, context: Context) -> ScatterFacts | tuple[Rejection, ...]:
    collective, partial, after = scattered.collectives[0], scattered.partials[0], scattered.after
    world, gemm = collective.args[2], partial.gemms[0]
    product, value, shard = (tensor_of(each) for each in (gemm.node, collective, scattered.shard))
    assert isinstance(world, int), collective.args
    assert product is not None and value is not None and shard is not None, f"{collective.name} makes no tensor"
    topology = context.topologies.get(group_of(collective))
    reasons = list(against_group(collective, world, topology))
    rows = scattered_rows(partial.arrangement, world, product.shape)
    if isinstance(rows, Rejection):
        reasons.append(rows)
    for dtype in dict.fromkeys((value.dtype, product.dtype)):
        if dtype not in DTYPE_NAMES:
            values = (("dtype", str(dtype).removeprefix("torch.")),)
            reasons.append(
                Rejection("dtype_not_supported", "the kernels support bfloat16, float16 and float32", values)
            )
    reasons += against_row_size(product)
    if reasons or topology is None or not isinstance(rows, Rows):
        return tuple(reasons)
    gemms = [each for partial in scattered.partials for each in partial.gemms]
    m, n, _ = gemm.sizes
    return ScatterFacts(
        group=group_of(collective),
        world=topology.world,
        hosts=topology.num_hosts,
        dim=rows.dim,
        outer=hint_of(rows.outer, product),
        m=m,
        n=n,
        k=sum(each.sizes[2] for each in gemms),
        dtype=DTYPE_NAMES[value.dtype],
        gemm_dtype=DTYPE_NAMES[product.dtype],
        out_dtype=dtype_name(shard),
        reduce_op=str(collective.args[1]),
        scale=scattered.scale,
        num_gemms=len(gemms),
        num_partials=len(scattered.partials),
        has_addend=any(each.addends for each in scattered.partials),
        is_scaled=any(each.is_scaled for each in gemms),
        has_bias=any(each.biases for each in scattered.partials),
        has_bias_after=after is not None and bool(after.biases),
        has_scale_after=after is not None and (after.scale != 1.0 or after.scale_tensor is not None),
        has_post_norm=after is not None and after.post is not None,
        has_residual=after is not None and bool(after.residuals),
        has_norm=after is not None and after.norm is not None,
        shard_is_saved=bool(scattered.saved),
        sum_is_read=after is None or after.total_is_read,
    )


def _text(facts: ScatterFacts, scattered: Scattered) -> str:
    """The computation in words of torch."""
    gemms = "gemm" if facts.num_gemms == 1 else f"{facts.num_gemms} gemms"
    words = f"reduce_scatter({gemms}, dim={facts.dim}, {facts.reduce_op!r})"
    if scattered.after is not None:
        words = scattered.after.text.replace("reduce_scatter(partial)", words, 1)
        words = words.replace(" + reduce_scatter(partial)", "")
    return words
