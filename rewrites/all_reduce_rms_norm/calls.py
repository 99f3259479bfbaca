"""What a chosen candidate becomes: the call of its operation, and the memory that the call works in."""

from __future__ import annotations

from functools import reduce

from weaveopt.ops.all_reduce_norm import call as op
from weaveopt.records.memory import Buffer, Lifetime, RegionNeed
from weaveopt.rewrites.all_reduce_rms_norm.candidates import Lowered
from weaveopt.rule import BufferRequest, Chosen, Context, Memory, Placement
from weaveopt.sites.quantization import Quantized
from weaveopt.sites.reduced import Reduced

ABSENT = 0x80000000


def memory_of(lowered: Lowered) -> Memory:
    """The buffers of the operation's kernels; see `weaveopt.ops.all_reduce_norm`."""
    workload = lowered.workload
    if lowered.fabric in op.GPU_FABRICS:
        out_dtype = workload.out_dtype or workload.dtype
        needs = (
            op.region_need(row, workload.hidden, workload.dtype, out_dtype, workload.world) for row in lowered.rows
        )
        need = reduce(RegionNeed.union, needs, RegionNeed())
        buffers: tuple[Buffer, ...] = (
            Buffer("mailboxes", 2 * need.mailbox_bytes, Lifetime.ARENA, fill=ABSENT),
            Buffer("staging", need.staging_bytes, Lifetime.ARENA),
            Buffer("output", need.output_bytes, Lifetime.ARENA),
            Buffer("partial", need.partial_bytes, Lifetime.ARENA),
        )
    else:
        # The normalized rows may be wider than the activations (fp32 weights): reserve for the widest.
        shm = op.arena_bytes(workload.max_tokens, workload.hidden, workload.dtype, "float32", workload.world)
        buffers = (
            Buffer("partial", 2 * shm.partial_bytes, Lifetime.ARENA, alignment=4096),
            Buffer("output", shm.output_bytes, Lifetime.CALL, alignment=4096),
        )
    return Memory(tuple(BufferRequest(buffer) for buffer in buffers if buffer.num_bytes))


def call_of(
    chosen: Chosen,
    lowered: Lowered,
    reduced: Reduced,
    placement: Placement,
    quantized: Quantized | None,
    sum_used: bool,
    context: Context,
) -> op.AllReduceNormCall:
    """The constants of the site's call, equal on all ranks."""
    workload = lowered.workload
    sharded = op.SumOut.SHARDED if lowered.sum_sharded else op.SumOut.WHOLE
    partial, output = placement.buffers.get("partial"), placement.buffers.get("output")
    is_shm = lowered.fabric not in op.GPU_FABRICS
    return op.AllReduceNormCall(
        site=chosen.found.site.id,
        group=chosen.found.site.groups[0],
        fabric=lowered.fabric,
        world=workload.world,
        hidden=workload.hidden,
        dtype=workload.dtype,
        out_dtype=workload.out_dtype or workload.dtype,
        partial_offset=partial.offset if partial is not None and is_shm else 0,
        output_offset=output.offset if output is not None and is_shm else 0,
        partial_bytes=partial.num_bytes // 2 if partial is not None and is_shm else 0,
        max_tokens=lowered.max_tokens,
        one_shot_max_tokens=lowered.one_shot_max_tokens,
        scale=reduced.scale,
        post=reduced.post.form if reduced.post else None,
        norm=reduced.norm.form if reduced.norm else None,
        residual_sharded=lowered.residual_sharded,
        sum_out=sharded if sum_used else op.SumOut.NONE,
        timeout_s=context.config.timeout_s,
        normed_lands=lowered.aliases_arena,
        quant=op.Quant.NONE if quantized is None else quantized.quant,
        lowerings=lowered.rows,
        in_pieces=not is_shm and lowered.max_tokens >= workload.max_tokens,
    )
