"""Which reduction sites the chain computes, and why it does not compute the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import size_of
from weaveopt.graph.facts import DTYPE_NAMES, tokens_of
from weaveopt.graph.pattern import describe, skip_shapes, tensor_of
from weaveopt.graph.sizes import SizeAt, find_shape, find_size, inputs_of
from weaveopt.records.candidate import Rejection, Values
from weaveopt.records.norm import NormKind
from weaveopt.rewrites.reduction.eligible import refused_anywhere
from weaveopt.sites.reduction.consumers import Readers
from weaveopt.sites.reduction.matcher import Reduction, ReductionFacts
from weaveopt.sites.sequence.rows import hint_of
from weaveopt.sites.shared.epilogue import Reduced, product_of
from weaveopt.sites.shared.linear import MatchedGemm, gemm_at, may_be_weight
from weaveopt.sites.shared.norms import Norm

_DIMS = frozenset({torch.ops.aten.mean.dim, torch.ops.aten.var_mean.correction})
"""Operations of norms that name the dimension they reduce, in their second argument."""


@dataclass(frozen=True)
class ShardNormMatch:
    """The part of a site that the chain computes."""

    gemms: tuple[MatchedGemm, ...]
    """Whose results are the partial results: several are added."""
    readers: tuple[MatchedGemm, ...]
    """They read the normalized rows."""
    norm: Norm
    tokens: int | SizeAt
    """Rows of the GEMMs."""
    shape: tuple[int | SizeAt, ...]
    """Shape of the sum."""
    rows_dtype: str
    """Dtype of the normalized rows."""
    consumes: frozenset[fx.Node]

    @property
    def addends(self) -> tuple[fx.Node, ...]:
        """Vectors [hidden] that every rank adds before the sum."""
        return tuple(gemm.bias for gemm in self.gemms if gemm.bias is not None)

    @property
    def biases(self) -> tuple[fx.Node | None, ...]:
        """Bias of each GEMM in `readers`, None if it has none."""
        return tuple(gemm.bias for gemm in self.readers)


def form_of(facts: ReductionFacts, structure: Reduction) -> ShardNormMatch | tuple[Rejection, ...]:
    """Reasons that no fabric or parameter changes; all that hold are listed."""
    reduced, readers, norm = structure.reduced, structure.readers, structure.reduced.norm
    reasons = list(refused_anywhere(facts, structure))
    gemms: list[MatchedGemm] = []
    for partial in reduced.partials:
        gemm = _gemm_of(partial)
        if isinstance(gemm, MatchedGemm):
            gemms.append(gemm)
        else:
            reasons.append(gemm)
    if norm is None or readers is None:
        reasons.append(Rejection("no_norm", "no norm ends the site: there is nothing to compute on a shard"))
        return tuple(reasons)
    reasons += [*_against_readers(readers), *_against_norms(reduced)]
    rows = tensor_of(norm.output)
    rows_dtype = None if rows is None else DTYPE_NAMES.get(rows.dtype)
    if rows_dtype is None:
        message = "normalized rows are gathered in bfloat16, float16 and float32"
        reasons.append(Rejection("dtype_not_supported", message, (("op", describe(norm.output)),)))
    strided = next((each for each in reduced.residuals if not _is_contiguous(each)), None)
    if strided is not None:
        message = "rows of a residual are not contiguous"
        reasons.append(Rejection("layout_not_supported", message, (("node", strided.name),)))
    if reasons or rows_dtype is None:
        return tuple(dict.fromkeys(reasons))
    sources = [*inputs_of(gemms[0].node.graph), gemms[0].a, *reduced.residuals]
    a, total = tensor_of(gemms[0].a), tensor_of(reduced.total)
    assert a is not None and total is not None, f"{reduced.total.name} or its GEMM makes no tensor"
    tokens, shape = find_size(a.shape[0], sources), find_shape(reduced.total, sources)
    if size_of(a.shape[0]) != size_of(tokens_of(total)):
        values = (("gemm", str(a.shape[0])), ("sum", str(tokens_of(total))))
        return (Rejection("size_not_known", "rows of the GEMM and of the sum are different symbols", values),)
    if tokens is None or shape is None:
        message = "sizes of the sum are symbols that no input of the graph holds"
        return (Rejection("size_not_known", message, (("node", reduced.total.name),)),)
    traced = hint_of(size_of(tokens_of(total)), total)
    if not isinstance(tokens, int) and traced <= facts.world:
        message = "a graph of symbolic size that is compiled for one row a rank would serve that size alone"
        return (Rejection("few_rows", message, (("tokens", traced), ("ranks", facts.world))),)
    consumes = structure.interior | structure.gemm_nodes | readers.nodes
    return ShardNormMatch(tuple(gemms), readers.gemms, norm, tokens, shape, rows_dtype, consumes)


def _gemm_of(partial: fx.Node) -> MatchedGemm | Rejection:
    node = product_of(partial)
    gemm = gemm_at(node) if node is not None else None
    if gemm is not None and gemm.addend is None:
        return gemm
    source = skip_shapes(partial)
    values: Values = (("made_by", describe(source)), ("node", source.name))
    made = gemm_at(source)
    if made is None:
        return Rejection("no_gemm", "no plain GEMM makes the partial result", values)
    if made.is_scaled or made.has_factors:
        return Rejection("gemm_not_supported", "the GEMM has scales of its own, or alpha and beta", values)
    if made.addend is not None:
        return Rejection("addend_not_supported", "the GEMM adds rows to its result", values)
    return Rejection("read_by_others", "the partial result is read in addition to its sum", values)


def _against_readers(readers: Readers) -> Iterator[Rejection]:
    if readers.others or not readers.gemms:
        others = ", ".join(sorted({describe(each) for each in readers.others})) or "nothing"
        message = "the normalized rows have readers other than GEMMs, which need all of them"
        yield Rejection("read_by_others", message, (("read_by", others),))
    for gemm in readers.gemms:
        values: Values = (("gemm", gemm.node.name),)
        if gemm.is_scaled or gemm.has_factors:
            yield Rejection("gemm_not_supported", "a GEMM after the norm has scales, or alpha and beta", values)
        if gemm.addend is not None:
            yield Rejection("addend_not_supported", "a GEMM after the norm adds rows to its result", values)
        late = [each for each in (gemm.b, gemm.bias) if each is not None and not may_be_weight(each)]
        if late:
            message = "the weight of a GEMM after the norm is not computed from the graph's inputs alone"
            yield Rejection("operand_not_ready", message, (("node", late[0].name),))


def _against_norms(reduced: Reduced) -> Iterator[Rejection]:
    """A norm is computed by its own nodes, on fewer rows: what else they read has to be the same for every row."""
    for norm in (reduced.post, reduced.norm):
        if norm is None:
            continue
        own = {norm.source, *norm.nodes}
        by_row = next((each for node in norm.nodes for each in _inputs(node, own) if _has_rows(each)), None)
        if by_row is not None:
            message = "the norm reads other values by row"
            yield Rejection("norm_not_supported", message, (("node", by_row.name),))


def _inputs(node: fx.Node, own: set[fx.Node]) -> Sequence[fx.Node]:
    return [each for each in node.all_input_nodes if each not in own]


def _has_rows(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.ndim > 1


def _is_contiguous(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.is_contiguous()


def reduces_over(node: fx.Node) -> bool:
    """True if a node of a norm names the dimension that it reduces, which is the last one of any rows."""
    return node.target in _DIMS


def against_norm(
    facts: ReductionFacts, reduced: Reduced, form: ShardNormMatch, tiles_refused: Sequence[Rejection]
) -> Iterator[Rejection]:
    """Rejections for what that kernel does not support, whatever the sizes; `tiles_refused`: those of the kernel that
    only sums."""
    yield from tiles_refused
    if reduced.biases:
        yield Rejection("bias_not_supported", "the kernel adds no bias to the sum over ranks")
    if reduced.scale != 1.0 or reduced.scale_tensor is not None:
        yield Rejection("scale_not_supported", "the kernel does not scale the sum over ranks")
    if reduced.post is not None:
        yield Rejection("norm_not_supported", "the kernel has no norm ahead of the residual")
    yield from _against_residuals(facts, reduced)
    norm = form.norm
    if norm.form.kind is not NormKind.RMS:
        yield Rejection("norm_not_supported", "the kernel supports RMS norms only", (("kind", norm.form.kind.value),))
    if norm.bias is not None:
        yield Rejection("norm_not_supported", "the kernel does not support a norm with a bias")
    if norm.weight is not None and _dtype(norm.weight) not in (facts.dtype, "float32"):
        message = "the norm's weight is neither of the rows' dtype nor fp32"
        yield Rejection("dtype_not_supported", message, (("dtype", _dtype(norm.weight)),))
    if form.rows_dtype != facts.dtype:
        values = (("dtype", facts.dtype), ("normalized", form.rows_dtype))
        yield Rejection("dtype_changes", "the kernel normalizes rows in their own dtype", values)


def _against_residuals(facts: ReductionFacts, reduced: Reduced) -> Iterator[Rejection]:
    if len(reduced.residuals) != 1:
        values = (("residuals", len(reduced.residuals)),)
        yield Rejection("residual_not_supported", "the kernel adds one residual", values)
    for node in reduced.residuals:
        if _dtype(node) != facts.dtype:
            found = (("dtype", _dtype(node)), ("sum", facts.dtype))
            yield Rejection("residual_not_supported", "the residual is of another dtype than the sum", found)


def _dtype(node: fx.Node) -> str:
    value = tensor_of(node)
    return "" if value is None else str(value.dtype).removeprefix("torch.")
