"""Which forms of a site the operation computes, and why it does not compute the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx as fx

from weaveopt.graph.arrangement import Size
from weaveopt.graph.pattern import tensor_of
from weaveopt.graph.sizes import SizeAt, find_shape, find_size, inputs_of
from weaveopt.records.candidate import Rejection
from weaveopt.sites.sequence.rows import Rows, scattered_rows
from weaveopt.sites.sequence.scatter_epilogue import Scattered
from weaveopt.sites.sequence.scatter_matcher import ScatterFacts
from weaveopt.sites.sequence.scatter_producer import Partial
from weaveopt.sites.shared.epilogue import WAIT
from weaveopt.sites.shared.linear import MatchedGemm


@dataclass(frozen=True)
class GemmReduceScatterMatch:
    """The part of a site that the operation computes."""

    gemms: tuple[MatchedGemm, ...]
    addends: tuple[fx.Node, ...]
    """Vectors [n] and values of [m, n] elements."""
    scale: float
    outer: int | SizeAt
    result: fx.Node
    """The node that the operation's result replaces: the wait, or the sum of several."""
    shape: tuple[int | SizeAt, ...]
    """Shape of `result`."""
    residuals: tuple[fx.Node, ...]
    """Values added to the operation's result, if it replaces the sum of several collectives."""
    consumes: frozenset[fx.Node]


def form_of(facts: ScatterFacts, structure: Scattered) -> GemmReduceScatterMatch | tuple[Rejection, ...]:
    """Reasons that no fabric or parameter changes; all that hold are listed."""
    partials = structure.partials
    result, consumes, residuals = _replaced(structure)
    gemms = tuple(gemm for partial in partials for gemm in partial.gemms)
    sources = [*inputs_of(result.graph), *(node for gemm in gemms for node in (gemm.a, gemm.b))]
    outer = find_size(_outer(facts, partials[0], gemms[0]), sources)
    shape = find_shape(result, sources)
    reasons = tuple(_against(facts, structure))
    if outer is None or shape is None:
        message = "sizes of the shard are symbols that no input of the graph holds"
        reasons = (*reasons, Rejection("size_not_known", message, (("node", result.name),)))
    if reasons:
        return reasons
    assert outer is not None and shape is not None
    addends = tuple(node for partial in partials for node in (*partial.biases, *partial.addends))
    scale = partials[0].scale / (facts.world if facts.reduce_op == "avg" else 1)
    return GemmReduceScatterMatch(gemms, addends, scale, outer, result, shape, residuals, consumes)


def _replaced(structure: Scattered) -> tuple[fx.Node, frozenset[fx.Node], tuple[fx.Node, ...]]:
    """The node whose place the result takes, what disappears with it, and what has to be added to the result."""
    exchanged = {*structure.collectives}
    for partial in structure.partials:
        exchanged |= partial.nodes
    [wait] = [user for user in structure.collectives[0].users if user.target in WAIT]
    after = structure.after
    if len(structure.partials) == 1 or after is None:
        return wait, frozenset({*exchanged, wait}), ()
    return after.total, frozenset({*exchanged, *after.passed}), after.residuals


def _outer(facts: ScatterFacts, partial: Partial, gemm: MatchedGemm) -> Size:
    if facts.dim == -1:
        return 1
    value = tensor_of(gemm.node)
    assert value is not None, f"{gemm.node.name} makes no tensor"
    rows = scattered_rows(partial.arrangement, facts.world, value.shape)
    assert isinstance(rows, Rows), f"{gemm.node.name}: {rows}"
    return rows.outer


def _against(facts: ScatterFacts, structure: Scattered) -> Iterator[Rejection]:
    if facts.is_scaled:
        yield Rejection("gemm_not_supported", "the operation multiplies no FP8 operands with scales of their own")
    if facts.dtype != facts.gemm_dtype:
        values = (("gemm", facts.gemm_dtype), ("travels", facts.dtype))
        yield Rejection(
            "dtype_changes", "the GEMM's result is cast before it is sent, and the GEMM writes where peers read", values
        )
    if facts.has_addend and any(partial.scale != 1.0 for partial in structure.partials):
        yield Rejection("addend_not_scaled", "what is added after the scale would be scaled by the operation too")
    if facts.num_partials == 1:
        return
    epilogue = (("bias", facts.has_bias_after), ("scale", facts.has_scale_after), ("norm", facts.has_post_norm))
    if any(found for _, found in epilogue):
        message = "between the sum of several collectives and the residual stands what the operation does not compute"
        yield Rejection("sum_not_plain", message, epilogue)


def form_refused(facts: ScatterFacts, form: GemmReduceScatterMatch) -> tuple[Rejection, ...]:
    """Rejections for what the kernel does not support at a site, whatever its sizes."""
    reasons: list[Rejection] = []
    if len(form.gemms) != 1:
        values = (("gemms", len(form.gemms)),)
        reasons.append(Rejection("several_gemms", "the kernel computes one GEMM, and several are added", values))
    if form.addends:
        reasons.append(Rejection("addend_not_supported", "the kernel adds nothing to what its GEMM makes"))
    if facts.dim == -1:
        reasons.append(Rejection("columns_not_supported", "the kernel sends rows, and columns are cut"))
    elif form.outer != 1:
        values = (("outer", facts.outer),)
        reasons.append(Rejection("blocks_not_supported", "the kernel's owners have contiguous rows", values))
    if any(gemm.transposed_b is None for gemm in form.gemms):
        reasons.append(Rejection("weight_layout", "the kernel reads weights that are stored [hidden, k]"))
    return tuple(reasons)
