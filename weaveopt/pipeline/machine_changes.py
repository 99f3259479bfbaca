"""A machine with one constant changed: what a decision may be sensitive to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weaveopt.cost_model import Machine
from weaveopt.cost_model.machine import Curve, FabricCosts, Link, Point

FASTER, SLOWER = 1.25, 0.8
"""Factors of a bandwidth or rate: a quarter more, a fifth less."""
LONGER, SHORTER = 2.0, 0.5
"""Factors of a latency, and of the profile's relative error."""
_WORDS = {FASTER: "+25 %", SLOWER: "-20 %", LONGER: "×2", SHORTER: "×0.5"}


def changes(machine: Machine, dtype: str, hosts: int = 1) -> Iterator[tuple[str, Machine]]:
    """(`fabrics.peer bandwidth -20 %`, the machine with it) for each constant that such a workload rests on.

    A measured curve is read as the cost model reads it: its first time is latency, the rest grows with traffic. The
    GEMMs of other dtypes, and on one host the link to another, are left out.
    """
    for name, factor, changed in _changed(machine, dtype, hosts):
        label = f"{name} {_WORDS[factor]}"
        # Machines are keys of the model's caches, where a name of its own distinguishes each.
        yield label, replace(changed, name=f"{machine.name}, {label}")


def _changed(machine: Machine, dtype: str, hosts: int) -> Iterator[tuple[str, float, Machine]]:
    for index, costs in enumerate(machine.fabric_costs):
        for kind, bandwidth, latency in _FACTORS:
            others = list(machine.fabric_costs)
            others[index] = _fabric(costs, bandwidth, latency)
            factor = bandwidth * latency  # one of the two is 1
            yield f"fabrics.{costs.fabric.value} {kind}", factor, replace(machine, fabric_costs=tuple(others))
    if hosts > 1:
        for kind, bandwidth, latency in _FACTORS:
            link = _link(machine.inter_host, bandwidth, latency)
            changed = replace(machine, inter_host=link, fabric_costs=_between(machine.fabric_costs, bandwidth, latency))
            yield f"inter_host {kind}", bandwidth * latency, changed
    for factor in (SLOWER, FASTER):
        memory = machine.memory
        points = _points(memory.points, factor, 1.0)
        memory = replace(memory, bytes_per_s=memory.bytes_per_s * factor, points=points)
        yield "memory bandwidth", factor, replace(machine, memory=memory)
    for factor in (SLOWER, FASTER):
        gemms = tuple(
            replace(
                each,
                tiles=tuple(replace(tile, flops_per_s=tile.flops_per_s * factor) for tile in each.tiles),
                rates=tuple(replace(rate, flops_per_s=rate.flops_per_s * factor) for rate in each.rates),
            )
            if each.dtype == dtype
            else each
            for each in machine.gemms
        )
        if gemms != machine.gemms:
            yield f"gemms.{dtype} rate", factor, replace(machine, gemms=gemms)
    for factor in (SHORTER, LONGER):
        yield "relative_error", factor, replace(machine, relative_error=machine.relative_error * factor)


_FACTORS = (
    ("bandwidth", SLOWER, 1.0),
    ("bandwidth", FASTER, 1.0),
    ("latency", 1.0, LONGER),
    ("latency", 1.0, SHORTER),
)


def _fabric(costs: FabricCosts, bandwidth: float, latency: float) -> FabricCosts:
    return replace(
        costs,
        link=_link(costs.link, bandwidth, latency),
        curves=tuple(_curve(curve, bandwidth, latency) for curve in costs.curves),
    )


def _between(fabrics: tuple[FabricCosts, ...], bandwidth: float, latency: float) -> tuple[FabricCosts, ...]:
    """Apply a changed link between hosts to the fabrics that use it."""
    return tuple(
        costs if costs.inter_host is None else replace(costs, inter_host=_link(costs.inter_host, bandwidth, latency))
        for costs in fabrics
    )


def _link(link: Link, bandwidth: float, latency: float) -> Link:
    return replace(link, latency_us=link.latency_us * latency, bytes_per_s=link.bytes_per_s * bandwidth)


def _curve(curve: Curve, bandwidth: float, latency: float) -> Curve:
    return replace(curve, points=_points(curve.points, bandwidth, latency))


def _points(points: tuple[Point, ...], bandwidth: float, latency: float) -> tuple[Point, ...]:
    """`latency` times the first time, and the rest of each divided by `bandwidth`."""
    return tuple(replace(p, us=points[0].us * latency + (p.us - points[0].us) / bandwidth) for p in points)
