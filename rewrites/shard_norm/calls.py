"""The constants of a chosen site's calls, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, GemmReduceScatterNormCall
from weaveopt.records.norm import NormSpec
from weaveopt.rewrites.shard_norm.candidates import Lowered
from weaveopt.sites.reduction.matcher import ReductionFacts


@dataclass(frozen=True)
class Calls:
    """Calls of the operations of one site."""

    scatter: GemmReduceScatterCall
    normed: GemmReduceScatterNormCall | None
    """In place of `scatter`: with the addition and the norm. Its buffers are the same."""
    gather: AllGatherGemmCall
    """All-gather of the normalized rows, with the GEMMs that read them."""
    sum_gather: AllGatherGemmCall
    """All-gather of the rows of the sum, if every rank needs them."""


def calls_of(
    site: str,
    facts: ReductionFacts,
    lowered: Lowered,
    norm: NormSpec,
    rows_dtype: str,
    replicated: Sequence[str],
    channel: int,
    timeout_s: float,
) -> Calls:
    """`rows_dtype`: of the normalized rows; `replicated`: names of what all ranks have to have alike."""
    group, fabric, world, hidden = facts.group, lowered.fabric, facts.world, facts.hidden
    scatter = GemmReduceScatterCall(
        site, group, fabric, world, hidden, facts.dtype, lowered.max_tokens, timeout_s, channel,
        cut=lowered.tiles_cut, replicated=" ".join(replicated),
    )  # fmt: skip
    normed = GemmReduceScatterNormCall(
        site, group, fabric, world, hidden, facts.dtype, lowered.max_tokens, timeout_s, channel,
        cut=lowered.tiles_cut, replicated=" ".join(replicated), eps=norm.eps, weight_offset=norm.weight_offset,
        cast_before_weight=norm.cast_before_weight, among_all=lowered.sum_sharded,
    ) if lowered.takes_norm else None  # fmt: skip
    gather = AllGatherGemmCall(
        site, group, fabric, world, hidden, rows_dtype, lowered.max_tokens, timeout_s, channel, cut=lowered.pushed_cut
    )
    sum_gather = AllGatherGemmCall(
        site, group, fabric, world, hidden, facts.dtype, lowered.max_tokens, timeout_s, channel, hands_out_rows=True
    )
    return Calls(scatter, normed, gather, sum_gather)
