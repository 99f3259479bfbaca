"""Workload of the kernels at a matched reduction site."""

from __future__ import annotations

from weaveopt.cost_model import Gemm
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.records.site import TokenCounts
from weaveopt.sites.reduction.matcher import ReductionFacts


def workload_of(facts: ReductionFacts, tokens: TokenCounts, *, takes_gemm: bool, quantizes: bool) -> Workload:
    """Workload of a site. `takes_gemm`: the kernel's operation makes the partial result too; `quantizes`: it returns
    e4m3 rows."""
    gemm = Gemm(tokens.hint, facts.gemm_depth, facts.hidden) if takes_gemm and facts.gemm_depth else None
    return Workload(
        tokens=tokens.hint,
        max_tokens=tokens.most,
        hidden=facts.hidden,
        dtype=facts.dtype,
        world=facts.world,
        hosts=facts.hosts,
        gemm=gemm,
        num_partials=facts.num_partials,
        num_norms=facts.num_norms,
        has_norm=facts.has_norm,
        has_residual=facts.has_residual,
        sum_is_used=facts.sum_is_read,
        sum_may_shard=facts.sum_read_by_reductions,
        out_dtype="float8_e4m3fn" if quantizes else facts.out_dtype,
        min_tokens=tokens.least,
    )
