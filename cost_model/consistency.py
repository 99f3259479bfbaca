"""What a profile's schema cannot say: curves that grow, origins that are known, grids that are complete."""

from __future__ import annotations

from collections.abc import Sequence

from weaveopt.cost_model.machine import FabricCosts, Machine, Point, Rate, Samples
from weaveopt.cost_model.records import walk
from weaveopt.cost_model.validate import refuse
from weaveopt.records.candidate import Algorithm, Form


def check(file: str, machine: Machine) -> None:
    """Raises `ProfileError`, one line that names `file`, field, found and expected, for the first contradiction."""
    known = [name for name, _ in machine.origins]
    for field, record in walk(machine):
        origin = getattr(record, "origin", None)
        if origin is not None and origin not in known:
            refuse(file, f"{field}.origin", origin, f"one of the origins {', '.join(known)}")
    for field, record in walk(machine):
        _check_points(file, f"{field}.points", getattr(record, "points", ()))
        _check_rates(file, f"{field}.rates", getattr(record, "rates", ()))
        if isinstance(record, Samples):
            _check_samples(file, field, record)
        elif isinstance(record, FabricCosts):
            _check_fused(file, f"{field}.all_reduce_norm", record)


def _check_points(file: str, where: str, points: Sequence[Point]) -> None:
    for index in range(1, len(points)):
        before, point = points[index - 1], points[index]
        if point.bytes <= before.bytes:
            refuse(file, f"{where}[{index}].bytes", point.bytes, f"more than the point before ({before.bytes})")
        if point.us < before.us:
            refuse(file, f"{where}[{index}].us", point.us, f"no less than the smaller size before it ({before.us})")


def _check_rates(file: str, where: str, rates: Sequence[Rate]) -> None:
    for index in range(1, len(rates)):
        if rates[index].m <= rates[index - 1].m:
            refuse(file, f"{where}[{index}].m", rates[index].m, f"more than the row before ({rates[index - 1].m})")


def _check_samples(file: str, where: str, samples: Samples) -> None:
    """The axes grow, and there is one time for each corner of the grid."""
    for name, axis in (("m", samples.m), ("n", samples.n), ("k", samples.k)):
        for index in range(1, len(axis)):
            if axis[index] <= axis[index - 1]:
                refuse(file, f"{where}.{name}[{index}]", axis[index], f"more than {axis[index - 1]} before it")
    corners = len(samples.m) * len(samples.n) * len(samples.k)
    if len(samples.us) != corners:
        refuse(file, f"{where}.us", len(samples.us), f"{corners} times, one for each m, n and k")


def _check_fused(file: str, where: str, costs: FabricCosts) -> None:
    """Every fused curve is of a form that its algorithm has, and tells something that no other curve tells."""
    seen: dict[tuple[object, ...], int] = {}
    for index, curve in enumerate(costs.all_reduce_norm):
        if curve.form is Form.BULK and curve.algorithm is not Algorithm.TWO_SHOT:
            expected = "two_shot: bulk copies have no other"
            refuse(file, f"{where}[{index}].algorithm", curve.algorithm.value, expected)
        key = (curve.algorithm.value, curve.form.value, curve.ctas, curve.world, curve.hidden)
        if key in seen:
            refuse(file, f"{where}[{index}]", " ".join(map(str, key)), f"another kernel than in row {seen[key]}")
        seen[key] = index
