"""The fused kernels between GPUs with peer access: LL packets, and bulk copies on several numbers of CTAs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.reduction import contention
from weaveopt.measure.cases.reduction.calls import DTYPE, Fused, fused_peer, is_supported, reserve_peer
from weaveopt.measure.cases.reduction.curves import WHAT, Times, curve_of, peer_link
from weaveopt.measure.clock import Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ROWS = (2048, 4096, 5120, 8192, 16384)
"""Elements of a row."""
LIMIT_BYTES = 512 << 20
LL_ONE_SHOT_BYTES, LL_TWO_SHOT_BYTES, BULK_BYTES = 2 << 20, 64 << 20, 1 << 20
"""LL packets are measured up to so many bytes, bulk copies from so many."""
BULK_CTAS = (8, 16, 32, 64, 128)


def kernels(quick: bool) -> Iterator[Fused]:
    """Every kernel at every size at which it may pay."""
    rows, tokens = (ROWS[1:2], TOKENS[::5]) if quick else (ROWS, TOKENS)
    for row in rows:
        for count in tokens:
            size = count * row * DTYPE.itemsize
            if size > LIMIT_BYTES:
                continue
            found: list[KernelRow] = []
            if size <= LL_ONE_SHOT_BYTES:
                found.append(KernelRow(count, Algorithm.ONE_SHOT, Transfer.LL_PACKET))
            if size <= LL_TWO_SHOT_BYTES:
                found.append(KernelRow(count, Algorithm.TWO_SHOT, Transfer.LL_PACKET))
            if size >= BULK_BYTES:
                found += [KernelRow(count, Algorithm.TWO_SHOT, Transfer.BULK, ctas) for ctas in BULK_CTAS]
            for lowering in found:
                yield Fused(lowering, row, count)


@dataclass
class PeerKernels(Family):
    """Measurements on the fabric `peer`, with residual and sum sharded."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    times: Times = field(default_factory=dict)

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        every = [fused for fused in kernels(session.quick) if is_supported(fused, ranks.world, ranks.device)]
        # One arena for all that is captured, before any of it is: graphs hold its addresses.
        reserve_peer(ranks, [*every, *contention.kernels()])
        curves: dict[tuple[int, KernelRow], list[Fused]] = {}
        for fused in every:
            curves.setdefault((fused.hidden, replace(fused.row, max_tokens=0)), []).append(fused)
        for (row, kernel), sizes in curves.items():

            def take(index: int, sizes: Sequence[Fused] = sizes) -> Sample:
                guess_us = 5.0 + sizes[index].bytes / 2e5
                return session.clock.together(fused_peer(ranks, sizes[index]), guess_us, ranks.process_group)

            what = f"fused all-reduce of {ranks.world} ranks"
            self.times[ranks.world, row, kernel] = session.curve(what, [each.bytes for each in sizes], take)

    def write(self, draft: Draft) -> None:
        origin = draft.origin("fused", (sample for rows in self.times.values() for _, sample in rows), WHAT)
        for (world, row, kernel), rows in self.times.items():
            draft.add_curve(Fabric.PEER, curve_of(origin, world, row, kernel, rows))
        draft.links[Fabric.PEER] = peer_link(origin, self.times)
