"""A site of this rule as the work that the operation's cost model prices."""

from __future__ import annotations

from collections.abc import Sequence

from weaveopt.cost_model import Gemm
from weaveopt.ops.gemm_comm.all_gather.prices import Work
from weaveopt.records.site import TokenCounts
from weaveopt.sites.sequence.gather_matcher import GatherFacts

RULE = "all_gather_gemm"


def work_of(facts: GatherFacts, widths: Sequence[int], tokens: TokenCounts) -> Work:
    """`widths`: columns of every GEMM."""
    gemms = tuple(Gemm(tokens.hint, facts.k, width) for width in widths)
    return Work(tokens.hint, facts.k, gemms, facts.dtype, facts.world, facts.hosts, facts.gathered_is_read)
