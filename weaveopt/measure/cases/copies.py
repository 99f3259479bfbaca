"""Copies from a peer by a copy engine, which takes no SM: alone, and while all ranks copy and compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from weaveopt.cost_model.machine import CopyEngine
from weaveopt.fabrics import symmetric
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Sample, barrier, slowest
from weaveopt.measure.concurrent_kernels import DTYPE, LargeGemm, alone_us, concurrent_us
from weaveopt.measure.draft import Draft
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.records.candidate import Fabric

COPY_BYTES = 64 << 20


def copies(ranks: Ranks) -> tuple[float, float, float]:
    """(latency in us, bytes a second alone, the same while all ranks copy and GEMMs run) of pulls from a peer."""
    from torch._C._distributed_c10d import _SymmetricMemory

    count = COPY_BYTES // DTYPE.itemsize
    assert ranks.process_group is not None
    buffer = _SymmetricMemory.empty_strided_p2p((count,), (1,), DTYPE, ranks.device)
    handle = symmetric.rendezvous(buffer, ranks.process_group)
    peer = handle.get_buffer((ranks.rank + 1) % ranks.world, (count,), DTYPE)
    target = torch.empty(count, device=ranks.device, dtype=DTYPE)
    gemm = LargeGemm(ranks.device)

    def pull() -> object:
        return target.copy_(peer)

    def pull_little() -> object:
        return target[:8].copy_(peer[:8])

    times = []
    for who in range(ranks.world):  # one rank after the other: the links are otherwise idle
        barrier(ranks.process_group)
        if who == ranks.rank:
            times = [alone_us(pull), alone_us(pull_little)]
    barrier(ranks.process_group)
    whole_us, latency_us = (sample.us for sample in slowest([Sample(us, 0.0) for us in times], ranks.process_group))
    contended_us = concurrent_us(ranks, pull, 12, gemm, 20)
    return latency_us, COPY_BYTES / whole_us * 1e6, COPY_BYTES / contended_us * 1e6


@dataclass
class Copies(Family):
    """Measurements of copies in the largest group: contention appears when all ranks of the host pull at once."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    found: tuple[float, float, float] | None = None
    """Latency in microseconds, bytes a second alone, and contended."""

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        if ranks.world == session.world and not session.quick:
            session.show_progress("copies from peers", 0, 1)
            self.found = copies(ranks)

    def write(self, draft: Draft) -> None:
        if self.found is not None:
            latency_us, alone, contended = self.found
            what = "64 MiB pulled from a peer; contended: all ranks pull while GEMMs run"
            origin = draft.origin("copy_engine", (), what)
            draft.copy_engine = CopyEngine(
                origin, round(latency_us, 3), round(alone, -8), round(min(contended, alone), -8)
            )
