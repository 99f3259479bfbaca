"""The fused kernels between CPU ranks that share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.reduction.calls import Fused, copy_us, fused_shm, reserve_shm
from weaveopt.measure.cases.reduction.curves import WHAT, Times, curve_of, shm_link
from weaveopt.measure.clock import Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric

ROW = 4096
"""Elements of a row; the curve has no row length, as times depend on bytes alone."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WHOLE_TOKENS = 512
"""Tokens whose rows are also distributed: 4 MB, as allocators give more back to the system after each call."""


@dataclass
class ShmKernels(Family):
    """Measurements on the fabric `shm`, with residual and sum sharded, without the copy that a GEMM replaces."""

    devices: ClassVar = frozenset({"cpu"})
    times: Times = field(default_factory=dict)
    whole_us: dict[int, float] = field(default_factory=dict)
    """Time of the two-shot exchange of `WHOLE_TOKENS` that also distributes the rows of the sum, by world size."""

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        tokens = TOKENS[::3] if session.quick else TOKENS
        reserve_shm(ranks, ROW, tokens[-1])
        copies_us = [copy_us(session.clock, ranks, count, ROW) for count in tokens]

        def timed(fused: Fused, copied_us: float, sharded: bool = True) -> Sample:
            launch = fused_shm(ranks, fused, tokens[-1], sharded)
            sample = session.clock.together(launch, 100.0, ranks.process_group)
            return Sample(max(sample.us - copied_us, sample.us / 2), sample.spread)

        for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT):
            kernel = KernelRow(0, algorithm, Transfer.SEGMENT)
            every = [Fused(kernel, ROW, count) for count in tokens]

            def take(index: int, every: Sequence[Fused] = every) -> Sample:
                return timed(every[index], copies_us[index])

            what = f"fused all-reduce of {ranks.world} ranks"
            self.times[ranks.world, ROW, kernel] = session.curve(what, [each.bytes for each in every], take)
        whole = Fused(KernelRow(0, Algorithm.TWO_SHOT, Transfer.SEGMENT), ROW, WHOLE_TOKENS)
        copied_us = copies_us[tokens.index(WHOLE_TOKENS)]
        self.whole_us[ranks.world] = timed(whole, copied_us, sharded=False).us

    def write(self, draft: Draft) -> None:
        origin = draft.origin("fused", (sample for rows in self.times.values() for _, sample in rows), WHAT)
        for (world, _, kernel), rows in self.times.items():
            draft.add_curve(Fabric.SHM, curve_of(origin, world, 0, kernel, rows))
        size = Fused(KernelRow(0, Algorithm.TWO_SHOT, Transfer.SEGMENT), ROW, WHOLE_TOKENS).bytes
        draft.links[Fabric.SHM] = shm_link(origin, self.times, self.whole_us, size)
