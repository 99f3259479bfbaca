"""Measurements of the reduce-scatter after a GEMM into symmetric memory, and of the kernel that fuses both;
bfloat16."""

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
from weaveopt.measure.overlapped import SHALLOW, Case, MeasuredSizes, Times, cases_of, measured_times, write_curves
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession, Rows
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER, GemmReduceScatterCall
from weaveopt.ops.gemm_comm.reduce_scatter.op import SITES
from weaveopt.records.candidate import Fabric

DTYPE = torch.bfloat16
ROW = 1024
"""Columns; times go by bytes alone."""
DEPTH = 0
"""k of the GEMM: it only writes zeros where it would write what it makes, and that is taken off again."""
OP, VARIANT = "reduce_scatter", "segment"
EXPONENTS = range(11, 26, 2)
"""Exponents (base 2) of the sizes of a partial result in bytes."""
GPU_VARIANT = "partials"
TIMEOUT_S = 60.0

TILE_CUTS = {
    TileConfig(256, 1, 4): MeasuredSizes(),
    TileConfig(256, 4, 4): MeasuredSizes(),
    TileConfig(256, 2, 16): MeasuredSizes(most_depth=SHALLOW),
}
"""Fastest of several: for sums that are ready early, for a long weight, and for an exchange that dominates."""
TAKEN_BYTES_PER_US = 3e5
"""Approximate rate of the link, which sets how many calls a measurement makes."""


def call_of(
    ranks: Ranks, rows: int, fabric: Fabric = Fabric.SHM, hidden: int = ROW, cut: TileConfig | None = None
) -> GemmReduceScatterCall:
    return GemmReduceScatterCall(
        site=f"calibrate.{OP} {hidden} {cut}", group=ranks.name, fabric=fabric, world=ranks.world, hidden=hidden,
        dtype="bfloat16", max_tokens=rows, timeout_s=TIMEOUT_S, cut="" if cut is None else str(cut),
    )  # fmt: skip


def reserve(ranks: Ranks, *calls: GemmReduceScatterCall) -> None:
    plan = memory_plan(ranks.name, [(call, SITES[call.fabric].buffers(call)) for call in calls])
    transport(plan.fabric).reserve(topology.discover(ranks.name, TIMEOUT_S), plan, 0, TIMEOUT_S)


def rows_of(num_bytes: int, world: int) -> int:
    """Rows of about so many bytes that divide by the ranks."""
    return max(round(num_bytes / (ROW * DTYPE.itemsize * world)), 1) * world


def launches(ranks: Ranks, rows: int, call: GemmReduceScatterCall) -> tuple[Launch, Launch]:
    """The operation, and its GEMM alone."""
    device = ranks.device
    a, b = torch.ones(rows, DEPTH, dtype=DTYPE, device=device), torch.ones(DEPTH, ROW, dtype=DTYPE, device=device)
    out = torch.empty(rows, ROW, dtype=DTYPE, device=device)
    op, text = torch.ops.weave.gemm_reduce_scatter.default, call.encode()
    return lambda index: op([a], [b], [], 1, text), lambda index: torch.mm(a, b, out=out)


@dataclass
class ReduceScatters(Family):
    """Measurements on the fabrics `shm` and `peer`, without the GEMM."""

    devices: ClassVar = frozenset({"cpu", "cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    times: dict[int, Rows] = field(default_factory=dict)
    """(bytes, time) by number of ranks."""

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        counts = sorted({rows_of(1 << each, ranks.world) for each in EXPONENTS[:: 4 if session.quick else 1]})
        call = call_of(ranks, counts[-1], Fabric.PEER if session.is_gpu else Fabric.SHM)
        reserve(ranks, call)

        def take(index: int) -> Sample:
            whole, gemm = launches(ranks, counts[index], call)
            sample = session.clock.together(whole, 100.0, ranks.process_group)
            gemm_us = session.clock.together(gemm, 50.0, ranks.process_group).us
            return Sample(max(sample.us - gemm_us, sample.us / 8), sample.spread)

        sizes = [rows * ROW * DTYPE.itemsize for rows in counts]
        self.times[ranks.world] = session.curve(f"reduce-scatter in the arena of {ranks.world} ranks", sizes, take)

    def write(self, draft: Draft) -> None:
        samples = (sample for rows in self.times.values() for _, sample in rows)
        origin = draft.origin("scattered", samples, "reduce-scatter of what a GEMM wrote into the arena, bfloat16")
        for world, rows in self.times.items():
            points = never_falling([(size, sample.us) for size, sample in rows])
            fabric, variant = (Fabric.PEER, GPU_VARIANT) if draft.is_gpu else (Fabric.SHM, VARIANT)
            draft.add_curve(fabric, Curve(origin, OP, variant, world, points))


def cases(quick: bool) -> Iterator[Case[TileConfig]]:
    """The kernel that computes the GEMM too, at each size."""
    return cases_of(TILE_CUTS, quick)


def has_kernel(case: Case[TileConfig], ranks: Ranks) -> bool:
    """True if the device supports the kernel and the rows divide; otherwise the op silently uses another path."""
    from weaveopt import _native

    why = _native.product_unsupported(
        _native.DType.bfloat16, case.hidden, case.depth, ranks.world, ranks.device.index or 0
    )
    return not why and case.tokens % ranks.world == 0


def tiles_launch(case: Case[TileConfig], ranks: Ranks) -> Launch:
    device = ranks.device
    rows = [torch.randn(case.tokens, case.depth, device=device, dtype=DTYPE) for _ in range(2)]
    weights = [torch.randn(case.hidden, case.depth, device=device, dtype=DTYPE) / case.depth**0.5 for _ in range(2)]
    op = torch.ops.weave.gemm_reduce_scatter.default
    text = call_of(ranks, case.tokens, Fabric.PEER, case.hidden, case.cut).encode()
    return lambda index: op([rows[index % 2]], [weights[index % 2].t()], [], 1, text)


@dataclass
class ScatteredTiles(Family):
    """Measurements on the fabric `peer` of the whole kernel, at each depth of the GEMM."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    times: Times[TileConfig] = field(default_factory=dict)

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        every = [case for case in cases(session.quick) if has_kernel(case, ranks)]
        if not every:
            return
        # One arena for all that is captured, before any of it is: graphs hold its addresses.
        reserve(ranks, *(call_of(ranks, case.tokens, Fabric.PEER, case.hidden, case.cut) for case in every))
        what = f"GEMM and reduce-scatter of {ranks.world} ranks in tiles"
        self.times |= measured_times(session, ranks, every, what, tiles_launch, TAKEN_BYTES_PER_US)

    def write(self, draft: Draft) -> None:
        what = "GEMM and reduce-scatter in one kernel, bfloat16"
        write_curves(draft, self.times, "scattered tiles", what, REDUCE_SCATTER.op, REDUCE_SCATTER.name_of)
