"""The fused kernels between GPUs with peer access: LL packets, and bulk copies on several numbers of CTAs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.reduction import contention
from weaveopt.measure.cases.reduction.calls import Fused, fused_peer, is_supported, reserve_peer
from weaveopt.measure.cases.reduction.curves import Times, at_every_size, measure_curves, peer_link, write_curves
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
    return at_every_size(rows, tokens, LIMIT_BYTES, kernels_of)


def kernels_of(tokens: int, num_bytes: int) -> list[KernelRow]:
    """The kernels that may pay for a message of that size."""
    found: list[KernelRow] = []
    if num_bytes <= LL_ONE_SHOT_BYTES:
        found.append(KernelRow(tokens, Algorithm.ONE_SHOT, Transfer.LL_PACKET))
    if num_bytes <= LL_TWO_SHOT_BYTES:
        found.append(KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.LL_PACKET))
    if num_bytes >= BULK_BYTES:
        found += [KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.BULK, ctas) for ctas in BULK_CTAS]
    return found


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
        launch_of, what = partial(fused_peer, ranks), f"fused all-reduce of {ranks.world} ranks"
        self.times |= measure_curves(session, ranks, every, launch_of, lambda size: 5.0 + size / 2e5, lambda _: what)

    def write(self, draft: Draft) -> None:
        draft.links[Fabric.PEER] = peer_link(write_curves(draft, Fabric.PEER, "fused", self.times), self.times)
