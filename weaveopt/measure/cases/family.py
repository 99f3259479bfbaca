"""Base class of all families of measurements."""

from __future__ import annotations

from typing import ClassVar, Protocol

from weaveopt.measure.draft import Draft
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.records.candidate import Fabric


class Family(Protocol):
    """One kind of measurement: when it is taken, and what it writes into the profile.

    A family is a dataclass, made without arguments, that keeps its samples in its fields: rank 0 sends it to all
    others before any of them writes. All ranks call the same methods in the same order.
    """

    devices: ClassVar[frozenset[str]]
    """Types of torch devices, `cpu` and `cuda`, that it is measured on."""
    gpu_fabric: ClassVar[Fabric | None] = None
    """Fabric of the calls that it measures between GPUs: it is measured where that fabric is. None: of none of ours."""

    def measure_alone(self, session: CalibrationSession) -> None:
        """Measure local kernels: no rank waits for another while one of them is timed."""

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        """Steps that the ranks of a group take together; called by those inside, for each size of a group."""

    def write(self, draft: Draft) -> None:
        """Blocks, links and curves of the profile, each with its origin."""
        ...
