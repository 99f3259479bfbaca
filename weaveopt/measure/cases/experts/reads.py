"""Measurements of experts' kernels whose weights are all in a peer's memory, on all GPUs of a host at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.machine import Curve
from weaveopt.cost_model.prefetch import IN_PLACE, READS
from weaveopt.fabrics import symmetric
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Launch, Sample, barrier
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession, Rows
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.gpu import has_triton
from weaveopt.records.candidate import Fabric

DTYPE, HIDDEN, INNER, EXPERTS, CHOICES = torch.bfloat16, 2048, 768, 64, 8
EXPERT_BYTES = 3 * HIDDEN * INNER * DTYPE.itemsize
ACTIVE = (1, 2, 4, 8, 16, 32, 64)
"""Experts with a row."""
READ_BYTES_PER_US = 3e5
"""Approximate rate of the link, which sets how many calls a measurement makes."""


class PeerExperts:
    """Weights of the next rank's experts, which this rank reads."""

    def __init__(self, ranks: Ranks) -> None:
        assert ranks.process_group is not None
        self._device = ranks.device
        self._kept: list[object] = []
        self.gate_up, self.down = (
            self._weight(ranks, *shape) for shape in ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
        )
        barrier(ranks.process_group)

    def _weight(self, ranks: Ranks, *shape: int) -> torch.Tensor:
        assert ranks.process_group is not None
        own = symmetric.allocate(shape, (shape[1] * shape[2], shape[2], 1), DTYPE, ranks.device)
        own.normal_(std=0.02)
        handle = symmetric.rendezvous(own, ranks.process_group)
        self._kept += [own, handle]
        return handle.get_buffer((ranks.rank + 1) % ranks.world, shape, DTYPE)

    def call(self, active: int) -> Launch:
        """One call with one row for each of so many experts."""
        choices = min(active, CHOICES)
        ids = torch.arange(active, device=self._device).view(-1, choices)
        x = torch.ones(len(ids), HIDDEN, device=self._device, dtype=DTYPE)
        share = torch.full(ids.shape, 1 / choices, device=self._device)
        text = ExpertsCall("silu", gated=True).encode()
        return lambda index: torch.ops.weave.moe_experts(x, ids, share, self.gate_up, None, self.down, None, text)


@dataclass
class ExpertReads(Family):
    """Measurements on the fabric `peer`, by bytes of the experts with a row."""

    devices: ClassVar = frozenset({"cuda"})
    times: dict[int, Rows] = field(default_factory=dict)
    """(bytes, time) by number of ranks."""

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        if not has_triton():
            return
        active = ACTIVE[:: 3 if session.quick else 1]
        sizes, experts = [each * EXPERT_BYTES for each in active], PeerExperts(ranks)

        def take(index: int) -> Sample:
            guess_us = 20.0 + sizes[index] / READ_BYTES_PER_US
            return session.clock.together(experts.call(active[index]), guess_us, ranks.process_group)

        self.times[ranks.world] = session.curve(f"experts read by {ranks.world} ranks", sizes, take)
        barrier(ranks.process_group)  # before anybody's memory goes

    def write(self, draft: Draft) -> None:
        if not self.times:
            return
        samples = (sample for rows in self.times.values() for _, sample in rows)
        origin = draft.origin("expert_reads", samples, "experts whose weights are all in a peer's memory, bfloat16")
        for world, rows in self.times.items():
            points = never_falling([(size, sample.us) for size, sample in rows])
            draft.add_curve(Fabric.PEER, Curve(origin, READS, IN_PLACE, world, points))
