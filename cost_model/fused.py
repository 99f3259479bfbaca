"""The fused all-reduce + add + norm: which kernels a fabric has, and the time of one, in terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import inf, log

from weaveopt.cost_model.collectives import all_reduce_parts_us, curve_us, fabric_costs
from weaveopt.cost_model.curve import interpolate_us
from weaveopt.cost_model.kernels import traffic_us
from weaveopt.cost_model.machine import MEASURED, Curve, FabricCosts, Machine, Point
from weaveopt.records.candidate import Algorithm, Fabric, Form, Term
from weaveopt.records.site import Workload

KERNELS: dict[Form, tuple[Algorithm, ...]] = {
    Form.SEGMENT: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT),
    Form.MAIL: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT),
    Form.BULK: (Algorithm.TWO_SHOT,),
    Form.DIRECT: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT),
}
"""Algorithms that a form of the fused kernel has."""
READS_ANYWHERE = frozenset({Form.MAIL, Form.BULK})
"""Forms that send a partial result from wherever it is; for the others it must lie in the arena."""


@dataclass(frozen=True)
class Way:
    """One kernel of a fabric, with the number of its CTAs, and what is known of its time."""

    algorithm: Algorithm
    form: Form
    num_ctas: int
    curve: Curve | None
    """None: no such kernel was measured; its time is modelled."""
    measured: bool
    """Whether its time was measured on such a machine with as many ranks."""

    def reaches(self, message_bytes: int) -> bool:
        """Whether anything is known of messages of that size."""
        if self.curve is None:
            return True
        last_bytes = self.curve.last_bytes
        return self.curve.first_bytes <= message_bytes and (last_bytes is None or message_bytes <= last_bytes)


@cache
def ways(machine: Machine, fabric: Fabric, hidden: int, world: int, hosts: int = 1) -> tuple[Way, ...]:
    """Every kernel that may serve rows of `hidden`; the earlier one is taken where two are equally fast.

    On `peer`, what was measured excludes what was not; without any measurement, and on the other fabrics, a kernel
    that was not measured is modelled. Empty between hosts (all these fabrics but `nvshmem` stay within one).
    """
    if hosts > 1 or world < 2 or fabric not in machine.fabrics:
        return ()
    costs = fabric_costs(machine, fabric)
    known = fabric is Fabric.PEER and bool(costs.all_reduce_norm)
    named = dict(machine.origins)
    found: list[Way] = []
    for form in costs.usable_forms:
        for algorithm in KERNELS[form]:
            curves = fused_curves(costs, algorithm, form, world, hidden)
            # Few CTAs first: they leave the rest of the device to others.
            for curve in sorted(curves, key=lambda each: each.ctas or inf):
                measured = curve.world == world and named[curve.origin].kind == MEASURED
                found.append(Way(algorithm, form, curve.ctas, curve, measured))
            # The model cannot tell two forms apart: bulk copies are made for what mail is not.
            told_apart = form is not Form.MAIL or algorithm is Algorithm.ONE_SHOT or Form.BULK not in costs.usable_forms
            if not curves and not known and told_apart:
                found.append(Way(algorithm, form, 0, None, measured=False))
    order = tuple(Algorithm)
    return tuple(sorted(found, key=lambda way: order.index(way.algorithm)))


def fused_curves(costs: FabricCosts, algorithm: Algorithm, form: Form, world: int, hidden: int) -> list[Curve]:
    """The curves of a kernel, one for each number of CTAs: at the nearest world size, between the rows measured."""
    fitting = [curve for curve in costs.all_reduce_norm if curve.algorithm is algorithm and curve.form is form]
    if not fitting:
        return []
    nearest = min((curve.world for curve in fitting), key=lambda other: (abs(log(other / world)), -other))
    by_ctas: dict[int, list[Curve]] = {}
    for curve in fitting:
        if curve.world == nearest:
            by_ctas.setdefault(curve.ctas, []).append(curve)
    return [_at_hidden(sorted(curves, key=lambda each: each.hidden), hidden) for curves in by_ctas.values()]


def _at_hidden(curves: list[Curve], hidden: int) -> Curve:
    """Between two row lengths, times of equal bytes are interpolated along log hidden; beyond them the last one's."""
    above = next((curve for curve in curves if curve.hidden >= hidden), curves[-1])
    below = next((curve for curve in reversed(curves) if curve.hidden <= hidden), curves[0])
    if above is below or not below.hidden:
        return above
    points = _blend(below, above, log(hidden / below.hidden) / log(above.hidden / below.hidden))
    ends = [end for end in (below.last_bytes, above.last_bytes) if end is not None]
    if ends:
        points = tuple(point for point in points if point.bytes <= min(ends))
    return replace(below, hidden=hidden, points=points) if points else above


