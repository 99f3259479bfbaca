"""The fabrics that a rule may exchange rows on, and what speaks against each of them before anything is priced."""

from __future__ import annotations

from collections.abc import Container, Iterator

from weaveopt.cost_model import Machine
from weaveopt.fabrics.topology import Topology
from weaveopt.records.candidate import Fabric, Rejection


def fabrics_of(
    topology: Topology, machine: Machine, kernels: Container[Fabric]
) -> Iterator[tuple[Fabric, tuple[Rejection, ...]]]:
    """Every fabric but the library's: unreachable among these ranks, not on the machine, without kernel, or free."""
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
