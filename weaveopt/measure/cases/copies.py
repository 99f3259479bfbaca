"""Copies from a peer by a copy engine, which takes no SM: alone, and while all ranks copy and compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from weaveopt.cost_model.machine import CopyContention, CopyEngine
from weaveopt.fabrics import symmetric
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Sample, barrier, slowest
from weaveopt.measure.concurrent_kernels import DTYPE, LargeGemm, alone_us, concurrent_us
from weaveopt.measure.draft import Draft
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.records.candidate import Fabric

COPY_BYTES = 64 << 20
GEMMS = 20
"""GEMMs that are timed in a row."""


@dataclass(frozen=True)
class MeasuredCopies:
    """Pulls from a peer, and a GEMM that runs concurrently with them on every rank."""

    latency_us: float
    bytes_per_s: float
    contended_bytes_per_s: float
    """While all ranks pull and their GEMMs run."""
    gemm_slowdown: float
    """Ratio of the GEMM's time during such pulls to that alone."""


def copies(ranks: Ranks) -> MeasuredCopies:
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
    gemm_us = concurrent_us(ranks, gemm, GEMMS, None, 0)
    contended_us = concurrent_us(ranks, pull, 12, gemm, 20)
    # A quarter more pulls than last as long as the GEMMs: no GEMM that is timed runs by itself.
    slowed_us = concurrent_us(ranks, gemm, GEMMS, pull, 1.25 * GEMMS * gemm_us / whole_us)
    return MeasuredCopies(
        latency_us, COPY_BYTES / whole_us * 1e6, COPY_BYTES / contended_us * 1e6, max(slowed_us / gemm_us, 1.0)
    )


@dataclass
class Copies(Family):
    """Measurements of copies in the largest group: contention appears when all ranks of the host pull at once."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    found: MeasuredCopies | None = None

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        if ranks.world == session.world and not session.quick:
            session.show_progress("copies from peers", 0, 1)
            self.found = copies(ranks)

    def write(self, draft: Draft) -> None:
        found = self.found
        if found is None:
            return
        what = "64 MiB pulled from a peer; contended: all ranks pull while GEMMs run"
        origin, alone = draft.origin("copy_engine", (), what), found.bytes_per_s
        contended = min(found.contended_bytes_per_s, alone)
        draft.copy_engine = CopyEngine(origin, round(found.latency_us, 3), round(alone, -8), round(contended, -8))
        contention = draft.contention or (None if draft.before is None else draft.before.contention)
        if contention is not None:  # of exchanges, of which copies are a part
            slowdowns = CopyContention(round(found.gemm_slowdown, 3), round(alone / contended, 3))
            draft.contention = replace(contention, copies=slowdowns)
