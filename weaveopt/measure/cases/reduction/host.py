"""The fused kernels between GPUs that share memory of the host: LL packets, bulk copies and posted stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from weaveopt.config import variable
from weaveopt.errors import OptionError
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.reduction.calls import Fused, fused_host_memory, is_supported, reserve_host_memory
from weaveopt.measure.cases.reduction.curves import Times, at_every_size, measure_curves, peer_link, write_curves
from weaveopt.measure.draft import Draft
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = (2048, 4096, 5120, 8192, 16384)
"""Elements of a row."""
LIMIT_BYTES = 64 << 20
"""Largest message: times of larger ones are proportional to their bytes, and take long through the host."""
LL_ONE_SHOT_BYTES, LL_TWO_SHOT_BYTES, SIGNALLED_BYTES = 2 << 20, 4 << 20, 128 << 10
"""LL packets are measured up to so many bytes: what they empty is written over PCIe as well. Transfers with a signal
after each unit are measured from so many."""
BULK_CTAS = (8, 16, 32, 64)
POSTED_CTAS = (16, 32, 64, 128)
TRANSFERS = (Transfer.LL_PACKET, Transfer.BULK, Transfer.POSTED)
VARIABLE = "WEAVE_HOST_TRANSFERS"
"""Names the transfers that are measured on `host`, such as `ll_packet,posted`; all by default."""


def kernels(quick: bool) -> Iterator[Fused]:
    """Every kernel at every size at which it may pay."""
    rows, tokens = (ROWS[1:2], TOKENS[::5]) if quick else (ROWS, TOKENS)
    return at_every_size(rows, tokens, LIMIT_BYTES, kernels_of)


def measured_transfers() -> frozenset[Transfer]:
    """The transfers that `WEAVE_HOST_TRANSFERS` names, or all. Raises `OptionError` for a name that is none."""
    names = variable(VARIABLE).replace(",", " ").split()
    known = {transfer.value: transfer for transfer in TRANSFERS}
    if wrong := [name for name in names if name not in known]:
        raise OptionError(f"{VARIABLE}: {wrong[0]!r} is no transfer on host; expected {', '.join(known)}")
    return frozenset(known[name] for name in names) or frozenset(TRANSFERS)


def kernels_of(tokens: int, num_bytes: int) -> list[KernelRow]:
    """The kernels that may pay for a message of that size, of the transfers that are measured."""
    found: list[KernelRow] = []
    if num_bytes <= LL_ONE_SHOT_BYTES:
        found.append(KernelRow(tokens, Algorithm.ONE_SHOT, Transfer.LL_PACKET))
    if num_bytes <= LL_TWO_SHOT_BYTES:
        found.append(KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.LL_PACKET))
    if num_bytes >= SIGNALLED_BYTES:
        found += [KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.BULK, ctas) for ctas in BULK_CTAS]
        found += [KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.POSTED, ctas) for ctas in POSTED_CTAS]
    measured = measured_transfers()
    return [row for row in found if row.transfer in measured]


@dataclass
class HostKernels(Family):
    """Measurements on the fabric `host`, with residual and sum sharded."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.HOST
    times: Times = field(default_factory=dict)

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        every = [fused for fused in kernels(session.quick) if is_supported(fused, ranks.world, ranks.device)]
        # One arena for all that is captured, before any of it is: graphs hold its addresses.
        reserve_host_memory(ranks, every)
        launch_of, what = partial(fused_host_memory, ranks), f"fused all-reduce through the host of {ranks.world} ranks"
        self.times |= measure_curves(session, ranks, every, launch_of, lambda size: 10.0 + size / 1e4, lambda _: what)

    def write(self, draft: Draft) -> None:
        origin = write_curves(draft, Fabric.HOST, "fused through the host", self.times)
        draft.links[Fabric.HOST] = peer_link(origin, self.times)
