"""The operation's call that a chosen candidate is rewritten to."""

from __future__ import annotations

from dataclasses import replace

from weaveopt.ops.gemm_comm.all_reduce.call import GemmReductionCall
from weaveopt.ops.reduction.call import FEATURES, SumOut
from weaveopt.rewrites.gemm_all_reduce.candidates import Lowered
from weaveopt.rewrites.reduction.lowering import whole_call
from weaveopt.rule import Chosen, Context, Placement
from weaveopt.sites.shared.epilogue import Reduced


def call_of(
    chosen: Chosen, lowered: Lowered, reduced: Reduced, placement: Placement, sum_used: bool, context: Context
) -> GemmReductionCall:
    """The constants of the site's call, equal on all ranks."""
    whole = whole_call(chosen, lowered, reduced, placement, sum_used, context)
    exchange = replace(
        whole,
        residual_sharded=lowered.residual_sharded,
        sum_out=SumOut.SHARDED if sum_used and lowered.sum_sharded else whole.sum_out,
        normalized_aliases_arena=lowered.aliases_arena,
        in_pieces=FEATURES[lowered.fabric].tabled and bool(lowered.chunks),
    )
    return GemmReductionCall(exchange, lowered.variant, lowered.chunks, lowered.cut)
