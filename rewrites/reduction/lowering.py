"""The operation's call that a chosen candidate is rewritten to, and the memory that the call works in."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.reduction import call as op
from weaveopt.ops.reduction.buffers import RowFormat, buffers_of, communication_channel, placed_call, wiring_of
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import KernelRow
from weaveopt.records.candidate import Fabric
from weaveopt.rewrites.reduction.candidates import FusedReductionPlan
from weaveopt.rule import BufferRequest, Chosen, Context, Memory, Placement
from weaveopt.sites.shared.epilogue import Reduced
from weaveopt.sites.shared.quantization import Quantized


class ExchangeLowering(Protocol):
    """The exchange in the lowering of any rule."""

    @property
    def workload(self) -> Workload: ...
    @property
    def fabric(self) -> Fabric: ...
    @property
    def rows(self) -> tuple[KernelRow, ...]:
        """The run-time table, where the fabric has one."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens of one exchange."""
        ...

    @property
    def one_shot_max_tokens(self) -> int: ...


def memory_of(lowered: ExchangeLowering, max_tokens: int = 0, begun: bool = False) -> Memory:
    """The buffers of exchanges of up to `max_tokens` tokens (0: of all that the workload may have), in line or `begun`.

    See `weaveopt.ops.reduction.buffers`.
    """
    workload = lowered.workload
    # Among CPU ranks normalized rows may be wider than the activations (fp32 weights): for the widest.
    on_gpus = TRAITS[lowered.fabric].device == "cuda"
    out_dtype = (workload.out_dtype or workload.dtype) if on_gpus else "float32"
    rows = RowFormat(workload.hidden, workload.dtype, out_dtype, workload.world // workload.hosts, workload.hosts)
    buffers = buffers_of(lowered.fabric, rows, max_tokens or workload.max_tokens, lowered.rows, begun)
    requests = tuple(BufferRequest(buffer) for buffer in buffers if buffer.num_bytes)
    return Memory(requests, wiring=wiring_of(lowered.fabric, lowered.rows))


def whole_call(
    chosen: Chosen, lowered: ExchangeLowering, reduced: Reduced, placement: Placement, sum_used: bool, context: Context
) -> op.ReductionCall:
    """The constants of a site's call, equal on all ranks: residual and sum whole, nothing quantized, in one piece."""
    workload = lowered.workload
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
        sum_out=op.SumOut.WHOLE if sum_used else op.SumOut.NONE,
        timeout_s=context.config.timeout_s,
        table=lowered.rows,
        channel=placement.channel,
    )
    return placed_call(call, placement.buffers)


def call_of(
    chosen: Chosen,
    lowered: FusedReductionPlan,
    reduced: Reduced,
    placement: Placement,
    quantized: Quantized | None,
    sum_used: bool,
    context: Context,
) -> op.ReductionCall:
    """The constants of the site's call, as it was lowered; equal on all ranks."""
    call = whole_call(chosen, lowered, reduced, placement, sum_used, context)
    on_gpus = TRAITS[lowered.fabric].device == "cuda"
    return replace(
        call,
        residual_sharded=lowered.residual_sharded,
        sum_out=op.SumOut.SHARDED if sum_used and lowered.sum_sharded else call.sum_out,
        normalized_aliases_arena=lowered.aliases_arena,
        begun=lowered.begun,
        channel=communication_channel() if lowered.begun else call.channel,
        quant=op.Quant.NONE if quantized is None else quantized.quant,
        in_pieces=on_gpus and lowered.max_tokens >= lowered.workload.max_tokens,
    )
