"""Which forms of a site variant `pushed` makes: GEMMs that begin with the rows that are here."""

from __future__ import annotations

from weaveopt.records.candidate import Rejection
from weaveopt.rewrites.all_gather_gemm.forms import Form
from weaveopt.sites.sequence.gather_matcher import GatherFacts


def form_refused(facts: GatherFacts, form: Form) -> tuple[Rejection, ...]:
    """Rejections for what the kernel does not support at a site, whatever its sizes."""
    reasons: list[Rejection] = []
    if not form.gemms:
        reasons.append(Rejection("no_gemm", "there is no GEMM that could begin"))
    if any(gemm.addend is not None for gemm in form.gemms):
        reasons.append(Rejection("addend_not_supported", "the kernel adds a bias, and no rows, to what its GEMM makes"))
    if form.outer != 1:
        values = (("outer", facts.outer),)
        reasons.append(Rejection("blocks_not_supported", "the kernel takes shards whose rows lie together", values))
    if any(gemm.transposed_b is None for gemm in form.gemms):
        reasons.append(Rejection("weight_layout", "the kernel reads weights that are stored [n, hidden]"))
    return tuple(reasons)
