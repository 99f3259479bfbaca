"""Which sites the kernel makes that adds the residual and normalizes the rows that it sums, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.fx as fx

from weaveopt.graph.pattern import tensor_of
from weaveopt.records.candidate import Rejection
from weaveopt.records.norm import NormKind
from weaveopt.rewrites.shard_norm.forms import Form
from weaveopt.sites.reduction.matcher import ReductionFacts
from weaveopt.sites.shared.epilogue import Reduced


def against_norm(
    facts: ReductionFacts, reduced: Reduced, form: Form, tiles_refused: Sequence[Rejection]
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
        yield Rejection("norm_not_supported", "the kernel knows RMS norms", (("kind", norm.form.kind.value),))
    if norm.bias is not None:
        yield Rejection("norm_not_supported", "the kernel knows no bias of a norm")
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
