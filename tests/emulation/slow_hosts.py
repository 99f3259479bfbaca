"""Profiles of CPU hosts whose link is slow, as `weaveopt calibrate` describes such hosts."""

from __future__ import annotations

from dataclasses import replace

from weaveopt import cost_model
from weaveopt.cost_model import Machine
from weaveopt.cost_model.machine import Contention, ContentionRow, Link
from weaveopt.records.candidate import Fabric


def machine(gbit: float, contention: float | None) -> Machine:
    """Hosts of CPU ranks with a link of so many Gbit/s; None: contention was not measured."""
    cpu = cost_model.load("cpu")
    rate, origin = gbit * 1e9 / 8, cpu.inter_host.origin
    library = Link(origin, 200.0, 0.9 * rate)
    measured = None
    if contention is not None:
        measured = Contention(origin, (ContentionRow(1, contention, contention),), library_ctas=1, between_hosts=True)
    return replace(
        cpu,
        inter_host=Link(origin, 50.0, rate, cpu.inter_host.overhead_us),
        fabric_costs=tuple(
            replace(each, inter_host=library) if each.fabric is Fabric.LIBRARY else each for each in cpu.fabric_costs
        ),
        contention=measured,
    )
