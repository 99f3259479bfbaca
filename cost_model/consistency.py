"""Checks that a profile's schema cannot express: curves that grow, origins that are known, grids that are complete."""

from __future__ import annotations

from collections.abc import Sequence

from weaveopt.cost_model.compiled import CompiledCosts, SizedSlowdowns, Slowdown
from weaveopt.cost_model.energy import PowerCosts, WorkEnergy
from weaveopt.cost_model.machine import FabricCosts, KernelCurve, Machine, Point, Rate, Samples, SizePoint
from weaveopt.cost_model.records import walk
from weaveopt.cost_model.validate import refuse


def check(file: str, machine: Machine) -> None:
    """Raises `ProfileError`, one line that names `file`, field, found and expected, for the first contradiction."""
    known = [name for name, _ in machine.origins]
    for field, record in walk(machine):
        origin = getattr(record, "origin", None)
        if origin is not None and origin not in known:
            refuse(file, f"{field}.origin", origin, f"one of the origins {', '.join(known)}")
    for field, record in walk(machine):
        if isinstance(record, PowerCosts):
            _check_energies(file, field, record)
        if isinstance(record, WorkEnergy):
            continue
        points, size = getattr(record, "points", ()), "size" if isinstance(record, KernelCurve) else "bytes"
        _check_points(file, f"{field}.points", points, size)
        _check_rates(file, f"{field}.rates", getattr(record, "rates", ()))
        if isinstance(record, CompiledCosts):
            _check_sizes(file, f"{field}.grouped", record.grouped)
        elif isinstance(record, Samples):
            _check_samples(file, field, record)
        elif isinstance(record, FabricCosts):
            _check_curves(file, f"{field}.curves", record)
    seen: dict[tuple[str, str], int] = {}
    for index, kernel in enumerate(machine.kernels):
        key = (kernel.op, kernel.variant)
        if key in seen:
            refuse(file, f"kernels[{index}]", " ".join(key), f"another kernel than in row {seen[key]}")
        seen[key] = index


def _check_points(file: str, where: str, points: Sequence[Point | SizePoint], size: str) -> None:
    for index in range(1, len(points)):
        before, point = points[index - 1], points[index]
        smaller, larger = getattr(before, size), getattr(point, size)
        if larger <= smaller:
            refuse(file, f"{where}[{index}].{size}", larger, f"more than the point before ({smaller})")
        if point.us < before.us:
            refuse(file, f"{where}[{index}].us", point.us, f"no less than the smaller size before it ({before.us})")


def _check_energies(file: str, where: str, power: PowerCosts) -> None:
    for at, each in enumerate(power.energies):
        for index in range(1, len(each.points)):
            before, point = each.points[index - 1], each.points[index]
            field = f"{where}.energies[{at}].points[{index}]"
            if point.us <= before.us:
                refuse(file, f"{field}.us", point.us, f"more than the point before ({before.us})")
            if point.joules < before.joules:
                refuse(file, f"{field}.joules", point.joules, f"no less than the point before it ({before.joules})")


def _check_rates(file: str, where: str, rates: Sequence[Rate]) -> None:
    for index in range(1, len(rates)):
        if rates[index].m <= rates[index - 1].m:
            refuse(file, f"{where}[{index}].m", rates[index].m, f"more than the row before ({rates[index - 1].m})")


def _check_slowdowns(file: str, where: str, slowdowns: Sequence[Slowdown]) -> None:
    for index in range(1, len(slowdowns)):
        before, rows = slowdowns[index - 1].rows, slowdowns[index].rows
        if rows <= before:
            refuse(file, f"{where}[{index}].rows", rows, f"more than the row before ({before})")


def _check_sizes(file: str, where: str, sizes: Sequence[SizedSlowdowns]) -> None:
    for index, size in enumerate(sizes):
        _check_slowdowns(file, f"{where}[{index}].rows", size.rows)
        before = sizes[index - 1].elements if index else 0
        if size.elements <= before:
            refuse(file, f"{where}[{index}].elements", size.elements, f"more than the row before ({before})")


def _check_samples(file: str, where: str, samples: Samples) -> None:
    """The axes grow, and there is one time for each corner of the grid."""
    for name, axis in (("m", samples.m), ("n", samples.n), ("k", samples.k)):
        for index in range(1, len(axis)):
            if axis[index] <= axis[index - 1]:
                refuse(file, f"{where}.{name}[{index}]", axis[index], f"more than {axis[index - 1]} before it")
    corners = len(samples.m) * len(samples.n) * len(samples.k)
    if len(samples.us) != corners:
        refuse(file, f"{where}.us", len(samples.us), f"{corners} times, one for each m, n and k")


def _check_curves(file: str, where: str, costs: FabricCosts) -> None:
    """Checks that no two curves are of the same kernel, and that each covers some size."""
    seen: dict[tuple[object, ...], int] = {}
    for index, curve in enumerate(costs.curves):
        if curve.last_bytes is not None and curve.last_bytes < curve.first_bytes:
            refuse(
                file, f"{where}[{index}].last_bytes", curve.last_bytes, f"at least first_bytes ({curve.first_bytes})"
            )
        if curve.world % curve.hosts:
            refuse(file, f"{where}[{index}].hosts", curve.hosts, f"a divisor of its world ({curve.world})")
        key = (curve.op, curve.variant, curve.world, curve.hosts, curve.row)
        if key in seen:
            refuse(file, f"{where}[{index}]", " ".join(map(str, key)), f"another kernel than in row {seen[key]}")
        seen[key] = index
