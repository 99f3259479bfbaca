"""Contention of a GEMM and the library's all-reduce on GPUs: token splits overlap those, with or without peer access.

Without peer access, or with `NCCL_P2P_DISABLE=1`, it is the only exchange, and its row the only one of the profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from weaveopt.cost_model.machine import Contention, ContentionRow
from weaveopt.measure.cases.collectives import collective
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.reduction.contention import LIBRARY_CTAS
from weaveopt.measure.concurrent_kernels import LargeGemm, Step, concurrent_us
from weaveopt.measure.draft import Draft
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession

MESSAGE_BYTES = 4096 * 8192 * 2
"""A sum of 4096 tokens of 8192, bfloat16."""
GEMMS, EXCHANGES = 12, 6
"""Calls that are timed; the other one runs from before the first until after the last."""


def library_row(ranks: Ranks) -> ContentionRow:
    """Measure the slowdown of a GEMM and of the library's all-reduce that run concurrently."""
    gemm, launch = LargeGemm(ranks.device), collective(ranks, "all_reduce", MESSAGE_BYTES)

    def exchange() -> object:
        return launch(0)

    gemm_us, exchange_us = alone_us(ranks, gemm, GEMMS), alone_us(ranks, exchange, EXCHANGES)
    gemm_both_us = concurrent_us(ranks, gemm, GEMMS, exchange, 2 * GEMMS * gemm_us / exchange_us)
    exchange_both_us = concurrent_us(ranks, exchange, EXCHANGES, gemm, 3 * EXCHANGES * exchange_us / gemm_us)
    factors = (round(max(both / alone, 1.0), 3) for both, alone in
               ((gemm_both_us, gemm_us), (exchange_both_us, exchange_us)))  # fmt: skip
    return ContentionRow(LIBRARY_CTAS, *factors)


def alone_us(ranks: Ranks, step: Step, count: int) -> float:
    """Microseconds of a step with nothing on the other stream; the slowest rank's."""
    return concurrent_us(ranks, step, count, None, 0)


@dataclass
class LibraryContention(Family):
    """Contention of the largest group, as `StreamContention`; its row is that of the library's CTAs."""

    devices: ClassVar = frozenset({"cuda"})
    row: ContentionRow | None = None

    def measure_together(self, session: CalibrationSession, ranks: Ranks) -> None:
        if ranks.world == session.world and not session.quick:
            session.show_progress("GEMM and concurrent all-reduce of the library", 0, 1)
            self.row = library_row(ranks)

    def write(self, draft: Draft) -> None:
        if self.row is None:
            return
        found = draft.contention
        if found is None:
            what = "4096 x 8192 x 7168 bfloat16, concurrent with the library's all-reduce at 4096 tokens"
            draft.contention = Contention(draft.origin("contention", (), what), (self.row,), LIBRARY_CTAS)
            return
        others = (each for each in found.rows if each.ctas != self.row.ctas)
        draft.contention = replace(found, rows=tuple(sorted((*others, self.row), key=lambda each: each.ctas)))
