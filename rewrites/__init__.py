"""The rules, one file or folder each. A new rule is one file, one line here, and its tests."""

from __future__ import annotations

from weaveopt.rewrites.all_gather_gemm import AllGatherGemm
from weaveopt.rewrites.all_reduce_rms_norm import AllReduceRMSNorm
from weaveopt.rewrites.causal_attention import CausalAttention
from weaveopt.rewrites.expert_prefetch import ExpertPrefetch
from weaveopt.rewrites.gemm_all_reduce import GemmAllReduce
from weaveopt.rewrites.gemm_reduce_scatter import GemmReduceScatter
from weaveopt.rewrites.hierarchical_all_reduce import HierarchicalAllReduce
from weaveopt.rewrites.merged_gemm import MergedGemm
from weaveopt.rewrites.moe_fused import MoeFused
from weaveopt.rewrites.moe_sharded import MoeSharded
from weaveopt.rewrites.shard_norm import ShardNorm
from weaveopt.rewrites.token_split import TokenSplit
from weaveopt.rule import GraphRule, RuleSet, SiteRule
from weaveopt.sites import MATCHERS

SITE_RULES: tuple[SiteRule, ...] = (
    AllReduceRMSNorm(),
    HierarchicalAllReduce(),
    GemmAllReduce(),
    CausalAttention(),
    MoeFused(),
    GemmReduceScatter(),
    AllGatherGemm(),
    MoeSharded(),
    ExpertPrefetch(),
    ShardNorm(),
    MergedGemm(),
)
GRAPH_RULES: tuple[GraphRule, ...] = (TokenSplit(),)
RULES = RuleSet(MATCHERS, SITE_RULES, GRAPH_RULES)


def names() -> tuple[str, ...]:
    return RULES.names
