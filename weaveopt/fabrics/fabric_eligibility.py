"""Eligibility of fabrics for a rule's kernels between the ranks of a group, and the reasons against each."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from weaveopt.cost_model import Machine
from weaveopt.fabrics.topology import Topology
from weaveopt.fabrics.traits import TRAITS
from weaveopt.records.candidate import Fabric, Rejection
from weaveopt.wording import counted

_NOT_MEASURED = "the profile has no time of this exchange: `weaveopt calibrate` measures it"


def eligible_fabrics(
    topology: Topology, machine: Machine, kernels: Collection[Fabric]
) -> Iterator[tuple[Fabric, tuple[Rejection, ...]]]:
    """Every fabric but the library's; `kernels` are those that the rule has kernels for."""
    every = topology.fabrics()
    reached = {fabric for fabric, unreachable in every if unreachable is None and fabric in machine.fabrics}
    for fabric, unreachable in every:
        if fabric is Fabric.LIBRARY:
            continue
        reasons = [] if unreachable is None else [unreachable]
        better = sorted(TRAITS[fabric].gives_way_to & reached)
        values = (("machine", machine.name), ("fabric", fabric.value))
        if better:
            message = "a fabric that carries each byte fewer times reaches the same ranks"
            reasons.append(Rejection("better_fabric", message, (("fabric", better[0].value),)))
        elif fabric not in machine.fabrics and TRAITS[fabric].measured_only:
            reasons.append(Rejection("not_measured", _NOT_MEASURED, values))
        elif fabric not in machine.fabrics:
            reasons.append(Rejection("fabric_not_on_machine", "the machine's profile has no such fabric", values))
        if fabric not in kernels:
            message = "this version has no kernel of the rule for the fabric"
            reasons.append(Rejection("no_kernel", message, (("fabric", fabric.value),)))
        yield fabric, tuple(reasons)


def world_refused(fabric: Fabric, world: int) -> tuple[Rejection, ...]:
    """Reject a fabric whose kernels do not support so many ranks."""
    most = TRAITS[fabric].max_world
    if most is None or world <= most:
        return ()
    return (Rejection("world_not_supported", f"the kernels join at most {counted(most, 'rank')}", (("world", world),)),)


def not_measured(machine: Machine, fabric: Fabric, op: str) -> Rejection:
    """Reject a kernel whose time no profile contains."""
    values = (("machine", machine.name), ("fabric", fabric.value), ("op", op))
    return Rejection("not_measured", _NOT_MEASURED, values)
