"""Matcher of the kind `reduction`: GEMM -> all-reduce -> (+ residual) -> norm, as models write it.

    partial = a @ b
    total = all_reduce(partial)            # then optionally + bias, * scale
    total = post_norm(total)               # post-norm families only
    total = residual + total               # absent after the embedding
    normalized = rms_norm(total) * weight  # or LayerNorm, (1 + w), ...; absent where none follows
    rows = e4m3(normalized / scale)        # where FP8 linears read the rows

Two all-reduces that are added into one sum (a mixture and its shared experts; parallel attention and MLP) are one site.
There is no norm in a backward pass, after the last layer of a model that is compiled layer by layer, if a value has
other consumers before the norm, or if the dtype changes before it (autocast).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.facts import DTYPE_NAMES, count_tokens, group_of, is_empty, module_of
from weaveopt.graph.pattern import SHAPE_ONLY, is_call, tensor_of
from weaveopt.graph.scalars import casts_of, symbols_of
from weaveopt.records.candidate import NO_TOKENS, Rejection, Values, values_of
from weaveopt.records.site import Site, TokenCounts
from weaveopt.rule import Context, FoundSite
from weaveopt.sites.reduction.consumers import Readers, readers_of
from weaveopt.sites.shared.epilogue import ANY_ALL_REDUCE, Reduced, follow, product_of
from weaveopt.sites.shared.norms import find_norms
from weaveopt.sites.shared.quantization import Quantized, find_quantized

KIND = "reduction"
aten = torch.ops.aten


OWN_FACTS = ("gemm_depth", "gemm_has_bias")
"""Facts that concern one rank alone."""


@dataclass(frozen=True)
class ReductionFacts:
    """The computation of a reduction site on every rank, for any token count."""

    group: str
    """Name of the process group."""
    world: int
    hosts: int
    hidden: int
    dtype: str
    """Name of the torch dtype of the partial results and of the sum."""
    out_dtype: str = ""
    """Dtype of the normalized rows if it differs from `dtype`."""
    quantization: str = "none"
    """How e4m3 rows are made of the normalized ones: `none`, `static` or `per_token`."""
    gemm_depth: int = 0
    """`k` of the GEMM `[tokens, k] @ [k, hidden]` that makes the partial result; 0: there is none."""
    gemm_has_bias: bool = False
    """True if that GEMM adds a bias (addmm)."""
    num_partials: int = 1
    """Number of all-reduces that are added into one sum."""
    num_norms: int = 1
    has_norm: bool = True
    """True if the site ends with a norm of the sum."""
    has_residual: bool = True
    sum_is_read: bool = True
    """True if the graph reads the sum (partial results + residual) after this site."""
    sum_read_by_reductions: bool = False
    """True if the sum is read only by other reductions, as their residual."""

    def values(self) -> Values:
        return values_of(self)


@dataclass(frozen=True)
class Reduction:
    """The nodes of a site by their role."""

    reduced: Reduced
    interior: frozenset[fx.Node]
    """Nodes that a rewrite including the norm removes: the collectives, the nodes from them to the sum, and the
    norm."""
    quantized: Quantized | None = None
    gemm: fx.Node | None = None
    """The GEMM that makes the partial result, read by nothing else; of two partial results, one that can accumulate."""
    addend: fx.Node | None = None
    """Value that is added to the GEMM before the reduction: another partial result."""
    readers: Readers | None = None
    """Consumers of the normalized rows; None if the site has no norm."""

    @property
    def sum_is_read(self) -> bool:
        return self.reduced.total_is_read

    @property
    def gemm_nodes(self) -> frozenset[fx.Node]:
        """The GEMMs that compute partial results, and the views after them; they have no other consumers."""
        return frozenset(_producers(self.reduced))


class ReductionMatcher:
    """See the module's docstring."""

    kind = KIND

    def find(self, graph: fx.Graph, context: Context) -> Sequence[FoundSite]:
        all_reduces = [node for node in graph.nodes if is_call(node, ANY_ALL_REDUCE)]
        if not all_reduces:
            return ()
        norms = find_norms(graph)
        followed: list[tuple[fx.Node, Reduced | Rejection]] = []
        merged: set[fx.Node] = set()
        for node in all_reduces:
            if node not in merged:
                reduced = follow(node, norms)
                followed.append((node, reduced))
                if isinstance(reduced, Reduced):
                    merged.update(reduced.collectives)
        absorbed = frozenset(n for _, each in followed if isinstance(each, Reduced) for n in each.passed)
        return tuple(_found(node, reduced, absorbed, context) for node, reduced in followed)


def _found(node: fx.Node, reduced: Reduced | Rejection, absorbed: frozenset[fx.Node], context: Context) -> FoundSite:
    if isinstance(reduced, Rejection):
        return FoundSite(_site(node, (node,), "", None, context, (reduced,)), _exchanged(node))
    found = None if reduced.norm is None else find_quantized(reduced.norm.output)
    quantized = found if isinstance(found, Quantized) else None
    structure = _structure(reduced, quantized)
    facts = _facts(structure, absorbed, context)
    own_text = reduced.own_text + (f" -> e4m3 left as it is: {found.text}" if isinstance(found, Rejection) else "")
    description = reduced.text + (quantized.text if quantized is not None else "") + own_text
    rejections = () if isinstance(facts, ReductionFacts) else (facts,)
    known = facts if isinstance(facts, ReductionFacts) else None
    site = _site(node, reduced.collectives, description, known, context, rejections, own_text)
    nodes = structure.interior | structure.gemm_nodes | (quantized.nodes if quantized is not None else frozenset())
    consumers = structure.readers.nodes - nodes if structure.readers is not None and known is not None else frozenset()
    numbers = symbols_of((*reduced.scalars, *(quantized.numbers if quantized is not None else ())))
    return FoundSite(site, nodes, known, structure, numbers, reduced.collectives[0], consumers)


