"""GEMM, reduction and norm in one kernel that sends tiles as they are finished, between Hopper GPUs; in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.tile_config import TILES, TileConfig
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Launch
from weaveopt.measure.draft import Draft
from weaveopt.measure.overlapped import (
    DTYPE,
    FEW_TOKENS,
    SHALLOW,
    Case,
    MeasuredSizes,
    Times,
    cases_of,
    measured_times,
    write_curves,
)  # fmt: skip
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.gemm_comm.all_reduce.call import ALL_REDUCE, GemmReductionCall, TileOutput, WeightLayout
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

Kernel = tuple[TileOutput, TileConfig]
CUTS: Mapping[Kernel, MeasuredSizes] = MappingProxyType({
    (TileOutput.NORM, TileConfig(256, 1, 4)): MeasuredSizes(),
    (TileOutput.NORM, TileConfig(256, 4, 4)): MeasuredSizes(),
    (TileOutput.NORM, TileConfig(256, 2, 16)): MeasuredSizes(most_depth=SHALLOW),
    (TileOutput.NORM, TileConfig(128, 2, 4)): MeasuredSizes(most_tokens=FEW_TOKENS),
    (TileOutput.SUM, TileConfig(256, 1, 4)): MeasuredSizes(),
    (TileOutput.BOTH, TileConfig(256, 1, 4)): MeasuredSizes(),
})  # fmt: skip
"""Fastest of several: for a GEMM that dominates, with a longer weight, for an exchange that dominates, and with few
waves of tiles."""
EPS = 1e-5
TIMEOUT_S = 60.0
TAKEN_BYTES_PER_US = 2e5
"""Approximate rate of the link, which sets how many calls a measurement makes."""


def cases(quick: bool) -> Iterator[Case[Kernel]]:
    """Generate the cases of both operations."""
    for output in TileOutput:
        yield from cases_of({kernel: sizes for kernel, sizes in CUTS.items() if kernel[0] is output}, quick)


def variant_of(kernel: Kernel, depth: int) -> str:
    output, config = kernel
    return ALL_REDUCE.name_of(config, depth, output.variant)


def is_supported(case: Case[Kernel], ranks: Ranks) -> bool:
    """True if the device supports the kernel; otherwise the op silently uses the library."""
    from weaveopt import _native

    device, depth = ranks.device.index or 0, case.depth
    return not _native.product_unsupported(_native.DType.bfloat16, case.hidden, depth, ranks.world, device)


def call_of(case: Case[Kernel], group: str, world: int) -> GemmReductionCall:
    """Build the op's call as in compiled graphs. Normalized rows may stay in the arena, as if only GEMMs read them."""
    output, cut = case.cut
    normalizes, shards = output is not TileOutput.SUM, output is TileOutput.NORM
    reduction = ReductionCall(
        site=f"calibrate.{case}", group=group, fabric=Fabric.PEER, world=world, hidden=case.hidden, dtype="bfloat16",
        out_dtype="bfloat16", max_tokens=case.tokens, post=None,
        norm=NormSpec(NormKind.RMS, EPS, cast_before_weight=True) if normalizes else None,
        timeout_s=TIMEOUT_S, residual_sharded=shards, sum_out=SumOut.SHARDED if shards else SumOut.WHOLE,
        table=(KernelRow(case.tokens, Algorithm.TWO_SHOT, Transfer.TILES),), normalized_aliases_arena=normalizes,
    )  # fmt: skip
    return GemmReductionCall(reduction, TILES, (), cut)


def launch(case: Case[Kernel], ranks: Ranks) -> Launch:
    tokens, hidden, depth, device = case.tokens, case.hidden, case.depth, ranks.device
    rows = [torch.randn(tokens, depth, device=device, dtype=DTYPE) for _ in range(2)]
    weights = [torch.randn(hidden, depth, device=device, dtype=DTYPE) / depth**0.5 for _ in range(2)]
    # The same on all ranks, as a residual is.
    residual = torch.zeros(tokens, hidden, device=device, dtype=DTYPE)
    scale = torch.ones(hidden, device=device, dtype=DTYPE) if case.cut[0] is not TileOutput.SUM else None
    op, layout = torch.ops.weave.gemm_all_reduce_norm.default, WeightLayout.NK.value
    text = call_of(case, ranks.name, ranks.world).encode()

    def run(index: int) -> object:
        turn = index % 2
        return op(rows[turn], weights[turn], layout, None, None, residual, None, None, scale, None, text)

    return run


@dataclass
class TileKernels(Family):
    """Measurements on the fabric `peer` of the whole kernel, at each depth of the GEMM."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    times: Times[Kernel] = field(default_factory=dict)

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        every = [case for case in cases(session.quick) if is_supported(case, ranks)]
        if not every:
            return
        # One arena for all that is captured, before any of it is: graphs hold its addresses.
        plan = memory_plan(ranks.name, [call_of(case, ranks.name, ranks.world).reduction for case in every])
        transport(plan.fabric).reserve(topology.discover(ranks.name, TIMEOUT_S), plan, 0, TIMEOUT_S)
        what = f"GEMM and all-reduce of {ranks.world} ranks in tiles"
        self.times |= measured_times(session, ranks, every, what, launch, TAKEN_BYTES_PER_US)

    def write(self, draft: Draft) -> None:
        what = "GEMM, all-reduce, add and RMSNorm in one kernel, bfloat16"
        write_curves(draft, self.times, "tiles", what, ALL_REDUCE.op, variant_of)
