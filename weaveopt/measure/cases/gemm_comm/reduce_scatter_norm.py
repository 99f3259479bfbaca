"""GEMM, reduce-scatter, addition and RMSNorm of this rank's rows in one kernel, between Hopper GPUs; in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.gemm_comm.reduce_scatter import TAKEN_BYTES_PER_US, TIMEOUT_S, has_kernel, reserve
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
)
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER_NORM as NORMED
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterNormCall
from weaveopt.records.candidate import Fabric

CUTS: Mapping[TileConfig, MeasuredSizes] = MappingProxyType({
    TileConfig(256, 1, 4): MeasuredSizes(),
    TileConfig(256, 4, 4): MeasuredSizes(),
    TileConfig(256, 2, 16): MeasuredSizes(most_depth=SHALLOW),
    TileConfig(128, 2, 4): MeasuredSizes(most_tokens=FEW_TOKENS),
})  # fmt: skip
EPS = 1e-5


def cases(quick: bool) -> Iterator[Case[TileConfig]]:
    return cases_of(CUTS, quick)


def call_of(case: Case[TileConfig], group: str, world: int) -> GemmReduceScatterNormCall:
    """The op as compiled graphs call it."""
    return GemmReduceScatterNormCall(
        site=f"calibrate.{NORMED.op} {case}", group=group, fabric=Fabric.PEER, world=world, hidden=case.hidden,
        dtype="bfloat16", max_tokens=case.tokens, timeout_s=TIMEOUT_S, cut=str(case.cut), eps=EPS,
        cast_before_weight=True,
    )  # fmt: skip


def launch(case: Case[TileConfig], ranks: Ranks) -> Launch:
    tokens, hidden, depth, device = case.tokens, case.hidden, case.depth, ranks.device
    rows = [torch.randn(tokens, depth, device=device, dtype=DTYPE) for _ in range(2)]
    weights = [torch.randn(hidden, depth, device=device, dtype=DTYPE) / depth**0.5 for _ in range(2)]
    residual = torch.randn(tokens // ranks.world, hidden, device=device, dtype=DTYPE)
    scale = torch.ones(hidden, device=device, dtype=DTYPE)
    op, text = torch.ops.weave.gemm_reduce_scatter_norm.default, call_of(case, ranks.name, ranks.world).encode()
    return lambda index: op(rows[index % 2], weights[index % 2].t(), residual, scale, text)


@dataclass
class NormedTiles(Family):
    """Measurements on the fabric `peer` of the whole kernel, at each depth of the GEMM."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    times: Times[TileConfig] = field(default_factory=dict)

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        every = [case for case in cases(session.quick) if has_kernel(case, ranks)]
        if not every:
            return
        # One arena for all that is captured, before any of it is: graphs hold its addresses.
        reserve(ranks, *(call_of(case, ranks.name, ranks.world).scatter for case in every))
        what = f"GEMM, reduce-scatter, add and RMSNorm of {ranks.world} ranks in tiles"
        self.times |= measured_times(session, ranks, every, what, launch, TAKEN_BYTES_PER_US)

    def write(self, draft: Draft) -> None:
        what = "GEMM, reduce-scatter, add and RMSNorm in one kernel, bfloat16"
        write_curves(draft, self.times, "normed tiles", what, NORMED.op, NORMED.name_of)
