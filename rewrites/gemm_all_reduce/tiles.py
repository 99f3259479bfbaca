"""Variant `tiles`: one kernel computes the GEMM and pushes every tile to the owner of its rows as it is finished.

Its time is not modelled: a profile keeps it as measured, see `weaveopt.cost_model.tile_config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from weaveopt.cost_model import Machine, gemm_us, host_us, memory_us
from weaveopt.cost_model.gemm import num_units
from weaveopt.cost_model.machine import MEASURED
from weaveopt.cost_model.overlapped import Message, Unmeasured, fastest
from weaveopt.cost_model.tile_config import TILE_DTYPES, TileConfig
from weaveopt.fabrics.traits import NativePart, is_built
from weaveopt.ops.gemm_comm.all_reduce.call import ALL_REDUCE, TileOutput, WeightLayout
from weaveopt.ops.reduction.prices.estimate import gather_us
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.records.candidate import Estimate, Fabric, Rejection, Term
from weaveopt.records.norm import NormKind
from weaveopt.records.site import DTYPE_BYTES
from weaveopt.rewrites.reduction.eligible import ROW_ALIGNMENT
from weaveopt.sites.shared.epilogue import Reduced
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: size_rejections() says so
    _native = None  # type: ignore[assignment]

SYMBOLIC = Rejection("symbolic_tokens", "the kernel is planned for one token count, and this graph's is symbolic")


@dataclass(frozen=True)
class PricedTiles:
    """The kernel at a site, by the cut that is predicted fastest."""

    cut: TileConfig
    estimate: Estimate
    """Estimate with the sum returned unsharded, if it is read."""
    gather_us: float
    """Part of the estimate that gathers the rows of the sum."""
    measured: bool
    """True if its time was measured on such a machine."""


def form_rejections(
    reduced: Reduced, layout: WeightLayout, symbolic_tokens: bool, takes_norm: bool
) -> tuple[Rejection, ...]:
    """Rejections for what the kernel does not support at a site, whatever its sizes; `takes_norm`: it computes the norm
    of the sum too."""
    reasons: list[Rejection] = []
    if symbolic_tokens:
        reasons.append(SYMBOLIC)
    if layout is not WeightLayout.NK:
        message = "the kernel reads weights that are stored [hidden, k]"
        reasons.append(Rejection("weight_layout", message, (("layout", layout.value),)))
    if reduced.post is not None:
        reasons.append(Rejection("norm_not_supported", "the kernel has no norm ahead of the residual"))
    if takes_norm and reduced.norm is not None:
        kind = reduced.norm.form.kind
        if kind is not NormKind.RMS:
            reasons.append(
                Rejection("norm_not_supported", "the kernel supports RMS norms only", (("kind", kind.value),))
            )
        if reduced.norm.bias is not None:
            reasons.append(Rejection("norm_not_supported", "the kernel does not support a norm with a bias"))
    return tuple(reasons)


def size_rejections(workload: Workload) -> list[Rejection]:
    """Token counts, rows and types that the kernel does not take."""
    if not is_built(NativePart.HOST):
        return [Rejection(NativePart.HOST.code, "weaveopt was installed without its native part")]
    assert workload.gemm is not None, "a site without a GEMM has no tiles"
    reasons = [] if workload.is_static else [SYMBOLIC]
    most = _native.product_most_tokens(workload.world)
    if workload.max_tokens > most:
        message = f"the kernel supports at most {counted(most, 'token')}"
        reasons.append(Rejection("too_many_tokens", message, (("tokens", workload.max_tokens),)))
    if workload.hidden > _native.PRODUCT_MOST_HIDDEN:
        message = f"the kernel supports rows of at most {_native.PRODUCT_MOST_HIDDEN} elements"
        reasons.append(Rejection("row_not_supported", message, (("hidden", workload.hidden),)))
    if workload.gemm.k % ROW_ALIGNMENT:
        message = f"the kernel supports products of a depth that is a multiple of {ROW_ALIGNMENT}"
        reasons.append(Rejection("depth_not_supported", message, (("k", workload.gemm.k),)))
    out_dtype = workload.out_dtype or workload.dtype
    if workload.dtype not in TILE_DTYPES or out_dtype != workload.dtype:
        values_of = (("dtype", workload.dtype), ("normalized", out_dtype))
        message = "the kernel supports bf16 and fp16, and returns rows in the dtype of its input"
        reasons.append(Rejection("dtype_not_supported", message, values_of))
    return reasons


def price(machine: Machine, workload: Workload, fabric: Fabric, copies_rows: bool = False) -> PricedTiles | Rejection:
    """The kernel at a site that it takes; or why its time is not known.

    Terms: `gemm`, as the graph's own would take; `exposed`, what the kernel takes beyond that; `gather`, in full,
    though the GEMM may hide some of it; `copy`, of normalized rows out of the arena (`copies_rows`), which kernels were
    measured without; `host`. The kernel's time is off by the error of its own curve: the GEMM is
    not the graph's, so what is wrong with its price need not be with this one's.
    """
    assert workload.gemm is not None, "a site without a GEMM has no tiles"
    output = _output_of(workload)
    kernels = ALL_REDUCE.known(machine, fabric, workload.world, output.variant)
    units = num_units(machine, workload.dtype)

    def waves(cut: TileConfig, tokens: int, hidden: int, _: int) -> int:
        sizes = tokens, hidden, cut.tile_columns, cut.reducer_ctas, workload.world, units
        return 0 if _native is None else _native.product_waves(*sizes)

    message = Message(workload.tokens, workload.hidden, DTYPE_BYTES[workload.dtype])
    multiplied_us = gemm_us(machine, workload.gemm, workload.dtype)
    found = fastest(kernels, machine, message, workload.gemm.k, waves, multiplied_us)
    if isinstance(found, Unmeasured):
        return Rejection(found.code, found.message, found.values)
    cut, us = found
    named = dict(machine.origins)
    gathered_us = gather_us(machine, workload, fabric) if output is TileOutput.NORM else 0.0
    origins = {named[curve.origin].kind for curves in kernels.by_cut[cut].values() for curve in curves}
    copied_us = memory_us(machine, 2.0 * message.bytes) if copies_rows else 0.0
    return PricedTiles(
        cut, _estimate(machine, workload, us, gathered_us, copied_us), gathered_us, origins == {MEASURED}
    )


def _output_of(workload: Workload) -> TileOutput:
    """Results that the site needs on every rank. A sum that only other sites read may stay sharded among them; where it
    does not, its gather is charged in addition to the time that was measured without."""
    if not workload.has_norm:
        return TileOutput.SUM
    return TileOutput.BOTH if workload.sum_is_used and not workload.sum_may_shard else TileOutput.NORM


def _estimate(machine: Machine, workload: Workload, kernel_us: float, gathered_us: float, copied_us: float) -> Estimate:
    slowdown = machine.oversubscription(workload.world, workload.hosts)
    multiplied_us = gemm_us(machine, workload.gemm, workload.dtype)
    terms = (
        Term("gemm", multiplied_us),
        Term("exposed", kernel_us - multiplied_us),
        Term("gather", gathered_us),
        Term("copy", copied_us),
        Term("host", host_us(machine) * slowdown),
    )
    return Estimate(tuple(term for term in terms if term.us != 0.0))
