"""Made-up machines of CPU ranks, on which a test says at which token counts the library or shared memory is faster."""

from __future__ import annotations

from dataclasses import replace

from weaveopt import cost_model
from weaveopt.cost_model.machine import Curve, Machine, Point
from weaveopt.records.candidate import Fabric

Times = dict[int, float]
"""Microseconds by tokens; they never fall."""


def made_up(library: Times, fused: Times, row_bytes: int, *, error: float = 0.0) -> Machine:
    """Like `cpu`, but an all-reduce by the library and the fused two-shot kernel take so long; all else is free."""
    cpu = cost_model.load("cpu")

    def points(times: Times) -> tuple[Point, ...]:
        return tuple(Point(tokens * row_bytes, us) for tokens, us in times.items())

    every = []
    for costs in cpu.fabric_costs:
        origin = costs.link.origin
        if costs.fabric is Fabric.LIBRARY:
            others = tuple(curve for curve in costs.curves if curve.op != "all_reduce")
            costs = replace(costs, curves=(Curve(origin, "all_reduce", "library", 2, points(library)), *others))
        elif costs.fabric is Fabric.SHM:
            never = dict.fromkeys(fused, 1000000000.0)
            two_shot = Curve(origin, "all_reduce_norm", "two_shot segment", 2, points(fused))
            one_shot = Curve(origin, "all_reduce_norm", "one_shot segment", 2, points(never))
            # Handing a sum out whole takes no time either.
            link = replace(costs.link, bytes_per_s=1e18)
            costs = replace(costs, curves=(one_shot, two_shot), link=link)
        every.append(costs)
    memory = replace(cpu.memory, floor_us=1e-6, bytes_per_s=1e18, points=(Point(1, 1e-6), Point(1 << 40, 1e-6)))
    compiled = None if cpu.compiled is None else replace(cpu.compiled, host_us=0.0)
    return replace(
        cpu, name="made_up", memory=memory, compiled=compiled, fabric_costs=tuple(every), relative_error=error
    )
