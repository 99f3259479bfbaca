"""A site of this rule as the work that the operation's cost model prices."""

from __future__ import annotations

from collections.abc import Sequence

from weaveopt.cost_model import Gemm
from weaveopt.ops.gemm_comm.reduce_scatter.prices import Work
from weaveopt.records.site import TokenCounts
from weaveopt.sites.sequence.scatter_matcher import ScatterFacts

RULE = "gemm_reduce_scatter"


def work_of(facts: ScatterFacts, depths: Sequence[int], tokens: TokenCounts, addends: int, residuals: int) -> Work:
    """`depths`: k of every GEMM."""
    gemms = tuple(Gemm(tokens.hint, depth, facts.n) for depth in depths)
    return Work(gemms, facts.dtype, facts.world, facts.hosts, addends, residuals)