def _blend(below: Curve, above: Curve, share: float) -> tuple[Point, ...]:
    """Times at `share` of the way from one curve to the other, in the logarithm, wherever one of them has a point."""
    sizes = sorted({point.bytes for curve in (below, above) for point in curve.points})
    return tuple(
        Point(size, interpolate_us(below.points, size) ** (1 - share) * interpolate_us(above.points, size) ** share)
        for size in sizes
    )


def way_for(
    machine: Machine, workload: Workload, fabric: Fabric, algorithm: Algorithm, form: Form | None, num_ctas: int | None
) -> Way:
    """The kernel asked for; of what is None, the fastest. Modelled, where nothing is known of it."""
    fitting = [
        way
        for way in ways(machine, fabric, workload.hidden, workload.world, workload.hosts)
        if way.algorithm is algorithm and way.reaches(workload.message_bytes)
        if form in (None, way.form) and num_ctas in (None, way.num_ctas)
    ]
    if fitting:
        return min(fitting, key=lambda way: exchange_us(machine, workload, fabric, way))
    if form is not None and num_ctas:
        between = _between_ctas(machine, workload, fabric, algorithm, form, num_ctas)
        if between is not None:
            return between
    usable = fabric_costs(machine, fabric).usable_forms
    offered = next((each for each in usable if algorithm in KERNELS[each]), Form.DIRECT)
    return Way(algorithm, form or offered, num_ctas or 0, None, measured=False)


def _between_ctas(
    machine: Machine, workload: Workload, fabric: Fabric, algorithm: Algorithm, form: Form, num_ctas: int
) -> Way | None:
    """A number of CTAs that was not measured: log-log between its neighbours; below them, a CTA's rate is the limit."""
    measured = {
        way.num_ctas: (way, way.curve)
        for way in ways(machine, fabric, workload.hidden, workload.world, workload.hosts)
        if way.algorithm is algorithm and way.form is form and way.num_ctas and way.curve is not None
    }
    if not measured:
        return None
    above = min((ctas for ctas in measured if ctas > num_ctas), default=max(measured))
    below = max((ctas for ctas in measured if ctas < num_ctas), default=min(measured))
    way, curve = measured[below]
    if below == above:
        slower, floor_us = max(below / num_ctas, 1.0), curve.points[0].us
        points = tuple(Point(each.bytes, floor_us + (each.us - floor_us) * slower) for each in curve.points)
    else:
        points = _blend(curve, measured[above][1], log(num_ctas / below) / log(above / below))
    return replace(way, num_ctas=num_ctas, curve=replace(curve, ctas=num_ctas, points=points))


def exchange_terms(machine: Machine, workload: Workload, fabric: Fabric, way: Way) -> list[Term]:
    """The fused kernel itself, shared out among `synchronize`, `reduce`, `norm` and `distribute`.

    Where the fused kernel was measured, only the sharing out is modelled: the terms add up to the measurement.
    """
    message, world = workload.message_bytes, workload.world
    if world <= 1 or message <= 0:
        return []
    one_shot = way.algorithm is Algorithm.ONE_SHOT
    # The residual is read and the sum written in the same pass; the normed row's write belongs to the exchange.
    passes = workload.has_residual + workload.sum_is_used + (workload.num_norms - 1)
    rows = 1.0 if one_shot else 1.0 / world
    norm_us = traffic_us(machine, passes * message * rows) * machine.crowding(world, workload.hosts)
    if way.curve is not None:
        latency_us, rest_us = curve_us(machine, fabric, way.curve, message, world)
        norm_us = min(norm_us, rest_us / 2)
        moved_us = rest_us - norm_us
    else:
        latency_us, moved_us = all_reduce_parts_us(machine, fabric, way.algorithm, message, world, workload.hosts)
    terms = [Term("synchronize", latency_us)]
    if one_shot:
        return [*terms, Term("reduce", moved_us), Term("norm", norm_us)]
    # Bringing the peers' shares of this rank's rows and handing the finished rows out move equally much.
    return [*terms, Term("reduce", moved_us / 2), Term("norm", norm_us), Term("distribute", moved_us / 2)]


def exchange_us(machine: Machine, workload: Workload, fabric: Fabric, way: Way) -> float:
    """The fused kernel itself, in all."""
    return sum(term.us for term in exchange_terms(machine, workload, fabric, way))
