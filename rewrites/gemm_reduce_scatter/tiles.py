"""Which forms of a site variant `tiles` makes: one kernel that computes the GEMM and sends its tiles."""

from __future__ import annotations

from weaveopt.records.candidate import Rejection
from weaveopt.rewrites.gemm_reduce_scatter.forms import Form
from weaveopt.sites.sequence.scatter_matcher import ScatterFacts


def form_refused(facts: ScatterFacts, form: Form) -> tuple[Rejection, ...]:
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
        reasons.append(Rejection("blocks_not_supported", "the kernel's owners have rows that lie together", values))
    if any(gemm.transposed_b is None for gemm in form.gemms):
        reasons.append(Rejection("weight_layout", "the kernel reads weights that are stored [hidden, k]"))
    return tuple(reasons)
