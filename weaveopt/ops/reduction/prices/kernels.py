"""The kernels of the fused all-reduce + add + norm: which of them a fabric has, and the time of one, in terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf, log

from weaveopt.cost_model.collectives import all_reduce_parts_us, all_reduce_steps, curve_parts_us, fabric_costs
from weaveopt.cost_model.curve import at_row, blend, nearest_curve, nearest_world
from weaveopt.cost_model.hosts_curves import at_least, curves_between, gpu_doubling, hosts_parts_us
from weaveopt.cost_model.kernels import traffic_us
from weaveopt.cost_model.machine import MEASURED, Curve, FabricCosts, Machine, Point
from weaveopt.ops.reduction.prices.messages import message_terms
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import (
    ALGORITHMS,
    BETWEEN_GPUS,
    OP,
    Algorithm,
    Transfer,
    parse_variant,
    variant_name,
)
from weaveopt.records.candidate import Fabric, Term
from weaveopt.records.site import DTYPE_BYTES

USUAL_TRANSFERS: dict[Fabric, tuple[Transfer, ...]] = {
    Fabric.SHM: (Transfer.SEGMENT,),
    Fabric.TCP: (Transfer.MESSAGE,),
    Fabric.PEER: (Transfer.LL_PACKET, Transfer.BULK),
    Fabric.HOST: (Transfer.LL_PACKET, Transfer.BULK, Transfer.POSTED),
    Fabric.MULTIMEM: (Transfer.DIRECT,),
    Fabric.NVSHMEM: (Transfer.DIRECT,),
    Fabric.LIBRARY: (),
}
"""Transfers that a fabric's devices can run, if the profile does not name them."""
READS_ANYWHERE = frozenset({Transfer.LL_PACKET, Transfer.BULK, Transfer.POSTED, *BETWEEN_GPUS})
"""Transfers that send a partial result from wherever it is; for the others it must be in the arena."""
MEASURED_ONLY = frozenset({Fabric.HOST, Fabric.NVSHMEM})
"""Fabrics whose kernels are used only where the profile has times of them."""
MEASURED_BYTES = 2
"""Bytes of an element of the rows that `weaveopt calibrate` exchanges."""


@dataclass(frozen=True)
class KernelVariant:
    """One kernel of a fabric, with the number of its CTAs, and what is known of its time."""

    algorithm: Algorithm
    transfer: Transfer
    num_ctas: int
    """0: as many as are co-resident."""
    curve: Curve | None
    """None: no such kernel was measured; its time is modelled."""
    measured: bool
    """True if its time was measured on such a machine with as many ranks."""

    def covers(self, message_bytes: int) -> bool:
        """True if the variant's curve covers messages of that size, or it has no curve."""
        return self.curve is None or self.curve.covers(message_bytes)


def usable_transfers(costs: FabricCosts) -> tuple[Transfer, ...]:
    """Transfers that the fabric's devices can run; those that a profile names and no kernel has are left out."""
    named = tuple(Transfer(word) for word in costs.transfers if word in frozenset(Transfer))
    return named if costs.transfers else USUAL_TRANSFERS[costs.fabric]


@cache
def kernel_variants(
    machine: Machine, fabric: Fabric, hidden: int, world: int, hosts: int = 1
) -> tuple[KernelVariant, ...]:
    """Every kernel that may serve rows of `hidden`; the earlier one is taken where two are equally fast.

    On `peer`, what was measured excludes what was not; without any measurement, and on the other fabrics, a kernel that
    was not measured is modelled. Between hosts, messages are modelled, and transfers between GPUs measured.
    """
    if world < 2 or fabric not in machine.fabrics:
        return ()
    if hosts > 1 and fabric is Fabric.NVSHMEM:
        return _between_gpus(machine, fabric, hidden, world, hosts)
    sends_messages = Transfer.MESSAGE in USUAL_TRANSFERS[fabric]
    if hosts > 1 or sends_messages:
        names = ALGORITHMS[Transfer.MESSAGE] if hosts > 1 and sends_messages else ()
        return tuple(KernelVariant(name, Transfer.MESSAGE, 0, None, measured=False) for name in names)
    costs = fabric_costs(machine, fabric)
    known = fabric in MEASURED_ONLY or (fabric is Fabric.PEER and bool(costs.curves_of(OP)))
    usable = usable_transfers(costs)
    named = dict(machine.origins)
    found: list[KernelVariant] = []
    for transfer in usable:
        for algorithm in ALGORITHMS[transfer]:
            curves = kernel_curves(costs.curves_of(OP), algorithm, transfer, world, hidden)
            # Few CTAs first: they leave the rest of the device to others.
            for num_ctas, curve in sorted(curves.items(), key=lambda pair: pair[0] or inf):
                measured = curve.world == world and named[curve.origin].kind == MEASURED
                found.append(KernelVariant(algorithm, transfer, num_ctas, curve, measured))
            # The model cannot distinguish two transfers: bulk copies are made for what LL packets are not.
            differing = (
                transfer is not Transfer.LL_PACKET or algorithm is Algorithm.ONE_SHOT or Transfer.BULK not in usable
            )
            if not curves and not known and differing:
                found.append(KernelVariant(algorithm, transfer, 0, None, measured=False))
    order = tuple(Algorithm)
    return tuple(sorted(found, key=lambda variant: order.index(variant.algorithm)))


