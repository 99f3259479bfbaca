"""Contention of a GEMM and the fused kernels: the slowdown of computation and communication that run concurrently."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from weaveopt.cost_model.machine import Contention, ContentionRow
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.reduction.calls import Fused, fused_peer
from weaveopt.measure.clock import Launch
from weaveopt.measure.concurrent_kernels import LargeGemm, Step, concurrent_us
from weaveopt.measure.draft import Draft
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric

TOKENS, HIDDEN = 4096, 8192
CTAS = (8, 16, 32, 64)
LIBRARY_CTAS = 24
"""NCCL opens 24 channels, each a CTA, between GPUs on NVSwitch."""


def kernels() -> list[Fused]:
    """Exchange kernels that run concurrently with a GEMM, for the arena."""
    return [Fused(KernelRow(TOKENS, Algorithm.TWO_SHOT, Transfer.BULK, ctas), HIDDEN, TOKENS) for ctas in CTAS]


def contention_rows(ranks: Ranks) -> list[ContentionRow]:
    """Measure, for each number of CTAs, the slowdown of a GEMM and an exchange that run concurrently."""
    gemm = LargeGemm(ranks.device)
    found = []
    for fused in kernels():
        exchange = fused_peer(ranks, fused)
        step = _numbered(exchange)
        alone_us, exchange_us = concurrent_us(ranks, gemm, 12, None, 0), concurrent_us(ranks, step, 24, None, 0)
        # The other one runs from before the timed one's start until after its end.
        gemm_us = concurrent_us(ranks, gemm, 12, step, 2 * 12 * alone_us / exchange_us)
        concurrent_exchange_us = concurrent_us(ranks, step, 24, gemm, 3 * 24 * exchange_us / alone_us)
        found.append(
            ContentionRow(
                fused.row.num_ctas,
                round(max(gemm_us / alone_us, 1.0), 3),
                round(max(concurrent_exchange_us / exchange_us, 1.0), 3),
            )
        )
    return found


def _numbered(launch: Launch) -> Step:
    def step() -> object:
        return launch(0)

    return step


@dataclass
class StreamContention(Family):
    """Contention of the largest group, whose exchanges move the most bytes per rank."""

    devices: ClassVar = frozenset({"cuda"})
    gpu_fabric: ClassVar = Fabric.PEER
    rows: list[ContentionRow] = field(default_factory=list)

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        if ranks.world == session.world and not session.quick:
            session.show_progress("GEMM and concurrent exchange", 0, 1)
            self.rows = contention_rows(ranks)

    def write(self, draft: Draft) -> None:
        if self.rows:
            what = "4096 x 8192 x 7168 bfloat16, concurrent with bulk copies at 4096 tokens"
            draft.contention = Contention(draft.origin("contention", (), what), tuple(self.rows), LIBRARY_CTAS)
