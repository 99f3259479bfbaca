"""One kernel that computes the product and pushes every tile to the owner of its rows as it is finished.

Its time is measured as what it takes beyond its GEMM, by message bytes, where the GEMM is the longer part. A profile
keeps that as curves of the operation `gemm_all_reduce`, variant `tiles columns=256 pairs=4`, in the costs of `peer`.
"""

from __future__ import annotations

import re
from functools import cache

from weaveopt.cost_model import Machine, host_us
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.curve import at_row, interpolate_us
from weaveopt.cost_model.machine import Curve
from weaveopt.errors import ProfileError
from weaveopt.fabrics.traits import NativePart, is_built
from weaveopt.ops.gemm_all_reduce.call import TILE_COLUMNS, TILE_DTYPES, TILES, Cut, WeightLayout
from weaveopt.records.candidate import Estimate, Fabric, Rejection, Term
from weaveopt.records.norm import NormKind
from weaveopt.reductions.eligible import ROW_ALIGNMENT
from weaveopt.reductions.prices.estimate import estimate_fused
from weaveopt.reductions.prices.workload import Workload
from weaveopt.reductions.variant import Algorithm, Transfer
from weaveopt.sites.norms import Norm
from weaveopt.sites.reduced import Reduced

try:
    from weaveopt import _native
except ImportError:  # built without it: size_rejections() says so
    _native = None  # type: ignore[assignment]

OP = "gemm_all_reduce"
"""The operation of its curves."""
_NAME = re.compile(rf"{TILES} columns=(\d+) pairs=(\d+)")


@cache
def parse_cut(name: str) -> Cut:
    """How a curve's kernel cuts the product. Raises `ProfileError` where there is no such kernel."""
    found = _NAME.fullmatch(name)
    cut = Cut(int(found[1]), int(found[2])) if found else None
    if cut is None or cut.tile_columns not in TILE_COLUMNS or cut.group_pairs < 1:
        raise ProfileError(
            f"a curve of {OP}: found variant {name!r}, expected '{TILES} columns=N pairs=M', N one of {TILE_COLUMNS}"
        )
    return cut


def tail_curves(machine: Machine, fabric: Fabric, world: int, hidden: int) -> dict[Cut, Curve]:
    """What the kernel takes beyond its GEMM, by how it cuts the product, as measured with so many ranks."""
    if fabric not in machine.fabrics:
        return {}
    by_cut: dict[Cut, list[Curve]] = {}
    for curve in fabric_costs(machine, fabric).curves_of(OP):
        if curve.world == world:
            by_cut.setdefault(parse_cut(curve.variant), []).append(curve)
    return {cut: at_row(curves, hidden) for cut, curves in by_cut.items()}


def form_rejections(reduced: Reduced, layout: WeightLayout, takes_norm: bool) -> tuple[Rejection, ...]:
    """What the kernel does not do at a site, whatever its sizes; `takes_norm`: the norm of the sum is its part."""
    reasons: list[Rejection] = []
    if layout is not WeightLayout.NK:
        message = "the kernel reads weights that are stored [hidden, k]"
        reasons.append(Rejection("weight_layout", message, (("layout", layout.value),)))
    if reduced.post is not None:
        reasons.append(Rejection("norm_not_supported", "the kernel has no norm ahead of the residual", ()))
    if takes_norm and reduced.norm is not None:
        reasons.extend(_norm_rejections(reduced.norm))
    return tuple(reasons)


def _norm_rejections(norm: Norm) -> list[Rejection]:
    if norm.form.kind is NormKind.RMS:
        return []
    return [Rejection("norm_not_supported", "the kernel knows RMS norms", (("kind", norm.form.kind.value),))]


def size_rejections(workload: Workload) -> list[Rejection]:
    """Token counts, rows and types that the kernel does not take."""
    if not is_built(NativePart.HOST):
        return [Rejection("native_part_missing", "weaveopt was installed without its native part")]
    assert workload.gemm is not None, "a site without a GEMM has no tiles"
    reasons: list[Rejection] = []
    if not workload.is_static:
        values = (("least", workload.min_tokens), ("most", workload.max_tokens))
        message = "the kernel is planned for one token count, and this graph's is symbolic"
        reasons.append(Rejection("symbolic_tokens", message, values))
    most = _native.product_most_tokens(workload.world)
    if workload.max_tokens > most:
        message = f"the kernel takes at most {most} tokens"
        reasons.append(Rejection("too_many_tokens", message, (("tokens", workload.max_tokens),)))
    if workload.hidden > _native.PRODUCT_MOST_HIDDEN:
        message = f"the kernel takes rows of at most {_native.PRODUCT_MOST_HIDDEN} elements"
        reasons.append(Rejection("row_not_supported", message, (("hidden", workload.hidden),)))
    if workload.gemm.k % ROW_ALIGNMENT:
        message = f"the kernel takes products of a depth that is a multiple of {ROW_ALIGNMENT}"
        reasons.append(Rejection("depth_not_supported", message, (("k", workload.gemm.k),)))
    handed_out = workload.out_dtype or workload.dtype
    if workload.dtype not in TILE_DTYPES or handed_out != workload.dtype:
        values_of = (("dtype", workload.dtype), ("normalized", handed_out))
        message = "the kernel takes bf16 or fp16, and hands rows out in the same"
        reasons.append(Rejection("dtype_not_supported", message, values_of))
    return reasons


def estimate_tiles(machine: Machine, workload: Workload, fabric: Fabric, tail: Curve) -> tuple[Estimate, float]:
    """The site with its sum handed out whole; and what that takes, where the sum may stay sharded.

    Terms: `gemm`; `exchange`, as the kernel of bulk copies makes it; `overlapped`, the shorter of the two, which the
    longer one hides; `tail`, measured; `host`. The model's own error is charged for all of it: the GEMM is not the
    graph's, so that what is wrong with its price need not be with this one's.
    """
    fused = estimate_fused(machine, workload, fabric, Algorithm.TWO_SHOT, False, Transfer.BULK)
    gemm_us = sum(term.us for term in fused.terms if term.name == "gemm")
    gather_us = sum(term.us for term in fused.terms if term.name == "gather")
    exchange_us = fused.us - gemm_us
    slowdown = machine.oversubscription(workload.world, workload.hosts)
    terms = (
        Term("gemm", gemm_us),
        Term("exchange", exchange_us),
        Term("overlapped", -min(gemm_us, exchange_us)),
        Term("tail", interpolate_us(tail.points, workload.message_bytes)),
        Term("host", host_us(machine) * slowdown),
    )
    estimate = Estimate(tuple(term for term in terms if term.us != 0.0), machine.relative_error)
    saved_us = max(gemm_us, exchange_us) - max(gemm_us, exchange_us - gather_us)
    return estimate, saved_us if workload.sum_may_shard else 0.0
