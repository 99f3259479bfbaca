"""What the host does around each kernel of a compiled graph."""

from __future__ import annotations

from weaveopt.cost_model.machine import Machine

HOST_US: dict[str, float] = {"cpu": 3.5}
"""Per kernel, by device: Inductor's Python wrapper allocates, checks sizes and calls (0.7 ms for the 200 kernels of
eight decoder layers). On GPUs the host runs ahead of the device, or a CUDA graph replays without it."""


def host_us(machine: Machine) -> float:
    """Microseconds that a kernel waits for the host; 0 where they overlap."""
    return HOST_US.get(machine.device, 0.0)