def _between_gpus(machine: Machine, fabric: Fabric, hidden: int, world: int, hosts: int) -> tuple[KernelVariant, ...]:
    """Those that were measured between hosts of as many GPUs, with their times among the nearest number of hosts."""
    measured = curves_between(fabric_costs(machine, fabric), OP, ranks_of_host=world // hosts)
    kinds = dict(machine.origins)
    found = []
    for transfer in BETWEEN_GPUS:
        known = kernel_curves(measured, Algorithm.DOUBLING, transfer, world, hidden)
        for num_ctas, curve in sorted(known.items(), key=lambda pair: pair[0] or inf):
            here = curve.hosts == hosts and kinds[curve.origin].kind == MEASURED
            found.append(KernelVariant(Algorithm.DOUBLING, transfer, num_ctas, curve, measured=here))
    return tuple(found)


def longest_row_bytes(machine: Machine, fabric: Fabric, ranks_of_host: int) -> int:
    """Longest row that kernels between hosts of so many GPUs were measured with, in bytes; 0: none was."""
    if fabric not in machine.fabrics:
        return 0
    curves = curves_between(fabric_costs(machine, fabric), OP, ranks_of_host=ranks_of_host)
    return max((curve.row * MEASURED_BYTES for curve in curves), default=0)


def kernel_curves(
    measured: Sequence[Curve], algorithm: Algorithm, transfer: Transfer, world: int, hidden: int
) -> dict[int, Curve]:
    """A kernel's curves by number of CTAs: at the nearest world size, between the rows measured."""
    by_ctas: dict[int, list[Curve]] = {}
    fitting = []
    for curve in measured:
        kernel = parse_variant(curve.variant)
        if kernel[:2] == (algorithm, transfer):
            fitting.append((kernel[2], curve))
    if fitting:
        nearest = nearest_world((curve for _, curve in fitting), world)
        for num_ctas, curve in fitting:
            if curve.world == nearest:
                by_ctas.setdefault(num_ctas, []).append(curve)
    return {num_ctas: at_row(tuple(curves), hidden) for num_ctas, curves in by_ctas.items()}


def variant_for(
    machine: Machine,
    workload: Workload,
    fabric: Fabric,
    algorithm: Algorithm,
    transfer: Transfer | None,
    num_ctas: int | None,
) -> KernelVariant:
    """The kernel asked for; of what is None, the fastest. Modelled, where nothing is known of it."""
    fitting = [
        variant
        for variant in kernel_variants(machine.untimed, fabric, workload.hidden, workload.world, workload.hosts)
        if variant.algorithm is algorithm and variant.covers(workload.message_bytes)
        if transfer in (None, variant.transfer) and num_ctas in (None, variant.num_ctas)
    ]
    if fitting:
        return min(fitting, key=lambda variant: exchange_us(machine, workload, fabric, variant))
    if transfer is not None and num_ctas:
        between = _between_ctas(machine, workload, fabric, algorithm, transfer, num_ctas)
        if between is not None:
            return between
    usable = usable_transfers(fabric_costs(machine, fabric))
    offered = next((each for each in usable if algorithm in ALGORITHMS[each]), Transfer.DIRECT)
    return KernelVariant(algorithm, transfer or offered, num_ctas or 0, None, measured=False)


def _between_ctas(
    machine: Machine, workload: Workload, fabric: Fabric, algorithm: Algorithm, transfer: Transfer, num_ctas: int
) -> KernelVariant | None:
    """A number of CTAs that was not measured: log-log between its neighbours; below them, a CTA's rate is the limit."""
    measured = {
        variant.num_ctas: (variant, variant.curve)
        for variant in kernel_variants(machine.untimed, fabric, workload.hidden, workload.world, workload.hosts)
        if variant.algorithm is algorithm and variant.transfer is transfer and variant.num_ctas
        if variant.curve is not None
    }
    if not measured:
        return None
    above = min((ctas for ctas in measured if ctas > num_ctas), default=max(measured))
    below = max((ctas for ctas in measured if ctas < num_ctas), default=min(measured))
    variant, curve = measured[below]
    if below == above:
        slower, floor_us = max(below / num_ctas, 1.0), curve.points[0].us
        points = tuple(Point(each.bytes, floor_us + (each.us - floor_us) * slower) for each in curve.points)
    else:
        points = blend(curve, measured[above][1], log(num_ctas / below) / log(above / below))
    name = variant_name(algorithm, transfer, num_ctas)
    return replace(variant, num_ctas=num_ctas, curve=replace(curve, variant=name, points=points))


def exchange_terms(machine: Machine, workload: Workload, fabric: Fabric, variant: KernelVariant) -> list[Term]:
    """The fused kernel itself, shared out among `synchronize`, `reduce`, `norm` and `distribute`.

    Where the fused kernel was measured, only the sharing out is modelled: the terms add up to the measurement.
    """
    message, world = workload.message_bytes, workload.world
    if world <= 1 or message <= 0:
        return []
    one_shot = variant.algorithm is Algorithm.ONE_SHOT
    # The residual is read and the sum written in the same pass; the write of what is returned belongs to the
    # exchange: normalized rows, or the sum where there are none.
    norms_before = workload.num_norms - workload.has_norm
    passes = workload.has_residual + norms_before + (workload.has_norm and workload.sum_is_used)
    # Between hosts every host makes the normalized rows of all.
    rows = workload.hosts / world if workload.hosts > 1 else 1.0 if one_shot else 1.0 / world
    norm_us = traffic_us(machine, passes * message * rows) * machine.oversubscription(world, workload.hosts)
    if variant.transfer is Transfer.MESSAGE and workload.hosts > 1:
        return message_terms(machine, workload, variant.algorithm, norm_us)
    if variant.curve is not None and variant.transfer in BETWEEN_GPUS:
        element_bytes, ranks_of_host = DTYPE_BYTES[workload.dtype], world // workload.hosts
        rounds = partial(gpu_doubling, element_bytes=element_bytes, ranks_of_host=ranks_of_host)
        latency_us, rest_us = hosts_parts_us(machine, variant.curve, message, workload.hosts, rounds, at_least)
        norm_us = min(norm_us, rest_us / 2)
        return [Term("synchronize", latency_us), Term("reduce", rest_us - norm_us), Term("norm", norm_us)]
    if variant.curve is not None:
        steps = partial(all_reduce_steps, fabric, variant.algorithm)
        latency_us, rest_us = curve_parts_us(machine, variant.curve, message, world, steps)
        norm_us = min(norm_us, rest_us / 2)
        moved_us = rest_us - norm_us
    else:
        latency_us, moved_us = _unmeasured_parts_us(machine, workload, fabric, variant.algorithm)
    terms = [Term("synchronize", latency_us)]
    if one_shot:
        return [*terms, Term("reduce", moved_us), Term("norm", norm_us)]
    # Bringing the peers' shares of this rank's rows and handing the finished rows out move equally much.
    return [*terms, Term("reduce", moved_us / 2), Term("norm", norm_us), Term("distribute", moved_us / 2)]


def _unmeasured_parts_us(
    machine: Machine, workload: Workload, fabric: Fabric, algorithm: Algorithm
) -> tuple[float, float]:
    """(latency, rest) of a kernel of which nothing is known at this size.

    As a bare all-reduce of that algorithm; where the fabric's bare ones were not measured, as the nearest fused kernel.
    """
    message, world = workload.message_bytes, workload.world
    costs = fabric_costs(machine, fabric)
    if workload.hosts == 1 and not costs.curves_of("all_reduce"):
        same = [curve for curve in costs.curves_of(OP) if parse_variant(curve.variant)[0] is algorithm]
        curve = nearest_curve(same, world)
        if curve is not None:
            return curve_parts_us(machine, curve, message, world, partial(all_reduce_steps, fabric, algorithm))
    return all_reduce_parts_us(machine, fabric, algorithm, message, world, workload.hosts)


def exchange_us(machine: Machine, workload: Workload, fabric: Fabric, variant: KernelVariant) -> float:
    """The fused kernel itself, in all."""
    return sum(term.us for term in exchange_terms(machine, workload, fabric, variant))
