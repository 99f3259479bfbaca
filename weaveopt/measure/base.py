"""A profile renewed by a smaller run: what the run measured replaces the base's, what it could not measure is kept.

Every block and curve keeps the origin of the run that it comes from. What is renewed at once is an operation at one
group size: kernels that compete at a site come from one run, or the runs' difference would choose between them. Kernels
of one device are renewed by name: families of measurements share their operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar, cast

from weaveopt.cost_model.compiled import CompiledCosts
from weaveopt.cost_model.consistency import check
from weaveopt.cost_model.energy import PowerCosts
from weaveopt.cost_model.machine import (
    MEASURED,
    TRANSFERS,
    AttentionCosts,
    Contention,
    CopyEngine,
    Curve,
    FabricCosts,
    LaunchCosts,
    Link,
    Machine,
    Origin,
    Wiring,
)
from weaveopt.cost_model.records import walk
from weaveopt.errors import OptionError
from weaveopt.measure.draft import curve_order, relative_error
from weaveopt.records.candidate import Fabric

SAME_MEMORY = 0.05
"""Largest relative difference in memory for equal hardware: drivers reserve less than this; H100 and H200 have as
many SMs but differ by more."""
R = TypeVar("R")
B = TypeVar("B", AttentionCosts, CompiledCosts, Contention, CopyEngine, LaunchCosts, PowerCosts, Wiring)


@dataclass(frozen=True)
class Renewed:
    """The merged profile, and what in it is the base's."""

    machine: Machine
    kept: tuple[str, ...]


def accept(asked: str, base: Machine, device: str, here: Wiring) -> None:
    """Check that the base was made on such a host. Raises `OptionError`, one line, if not."""
    if base.device != device:
        raise OptionError(f"--base {asked}: a profile of {base.device} ranks, but this run measures {device} ranks")
    advice = "only profiles of the same device can be merged; calibrate without --base"
    processors = _processors(base)
    if processors is not None and processors != here.processors:
        # Cores matter too: with more ranks than cores, times depend on how many ranks share a core.
        word = "SMs" if device == "cuda" else "cores"
        raise OptionError(f"--base {asked}: measured with {processors} {word}, found {here.processors} here: {advice}")
    if device == "cuda" and base.wiring is not None:
        there_bytes, here_bytes = base.wiring.memory_bytes, here.memory_bytes
        if abs(here_bytes / there_bytes - 1) > SAME_MEMORY:
            there, found = (f"{num_bytes / 2**30:.0f} GiB" for num_bytes in (there_bytes, here_bytes))
            raise OptionError(f"--base {asked}: measured on GPUs of {there}, found {found} here: {advice}")


def _processors(machine: Machine) -> int | None:
    """Number of SMs or cores, if the profile has it."""
    if machine.wiring is not None:
        return machine.wiring.processors
    # Profiles from datasheets have no wiring, but their GEMMs are tiled over the SMs.
    return next((costs.units for costs in machine.gemms if costs.tiles), None)


def largest_group(machine: Machine) -> int:
    """Ranks of the largest group that was measured together within a host; 0 where none was."""
    return max((_most_ranks(costs) for costs in machine.fabric_costs), default=0)


def _link_class(machine: Machine) -> str:
    """Link that the library's times are of; empty where they do not say."""
    return next((costs.link_class for costs in machine.fabric_costs if costs.fabric is Fabric.LIBRARY), "")


