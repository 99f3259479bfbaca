"""Contention of computation and the library's all-reduce between hosts of CPU ranks.

A rank starts an all-reduce, as compiled graphs do, and multiplies matrices until it is done. The time of a GEMM
meanwhile and the time of the all-reduce, each relative to its time alone, are the two factors: of GEMMs over all rounds
together, as what is computed meanwhile differs much between them where cores are few. Within a host the
exchange is work of the cores that compute, so nothing is measured there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from weaveopt.cost_model.machine import Contention, ContentionRow
from weaveopt.measure.clock import Sample, barrier, sample_of
from weaveopt.measure.session import CalibrationSession

ROUNDS, QUICK_ROUNDS = 25, 3
MESSAGE_BYTES, QUICK_BYTES = 2 << 20, 256 << 10
ROWS, WIDTH = 64, 512
"""Sizes of the GEMM: much shorter than the all-reduce, whose end is noticed between two of them."""
CTAS = 1
"""CTAs that a profile of CPU ranks says of the library: its thread."""
ORIGIN = "between.contention"
Step = Callable[[], object]


@dataclass
class HostContention:
    """Factors of the slowest rank, and the time of an all-reduce under GEMMs."""

    gemm: float = 0.0
    communication: float = 0.0
    exchange: Sample = field(default_factory=lambda: Sample(0.0, 0.0))

    def measure(self, session: CalibrationSession) -> None:
        """Every rank calls it."""
        session.show_progress("computation during exchanges between hosts", 0, 1)
        data = torch.zeros((QUICK_BYTES if session.quick else MESSAGE_BYTES) // 4)
        a, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
        out = torch.empty(ROWS, WIDTH)

        def gemm() -> object:
            return torch.mm(a, weight, out=out)

        rounds = [_round(gemm, data) for _ in range((QUICK_ROUNDS if session.quick else ROUNDS) + 1)][1:]
        gemms, exchanges, counts, exchanged = zip(*rounds, strict=True)
        computed_us = sum(exchanged) / max(sum(counts), 1)
        factors = torch.tensor([computed_us / median(gemms), median(exchanged) / median(exchanges)])
        dist.all_reduce(factors, dist.ReduceOp.MAX)
        self.gemm, self.communication = (round(max(each, 1.0), 3) for each in factors.tolist())
        self.exchange = sample_of(list(exchanged))

    def contention(self) -> Contention:
        """The block of a profile."""
        return Contention(
            ORIGIN, (ContentionRow(CTAS, self.gemm, self.communication),), library_ctas=CTAS, between_hosts=True
        )


def _round(gemm: Step, data: torch.Tensor) -> tuple[float, float, int, float]:
    """Microseconds of a GEMM and of an all-reduce alone; GEMMs during an all-reduce, and its microseconds then."""
    barrier()
    begin = time.perf_counter()
    dist.all_reduce(data)
    exchange_us = _since_us(begin)
    barrier()
    begin, count = time.perf_counter(), 0
    while _since_us(begin) < exchange_us:
        gemm()
        count += 1
    alone_us = _since_us(begin) / count
    barrier()
    begin, count = time.perf_counter(), 0
    work = dist.all_reduce(data, async_op=True)
    assert work is not None
    while not work.is_completed():
        gemm()
        count += 1
    both_us = _since_us(begin)
    work.wait()
    return alone_us, exchange_us, count, both_us


def _since_us(begin: float) -> float:
    return (time.perf_counter() - begin) * 1e6
