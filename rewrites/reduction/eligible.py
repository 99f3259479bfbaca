"""Conditions of a reduction that no kernel lifts, whichever operation calls it."""

from __future__ import annotations

import torch
import torch.fx as fx

from weaveopt.fabrics.fabric_eligibility import world_refused
from weaveopt.graph.pattern import tensor_of
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.records.candidate import Fabric, Rejection
from weaveopt.sites.reduction.matcher import Reduction, ReductionFacts
from weaveopt.sites.shared.epilogue import Reduced
from weaveopt.sites.shared.norms import Norm

ROW_ALIGNMENT = 8
"""Elements: GPU kernels move rows in pieces of 16 bytes."""


def refused_anywhere(facts: ReductionFacts, structure: Reduction) -> tuple[Rejection, ...]:
    """Conditions that no fabric or parameter changes; all that fail are listed."""
    reduced = structure.reduced
    reasons: list[Rejection] = []
    if facts.world < 2:
        reasons.append(Rejection("one_rank", "a group of one rank communicates nothing", (("world", facts.world),)))
    total = tensor_of(reduced.total)
    if total is None or total.ndim not in (2, 3):
        reasons.append(Rejection("shape_not_known", "the sum is neither [tokens, hidden] nor [batch, seq, hidden]"))
    results = [reduced.total, *((reduced.norm.output,) if reduced.norm is not None else ())]
    reasons += [reason for node in results if (reason := _layout_refused(node)) is not None]
    return tuple(reasons)


def _layout_refused(result: fx.Node) -> Rejection | None:
    """Kernels make contiguous results; a result of the graph may have the strides of its residual, say."""
    value = tensor_of(result)
    if value is None or not any(user.op == "output" for user in result.users):
        return None
    strides: list[object] = []
    step: int | torch.SymInt = 1
    for size in reversed(value.shape):
        strides.append(step)
        step = step * size
    found = tuple(map(str, value.stride()))
    if found == tuple(map(str, reversed(strides))):
        return None
    message = "a result of the graph is not contiguous, and the kernels' are"
    return Rejection("layout_not_supported", message, (("node", result.name), ("strides", ", ".join(found))))


def norms_refused(reduced: Reduced) -> tuple[Rejection, ...]:
    """Why the kernels do not take the site's norms; the one of the sum may stay in the graph then."""
    value = tensor_of(reduced.collectives[0])
    assert value is not None, f"{reduced.collectives[0].name} makes no tensor"
    norms = (norm for norm in (reduced.post, reduced.norm) if norm is not None)
    return tuple(reason for norm in norms for reason in _norm_refused(norm, value))


def _norm_refused(norm: Norm, value: torch.Tensor) -> list[Rejection]:
    reasons: list[Rejection] = []
    output = tensor_of(norm.output)
    if output is None or output.dtype not in (value.dtype, torch.float32):
        found = "unknown" if output is None else str(output.dtype)
        reasons.append(Rejection("dtype_changes", "the norm's result has an unsupported dtype", (("dtype", found),)))
    for word, vector in (("weight", norm.weight), ("bias", norm.bias)):
        dtype = None if vector is None else tensor_of(vector)
        if dtype is not None and dtype.dtype not in (value.dtype, torch.float32):
            values = (("dtype", str(dtype.dtype)),)
            reasons.append(Rejection("dtype_not_supported", f"the norm's {word} has an unsupported dtype", values))
    return reasons


def shape_rejections(workload: Workload, fabric: Fabric) -> list[Rejection]:
    """Rows and groups that the GPU kernels on the fabric do not take."""
    reasons = []
    if workload.hidden % ROW_ALIGNMENT:
        message = f"the kernels support rows of a multiple of {ROW_ALIGNMENT} elements"
        reasons.append(Rejection("row_not_supported", message, (("hidden", workload.hidden),)))
    return [*reasons, *world_refused(fabric, workload.world)]
