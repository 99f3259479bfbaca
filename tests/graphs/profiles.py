"""Machine profiles with parts left out, as those of hosts that have measured less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from weaveopt import cost_model
from weaveopt.cost_model import Machine
from weaveopt.records.candidate import Fabric


def without(name: str, *operations: str) -> Machine:
    """A shipped profile without times of weaveopt's kernels for these operations; the library's stay."""
    machine = cost_model.load(name)
    own = [costs for costs in machine.fabric_costs if costs.fabric is not Fabric.LIBRARY]
    known = {curve.op for costs in own for curve in costs.curves}
    assert known >= set(operations), f"{name} has no times of {sorted(set(operations) - known)}"
    return replace(
        machine,
        fabric_costs=tuple(
            replace(costs, curves=tuple(curve for curve in costs.curves if curve.op not in operations))
            if costs in own
            else costs
            for costs in machine.fabric_costs
        ),
    )


@contextmanager
def found(machine: Machine) -> Iterator[None]:
    """Every profile that is asked for is this one."""
    with mock.patch.object(cost_model, "load", lambda name: machine):
        yield