def renew(today: Machine, base: Machine, allowed: Collection[str] = ()) -> Renewed:
    """`today`, completed from `base`; the error that it claims is that of all its curves.

    `allowed`: fabrics that the option `fabrics` names; no others of `base` are kept, but for the library. Empty: all.
    A base of another link (NVLink, where these ranks exchange through their host) leaves neither its contention nor its
    copies, which were measured on that link.
    """
    base = _with_distinct_names(base, dict(today.origins))
    measured = frozenset(name for name, origin in base.origins if origin.kind == MEASURED)
    links = {_link_class(today), _link_class(base)} - {""}
    other_link = len(links) > 1
    more = largest_group(base) > largest_group(today) and not other_link
    kept: list[str] = []

    def of_link(name: str, ours: B | None, theirs: B | None) -> B | None:
        return ours if other_link else block(name, ours, theirs, more)

    def block(name: str, ours: B | None, theirs: B | None, keep: bool) -> B | None:
        if theirs is None or (ours is not None and not (keep and theirs.origin in measured)):
            return ours
        kept.append(name)
        return theirs

    by_fabric = {costs.fabric: costs for costs in today.fabric_costs}
    fabrics = [
        _merged(by_fabric[theirs.fabric], theirs, measured, kept)
        if theirs.fabric in by_fabric
        else _whole(theirs, kept)
        for theirs in base.fabric_costs
        if not allowed or theirs.fabric.value in allowed or theirs.fabric is Fabric.LIBRARY
    ]
    fabrics += [ours for ours in today.fabric_costs if ours.fabric not in base.fabrics]
    dtypes = {costs.dtype for costs in today.gemms}
    others = [costs for costs in base.gemms if costs.dtype not in dtypes]
    kept += [f"gemms.{costs.dtype}" for costs in others]
    had = {(kernel.op, kernel.variant) for kernel in today.kernels}
    more_kernels = tuple(kernel for kernel in base.kernels if (kernel.op, kernel.variant) not in had)
    kept += [f"kernels.{op}" for op in dict.fromkeys(kernel.op for kernel in more_kernels)]
    sees_less = today.ranks_per_host < base.ranks_per_host
    known = dict(base.origins) | dict(today.origins)
    contention = of_link("contention", today.contention, base.contention)
    if contention is not None and contention.copies is None and today.contention and today.contention.copies:
        # An older run of more ranks did not measure it.
        of_copies = known[today.contention.origin]
        note = f"{known[contention.origin].note}; copies: {of_copies.date}, {of_copies.host}"
        known[contention.origin] = replace(known[contention.origin], note=note)
        contention = replace(contention, copies=today.contention.copies)
    merged = replace(
        today,
        # GPUs that this run does not see are still there.
        ranks_per_host=today.ranks_per_host if other_link else max(today.ranks_per_host, base.ranks_per_host),
        gemms=tuple(sorted((*today.gemms, *others), key=lambda costs: costs.dtype)),
        fabric_costs=tuple(sorted(fabrics, key=lambda costs: costs.fabric.value)),
        attention=block("attention", today.attention, base.attention, keep=False),
        # A two-shot exchange of more ranks moves more bytes a rank, and so slows a GEMM more; and it is when all
        # ranks of the host pull that copies contend. Both were measured with the largest group of their run.
        contention=contention,
        copy_engine=of_link("copy_engine", today.copy_engine, base.copy_engine),
        launch=block("launch", today.launch, base.launch, keep=False),
        compiled=block("compiled", today.compiled, base.compiled, keep=False),
        power=block("power", today.power, base.power, keep=False),
        wiring=block("wiring", today.wiring, base.wiring, sees_less),
        kernels=(*today.kernels, *more_kernels),
    )
    origins = tuple((name, known[name]) for name in sorted(_named(merged)))
    merged = replace(merged, relative_error=relative_error(merged), origins=origins)
    check(f"{today.name} (renewed from {base.name})", merged)
    return Renewed(merged, tuple(kept))


def with_link(
    base: Machine,
    name: str,
    link: Link,
    library: Link,
    contention: Contention | None,
    origins: Mapping[str, Origin],
) -> Machine:
    """`base` under `name`, with the link between hosts, the library's use of it, and contention of computation with the
    library's exchanges, if that was measured; all else as it was."""
    base = _with_distinct_names(base, origins)
    fabrics = tuple(
        replace(costs, inter_host=library) if costs.fabric is Fabric.LIBRARY else costs for costs in base.fabric_costs
    )
    merged = replace(base, name=name, inter_host=link, fabric_costs=fabrics, contention=contention or base.contention)
    known = dict(base.origins) | dict(origins)
    merged = replace(merged, origins=tuple((each, known[each]) for each in sorted(_named(merged))))
    check(f"{name} (the link between hosts renewed)", merged)
    return merged


