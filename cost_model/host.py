"""Time of the host around each kernel of a compiled graph."""

from __future__ import annotations

from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.uncertainty import read


def host_us(machine: Machine) -> float:
    """Microseconds that a kernel waits for the host; 0 where they overlap."""
    compiled = machine.compiled
    if compiled is None or not compiled.host_us:
        return 0.0
    return read(machine, compiled.origin, compiled.host_us, "compiled.host_us")
