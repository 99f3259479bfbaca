"""Eligibility of fabrics for a rule's kernels between the ranks of a group, and the reasons against each."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from weaveopt.cost_model import Machine
from weaveopt.fabrics.topology import Topology
from weaveopt.fabrics.traits import TRAITS
from weaveopt.records.candidate import Fabric, Rejection
from weaveopt.wording import counted


def eligible_fabrics(
    topology: Topology, machine: Machine, kernels: Collection[Fabric]
) -> Iterator[tuple[Fabric, tuple[Rejection, ...]]]:
    """Every fabric but the library's; `kernels` are those that the rule has kernels for."""
    for fabric, unreachable in topology.fabrics():
        if fabric is Fabric.LIBRARY:
            continue
        reasons = [] if unreachable is None else [unreachable]
        if fabric not in machine.fabrics:
            values = (("machine", machine.name), ("fabric", fabric.value))
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
    return Rejection(
        "not_measured", "the profile has no time of this exchange: `weaveopt calibrate` measures it", values
    )