def with_curves(
    base: Machine,
    name: str,
    curves: Mapping[Fabric, tuple[Curve, ...]],
    links: Mapping[Fabric, Link],
    origins: Mapping[str, Origin],
) -> Machine:
    """Return `base` renamed to `name`, with `curves` replacing its curves of the same operations, ranks and hosts.

    `links`: what becomes of the link between hosts under a fabric. A fabric that `base` has not is joined within a host
    as peers are, or as the library joins ranks where there are none. The error is that of all curves, and no less than
    `base` says.
    """
    base = _with_distinct_names(base, origins)
    by_fabric = {costs.fabric: costs for costs in base.fabric_costs}
    within = by_fabric.get(Fabric.PEER, by_fabric[Fabric.LIBRARY]).link
    for fabric, found in curves.items():
        costs = by_fabric.get(fabric, FabricCosts(fabric, within))
        had = {(curve.op, curve.world, curve.hosts) for curve in found}
        kept = (curve for curve in costs.curves if (curve.op, curve.world, curve.hosts) not in had)
        by_fabric[fabric] = replace(
            costs,
            curves=tuple(sorted((*kept, *found), key=curve_order)),
            inter_host=links.get(fabric, costs.inter_host),
        )
    merged = replace(
        base, name=name, fabric_costs=tuple(sorted(by_fabric.values(), key=lambda costs: costs.fabric.value))
    )
    known = dict(base.origins) | dict(origins)
    merged = replace(
        merged,
        relative_error=max(base.relative_error, relative_error(merged)),
        origins=tuple((each, known[each]) for each in sorted(_named(merged))),
    )
    check(f"{name} (curves between hosts renewed)", merged)
    return merged


def _whole(theirs: FabricCosts, kept: list[str]) -> FabricCosts:
    kept.append(theirs.fabric.value)
    return theirs


def _merged(ours: FabricCosts, theirs: FabricCosts, measured: frozenset[str], kept: list[str]) -> FabricCosts:
    """One fabric's curves: the base's of every kind and group size that today's run has none of."""
    if ours.link_class and theirs.link_class and ours.link_class != theirs.link_class:
        return ours  # times of another link
    had = {(curve.op, curve.world, curve.hosts) for curve in ours.curves}
    curves = list(ours.curves)
    for curve in theirs.curves:
        if (curve.op, curve.world, curve.hosts) not in had:
            curves.append(curve)
            name = f"{theirs.fabric.value}.{curve.op} of {curve.world}"
            name += f" on {curve.hosts} hosts" if curve.hosts > 1 else ""
            if name not in kept:
                kept.append(name)
    link = ours.link
    # α and β are of the largest group's ends; on shared memory of the smallest's, which every run has.
    larger = _most_ranks(theirs) > _most_ranks(ours) and theirs.link.origin in measured
    if larger and ours.fabric is not Fabric.SHM:
        kept.append(f"{theirs.fabric.value}.link")
        link = theirs.link
    # A list of transfers that leaves out what was measured today is out of date.
    measured_today = {word for curve in ours.curves for word in curve.variant.split()} & TRANSFERS
    transfers = ours.transfers or (theirs.transfers if measured_today <= set(theirs.transfers) else ())
    between = ours.inter_host or theirs.inter_host
    link_class = ours.link_class or theirs.link_class
    return FabricCosts(ours.fabric, link, tuple(sorted(curves, key=curve_order)), between, transfers, link_class)


def _most_ranks(costs: FabricCosts) -> int:
    return max((curve.world for curve in costs.curves if curve.hosts == 1), default=0)


def _with_distinct_names(base: Machine, taken: Mapping[str, Origin]) -> Machine:
    """`base` with other names for those of its origins whose names mean something else today."""
    known = dict(base.origins)
    names: dict[str, str] = {}
    for name, origin in sorted(known.items()):
        if name in taken and taken[name] != origin:
            stem = f"{name.partition('@')[0]}@{origin.date or origin.kind}"
            other, count = stem, 1
            while (other in taken and taken[other] != origin) or (other in known and known[other] != origin):
                count += 1
                other = f"{stem}.{count}"
            names[name] = other
            known[other] = origin
    named = tuple((names.get(name, name), origin) for name, origin in base.origins)
    return replace(_renamed(base, names), origins=named)


def _renamed(record: R, names: Mapping[str, str]) -> R:
    """`record` with the origins that it and all records within it name replaced."""
    if isinstance(record, tuple):
        return cast(R, tuple(_renamed(each, names) for each in record))
    if not is_dataclass(record) or isinstance(record, (type, Origin)):
        return record
    values = {each.name: _renamed(getattr(record, each.name), names) for each in fields(record)}
    origin = values.get("origin")
    if isinstance(origin, str):
        values["origin"] = names.get(origin, origin)
    return cast(R, replace(record, **values))


def _named(machine: Machine) -> set[str]:
    """The origins that the machine's blocks and curves name."""
    return {record.origin for _, record in walk(machine) if hasattr(record, "origin")}
