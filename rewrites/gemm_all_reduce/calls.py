"""What a chosen candidate becomes: the call of its operation, and the memory that the call works in."""

from __future__ import annotations

from weaveopt.ops.gemm_all_reduce.call import GemmReductionCall
from weaveopt.reductions.buffers import RowFormat, buffers_of, placed_call
from weaveopt.reductions.call import FEATURES, ReductionCall, SumOut
from weaveopt.rewrites.gemm_all_reduce.candidates import Lowered
from weaveopt.rule import BufferRequest, Chosen, Context, Memory, Placement
from weaveopt.sites.reduced import Reduced


def memory_of(lowered: Lowered) -> Memory:
    """The buffers of one exchange, as large as its largest chunk: exchanges follow one another on one channel."""
    workload = lowered.workload
    # On fabrics without a table normalized rows may be wider than the activations (fp32 weights): for the widest.
    out_dtype = (workload.out_dtype or workload.dtype) if FEATURES[lowered.fabric].tabled else "float32"
    rows = RowFormat(workload.hidden, workload.dtype, out_dtype, workload.world // workload.hosts)
    buffers = buffers_of(lowered.fabric, rows, lowered.max_tokens, lowered.rows)
    return Memory(tuple(BufferRequest(buffer) for buffer in buffers if buffer.num_bytes))


def call_of(
    chosen: Chosen, lowered: Lowered, reduced: Reduced, placement: Placement, sum_used: bool, context: Context
) -> GemmReductionCall:
    """The constants of the site's call, equal on all ranks."""
    workload = lowered.workload
    handed_out = SumOut.SHARDED if lowered.sum_sharded else SumOut.WHOLE
    reduction = ReductionCall(
        site=chosen.found.site.id,
        group=chosen.found.site.groups[0],
        fabric=lowered.fabric,
        world=workload.world,
        hosts=workload.hosts,
        hidden=workload.hidden,
        dtype=workload.dtype,
        out_dtype=workload.out_dtype or workload.dtype,
        max_tokens=lowered.max_tokens,
        one_shot_max_tokens=lowered.one_shot_max_tokens,
        scale=reduced.scale,
        post=reduced.post.form if reduced.post else None,
        norm=reduced.norm.form if reduced.norm else None,
        residual_sharded=lowered.residual_sharded,
        sum_out=handed_out if sum_used else SumOut.NONE,
        normalized_aliases_arena=lowered.aliases_arena,
        timeout_s=context.config.timeout_s,
        table=lowered.rows,
        in_pieces=FEATURES[lowered.fabric].tabled and bool(lowered.chunks),
        channel=placement.channel,
    )
    return GemmReductionCall(placed_call(reduction, placement.buffers), lowered.variant, lowered.chunks, lowered.cut)
