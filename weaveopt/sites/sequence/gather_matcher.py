"""Matcher of the kind `all_gather`: all-gather of activations -> GEMMs.

    whole = all_gather(shard, gather_dim)       # 0, or 1 (within each sequence)
    q, k, v = whole @ wq, whole @ wk, whole @ wv

Rows of the GEMMs are [outer, world, inner], and a rank's shard is [outer, inner] of them (`sites.sequence.rows`).
Gathers of one shard are one site, with all GEMMs that read it; what else reads the gathered value is said, since it has
to exist then. An all-gather that no GEMM reads is no site.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.facts import DTYPE_NAMES, count_tokens, group_of, module_of
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.records.candidate import Rejection, Values, values_of
from weaveopt.records.site import Site, TokenCounts
from weaveopt.rule import Context, FoundSite
from weaveopt.sites.sequence.gather_consumers import Gathered, gathered_at, travelling
from weaveopt.sites.sequence.rows import against_group, against_row_size, hint_of
from weaveopt.sites.shared.epilogue import WAIT
from weaveopt.sites.shared.linear import ALL_GATHER

KIND = "all_gather"
_DTYPES = {**DTYPE_NAMES, torch.float8_e4m3fn: "float8_e4m3fn"}


OWN_FACTS = ("n", "num_gemms", "num_contractions", "has_bias", "gathered_is_read")
"""Facts that concern one rank alone."""


@dataclass(frozen=True)
class GatherFacts:
    """The computation of an all-gather and its GEMMs, equal on every rank; symbolic sizes are replaced by their
    hints."""

    group: str
    world: int
    hosts: int
    dim: int
    """0: whole activations are gathered along their rows; 1: each of `outer` sequences is."""
    outer: int
    m: int
    """Gathered rows."""
    n: int
    """Columns of all GEMMs together."""
    k: int
    dtype: str
    """Dtype of the gathered shards."""
    gemm_dtype: str
    """Dtype of the GEMMs' operands."""
    num_gemms: int = 1
    num_gathers: int = 1
    """All-gathers of the same shard."""
    num_contractions: int = 0
    """GEMMs that contract over the gathered rows (gradients of weights); they read the whole value."""
    has_bias: bool = False
    is_scaled: bool = False
    """True if the operands are FP8 with scales."""
    gathered_is_read: bool = False
    """True if anything other than the `num_gemms` GEMMs reads the gathered value."""

    def values(self) -> Values:
        return values_of(self)


class GatherMatcher:
    """See the module's docstring."""

    kind = KIND

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        by_shard: dict[object, list[fx.Node]] = {}
        for node in graph.nodes:
            if is_call(node, ALL_GATHER):
                by_shard.setdefault(tuple(node.args), []).append(node)
        found = (_found(gathers, context) for gathers in by_shard.values())
        return tuple(each for each in found if each is not None)


def _found(gathers: Sequence[fx.Node], context: Context) -> FoundSite | None:
    world = gathers[0].args[1]
    assert isinstance(world, int), gathers[0].args
    gathered = gathered_at(gathers, world)
    if not isinstance(gathered, Gathered):
        exchanged = frozenset((*gathers, *(user for node in gathers for user in node.users if is_call(user, WAIT))))
        return FoundSite(_site(gathers, "", None, TokenCounts(0), gathered), exchanged) if gathered else None
    operand = gathered.gemms[0].a
    value = tensor_of(operand)
    assert value is not None, f"{operand.name} makes no tensor"
    hint, most = count_tokens(value, context.config.max_tokens)
    tokens = TokenCounts(hint, most=most)
    facts = _facts(gathered, world, context)
    if not isinstance(facts, GatherFacts):
        return FoundSite(_site(gathers, "", None, tokens, facts), gathered.nodes)
    site = _site(gathers, _text(facts), facts, tokens, ())
    return FoundSite(site, gathered.nodes, facts, gathered, token_value=operand)


def _site(
    gathers: Sequence[fx.Node],
    description: str,
    facts: GatherFacts | None,
    tokens: TokenCounts,
    rejections: tuple[Rejection, ...],
) -> Site:
    return Site(
        id=gathers[0].name,
        kind=KIND,
        groups=(group_of(gathers[0]),),
        module=module_of(gathers[0]),
        collectives=tuple(node.name for node in gathers),
        description=description,
        tokens=tokens,
        facts=() if facts is None else facts.values(),
        own_facts=OWN_FACTS,
        rejections=rejections,
    )


def _facts(gathered: Gathered, world: int, context: Context) -> GatherFacts | tuple[Rejection, ...]:
    node, gemm = gathered.gathers[0], gathered.gemms[0]
    topology = context.topologies.get(group_of(node))
    reasons = list(against_group(node, world, topology))
    travels, operand = tensor_of(travelling(gathered)), tensor_of(gemm.a)
    assert travels is not None and operand is not None, f"{node.name} makes no tensor"
    for dtype in dict.fromkeys((travels.dtype, operand.dtype)):
        if dtype not in _DTYPES:
            values = (("dtype", str(dtype).removeprefix("torch.")),)
            message = "the kernels support bfloat16, float16, float32 and float8_e4m3fn"
            reasons.append(Rejection("dtype_not_supported", message, values))
    reasons += against_row_size(operand)
    if reasons or topology is None:
        return tuple(reasons)
    m, _, k = gemm.sizes
    return GatherFacts(
        group=group_of(node),
        world=topology.world,
        hosts=topology.num_hosts,
        dim=gathered.rows.dim,
        outer=hint_of(gathered.rows.outer, operand),
        m=m,
        n=sum(each.sizes[1] for each in gathered.gemms),
        k=k,
        dtype=_DTYPES[travels.dtype],
        gemm_dtype=_DTYPES[operand.dtype],
        num_gemms=len(gathered.gemms),
        num_gathers=len(gathered.gathers),
        num_contractions=len(gathered.contractions),
        has_bias=any(each.bias is not None for each in gathered.gemms),
        is_scaled=any(each.is_scaled for each in gathered.gemms),
        gathered_is_read=bool(gathered.kept),
    )


def _text(facts: GatherFacts) -> str:
    """The computation in words of torch."""
    gemms = "gemm" if facts.num_gemms == 1 else f"{facts.num_gemms} gemms"
    words = f"all_gather(shard, dim={facts.dim}) -> {gemms}"
    if facts.num_gathers > 1:
        words = f"{facts.num_gathers} x {words}"
    return words + ("; the gathered rows are read elsewhere too" if facts.gathered_is_read else "")