def _site(
    node: fx.Node,
    collectives: tuple[fx.Node, ...],
    description: str,
    facts: ReductionFacts | None,
    context: Context,
    rejections: tuple[Rejection, ...],
    own_text: str = "",
) -> Site:
    value = tensor_of(node)
    hint, most = (0, 0) if value is None or value.ndim < 1 else count_tokens(value, context.config.max_tokens)
    return Site(
        id=node.name,
        kind=KIND,
        groups=(group_of(node),),
        module=module_of(node),
        collectives=tuple(collective.name for collective in collectives),
        description=description,
        own_text=own_text,
        tokens=TokenCounts(hint, most=most),
        facts=() if facts is None else facts.values(),
        own_facts=OWN_FACTS,
        rejections=rejections,
    )


def _exchanged(collective: fx.Node) -> frozenset[fx.Node]:
    """A collective that belongs to no form, and the waits for it."""
    return frozenset((collective, *collective.users))


def _structure(reduced: Reduced, quantized: Quantized | None) -> Reduction:
    vanishing = set(reduced.passed) | (quantized.nodes if quantized is not None else set())
    for node in reversed(reduced.norm.nodes if reduced.norm else ()):
        if node is reduced.norm.output or all(user in vanishing for user in node.users):  # type: ignore[union-attr]
            vanishing.add(node)
    for scalar in reduced.scalars:
        for node in casts_of(scalar):
            if all(user in vanishing for user in node.users):
                vanishing.add(node)
    if quantized is not None:
        vanishing -= quantized.nodes
    gemms = [product_of(partial) for partial in reduced.partials]
    gemm, addend = (gemms[0], None) if len(gemms) == 1 else _gemm_and_addend(reduced, gemms)
    readers = readers_of(reduced.norm.output) if reduced.norm is not None else None
    return Reduction(reduced, frozenset(vanishing), quantized, gemm, addend, readers)


def _gemm_and_addend(reduced: Reduced, gemms: list[fx.Node | None]) -> tuple[fx.Node | None, fx.Node | None]:
    """Find, among two partial results, a plain GEMM that can accumulate onto the other, given as [tokens, hidden]."""
    for index in (1, 0) if len(gemms) == 2 else ():
        gemm, other = gemms[index], gemms[1 - index]
        addend = other if other is not None else reduced.partials[1 - index]
        value = tensor_of(addend)
        if gemm is not None and gemm.target is aten.mm.default and value is not None and value.ndim == 2:
            return gemm, addend
    return None, None


def _facts(structure: Reduction, absorbed: frozenset[fx.Node], context: Context) -> ReductionFacts | Rejection:
    reduced = structure.reduced
    group = group_of(reduced.collectives[0])
    topology = context.topologies.get(group)
    if topology is None:
        return Rejection("group_not_known", "the process group is not known in this process", (("group", group),))
    value = tensor_of(reduced.collectives[0])
    assert value is not None, f"{reduced.collectives[0].name} makes no tensor"
    if value.dtype not in DTYPE_NAMES:
        values = (("dtype", str(value.dtype).removeprefix("torch.")),)
        return Rejection("dtype_not_supported", "the kernels support bfloat16, float16 and float32", values)
    if is_empty(value):
        return NO_TOKENS
    a = None if structure.gemm is None else tensor_of(structure.gemm.args[-2])  # type: ignore[arg-type]
    return ReductionFacts(
        group=group,
        world=topology.world,
        hosts=topology.num_hosts,
        hidden=int(value.shape[-1]),
        dtype=DTYPE_NAMES[value.dtype],
        out_dtype=_out_dtype(reduced),
        quantization="none" if structure.quantized is None else structure.quantized.quant.value,
        gemm_depth=0 if a is None else int(a.shape[-1]),
        gemm_has_bias=structure.gemm is not None and is_call(structure.gemm, frozenset({aten.addmm.default})),
        num_partials=len(reduced.collectives),
        num_norms=int(reduced.norm is not None) + int(reduced.post is not None),
        has_norm=reduced.norm is not None,
        has_residual=bool(reduced.residuals),
        sum_is_read=reduced.total_is_read,
        sum_read_by_reductions=all(
            user in absorbed or user in structure.interior or user in _nodes_of(structure.quantized)
            for user in reduced.total.users
        ),
    )


def _nodes_of(quantized: Quantized | None) -> frozenset[fx.Node]:
    return frozenset() if quantized is None else quantized.nodes


def _out_dtype(reduced: Reduced) -> str:
    """Dtype of the normalized rows if it differs from that of the activations."""
    value = tensor_of(reduced.collectives[0])
    output = None if reduced.norm is None else tensor_of(reduced.norm.output)
    if value is None or output is None or output.dtype == value.dtype:
        return ""
    return DTYPE_NAMES.get(output.dtype, "")


def _producers(reduced: Reduced) -> Iterator[fx.Node]:
    """Return the views after partial results, and the GEMMs that have no other consumer."""
    for partial in reduced.partials:
        gemm = product_of(partial)
        node = partial
        while gemm is not None and node is not gemm and is_call(node, SHAPE_ONLY):
            yield node
            node = node.args[0]  # type: ignore[assignment]
        if gemm is not None:
            yield gemm
