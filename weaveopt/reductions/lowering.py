"""What a chosen candidate becomes: the call of its operation, and the memory that the call works in."""

from __future__ import annotations

from weaveopt.fabrics.traits import TRAITS
from weaveopt.reductions import call as op
from weaveopt.reductions.buffers import RowFormat, buffers_of, placed_call, wiring_of
from weaveopt.reductions.candidates import Lowered
from weaveopt.rule import BufferRequest, Chosen, Context, Memory, Placement
from weaveopt.sites.quantization import Quantized
from weaveopt.sites.reduced import Reduced


def memory_of(lowered: Lowered) -> Memory:
    """The buffers of the operation's kernels; see `weaveopt.reductions.buffers`."""
    workload = lowered.workload
    # Among CPU ranks normalized rows may be wider than the activations (fp32 weights): for the widest.
    on_gpus = TRAITS[lowered.fabric].device == "cuda"
    out_dtype = (workload.out_dtype or workload.dtype) if on_gpus else "float32"
    rows = RowFormat(workload.hidden, workload.dtype, out_dtype, workload.world // workload.hosts)
    buffers = buffers_of(lowered.fabric, rows, workload.max_tokens, lowered.rows)
    requests = tuple(BufferRequest(buffer) for buffer in buffers if buffer.num_bytes)
    return Memory(requests, wiring=wiring_of(lowered.fabric, lowered.rows))


def call_of(
    chosen: Chosen,
    lowered: Lowered,
    reduced: Reduced,
    placement: Placement,
    quantized: Quantized | None,
    sum_used: bool,
    context: Context,
) -> op.ReductionCall:
    """The constants of the site's call, equal on all ranks."""
    workload = lowered.workload
    sharded = op.SumOut.SHARDED if lowered.sum_sharded else op.SumOut.WHOLE
    call = op.ReductionCall(
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
        sum_out=sharded if sum_used else op.SumOut.NONE,
        timeout_s=context.config.timeout_s,
        normalized_aliases_arena=lowered.aliases_arena,
        quant=op.Quant.NONE if quantized is None else quantized.quant,
        table=lowered.rows,
        in_pieces=TRAITS[lowered.fabric].device == "cuda" and lowered.max_tokens >= workload.max_tokens,
        channel=placement.channel,
    )
    return placed_call(call, placement.buffers)
