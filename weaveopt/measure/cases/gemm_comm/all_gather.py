"""The all-gather in front of GEMMs through symmetric memory, and with a GEMM that it overlaps; in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.machine import Curve
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.fabrics.rows_call import memory_plan
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Launch, Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.overlapped import FEW_TOKENS, Case, MeasuredSizes, Times, cases_of, measured_times, write_curves
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession, Rows
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER, AllGatherGemmCall
from weaveopt.ops.gemm_comm.all_gather.op import SITES
from weaveopt.records.candidate import Fabric

DTYPE = torch.bfloat16
ROW = 1024
"""Elements of a row; times go by bytes alone."""
OP, VARIANT = "all_gather", "segment"
EXPONENTS = range(11, 26, 2)
"""Exponents (base 2) of the sizes of the gathered rows in bytes."""
GPU_VARIANT = "copies"
TIMEOUT_S = 60.0

PUSHED_CUTS = {
    TileConfig(256, 1): MeasuredSizes(),
    TileConfig(256, 4): MeasuredSizes(),
    TileConfig(256, 8): MeasuredSizes(),
    TileConfig(160, 2): MeasuredSizes(most_tokens=FEW_TOKENS),
    TileConfig(128, 2): MeasuredSizes(most_tokens=FEW_TOKENS),
}
"""Tile configurations. With few panel pairs in a group rows are read in their order of arrival; with more the weight
is read from memory less often. With few tokens only tiles of one of the widths may fill whole waves."""
TAKEN_BYTES_PER_US = 3e5
"""Approximate rate of the link, which sets how many calls a measurement makes."""


def call_of(
    ranks: Ranks, rows: int, fabric: Fabric = Fabric.SHM, hidden: int = ROW, cut: TileConfig | None = None
) -> AllGatherGemmCall:
    """Build the call. On CPU ranks rows are gathered into the output; on GPUs that is a copy, which is priced
    separately."""
    return AllGatherGemmCall(
        site=f"calibrate.{OP} {hidden} {cut}", group=ranks.name, fabric=fabric, world=ranks.world, hidden=hidden,
        dtype="bfloat16", max_tokens=rows, timeout_s=TIMEOUT_S, returns_rows=fabric is Fabric.SHM,
        cut="" if cut is None else str(cut),
    )  # fmt: skip


def reserve(ranks: Ranks, *calls: AllGatherGemmCall) -> None:
    plan = memory_plan(ranks.name, [(call, SITES[call.fabric].buffers(call)) for call in calls])
    transport(plan.fabric).reserve(topology.discover(ranks.name, TIMEOUT_S), plan, 0, TIMEOUT_S)


def launch(rows_of_rank: int, call: AllGatherGemmCall, device: torch.device) -> Launch:
    """The operation without any GEMM."""
    shard = torch.ones(rows_of_rank, ROW, dtype=DTYPE, device=device)
    op, text = torch.ops.weave.all_gather_gemm.default, call.encode()
    return lambda index: op(shard, [], [], 1, text)


@dataclass
class AllGathers(Family):
    """Measurements of the all-gather on the fabrics `shm` and `peer`, without the GEMMs."""

    devices: ClassVar = frozenset({"cpu", "cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    times: dict[int, Rows] = field(default_factory=dict)
    """(bytes, time) by number of ranks."""

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        exponents = EXPONENTS[:: 4 if session.quick else 1]
        own = sorted({max((1 << each) // (ROW * DTYPE.itemsize * ranks.world), 1) for each in exponents})
        call = call_of(ranks, own[-1] * ranks.world, Fabric.PEER if session.is_gpu else Fabric.SHM)
        reserve(ranks, call)

        def take(index: int) -> Sample:
            return session.clock.together(launch(own[index], call, ranks.device), 100.0, ranks.process_group)

        sizes = [rows * ranks.world * ROW * DTYPE.itemsize for rows in own]
        self.times[ranks.world] = session.curve(f"all-gather through the arena of {ranks.world} ranks", sizes, take)

    def write(self, draft: Draft) -> None:
        samples = (sample for rows in self.times.values() for _, sample in rows)
        origin = draft.origin("gathered", samples, "all-gather of rows through the arena, bfloat16")
        for world, rows in self.times.items():
            points = never_falling([(size, sample.us) for size, sample in rows])
            fabric, variant = (Fabric.PEER, GPU_VARIANT) if draft.is_gpu else (Fabric.SHM, VARIANT)
            draft.add_curve(fabric, Curve(origin, OP, variant, world, points))


def cases(quick: bool) -> Iterator[Case[TileConfig]]:
    """A gather and the GEMM that begins before all rows are here, at each size."""
    return cases_of(PUSHED_CUTS, quick)


def has_kernel(case: Case[TileConfig], ranks: Ranks) -> bool:
    """True if the device supports the kernel and the rows divide; otherwise the op silently uses another path."""
    from weaveopt import _native

    why = _native.gemm_unsupported(_native.DType.bfloat16, case.depth, case.hidden, ranks.device.index or 0)
    return not why and ranks.world <= _native.MAX_WORLD and case.tokens % ranks.world == 0


def pushed_launch(case: Case[TileConfig], ranks: Ranks) -> Launch:
    device, own = ranks.device, case.tokens // ranks.world
    shards = [torch.randn(own, case.hidden, device=device, dtype=DTYPE) for _ in range(2)]
    weights = [torch.randn(case.depth, case.hidden, device=device, dtype=DTYPE) / case.hidden**0.5 for _ in range(2)]
    op = torch.ops.weave.all_gather_gemm.default
    text = call_of(ranks, case.tokens, Fabric.PEER, case.hidden, case.cut).encode()
    return lambda index: op(shards[index % 2], [weights[index % 2].t()], [None], 1, text)


@dataclass
class PushedGathers(Family):
    """Measurements on the fabric `peer` of the gather with one GEMM, at each number of its columns."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    times: Times[TileConfig] = field(default_factory=dict)

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        every = [case for case in cases(session.quick) if has_kernel(case, ranks)]
        if not every:
            return
        # One arena for all that is captured, before any of it is: graphs hold its addresses.
        reserve(ranks, *(call_of(ranks, case.tokens, Fabric.PEER, case.hidden, case.cut) for case in every))
        what = f"all-gather of {ranks.world} ranks, concurrent with a GEMM"
        self.times |= measured_times(session, ranks, every, what, pushed_launch, TAKEN_BYTES_PER_US)

    def write(self, draft: Draft) -> None:
        what = "all-gather by copy engines and a GEMM that begins before it ends, bfloat16"
        write_curves(draft, self.times, "pushed", what, ALL_GATHER.op, ALL_GATHER.name_of)
