"""Time of the host around each kernel of a compiled graph."""

from __future__ import annotations

from weaveopt.cost_model.machine import Machine


def host_us(machine: Machine) -> float:
    """Microseconds that a kernel waits for the host; 0 where they overlap."""
    return 0.0 if machine.compiled is None else machine.compiled.host_us
