"""Grouped GEMMs: one for each expert of a mixture, in one kernel, against one GEMM of the same work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

import torch

from weaveopt.cost_model.batched import num_active_experts, same_work
from weaveopt.cost_model.compiled import CompiledCosts, SizedSlowdowns, Slowdown
from weaveopt.cost_model.gemm import Gemm
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.gemm import guess_us
from weaveopt.measure.clock import Clock, Sample, slowest
from weaveopt.measure.draft import Draft
from weaveopt.measure.session import CalibrationSession


@dataclass(frozen=True)
class GroupedCase:
    """`rows` rows, each of one of `experts`, `[k, n]`, at random: as routers spread them, and not evenly."""

    experts: int
    rows: int
    k: int
    n: int

    @property
    def elements(self) -> int:
        return self.k * self.n

    @property
    def counts(self) -> torch.Tensor:
        """Rows of each expert."""
        made = torch.Generator().manual_seed(self.rows)
        return torch.randint(self.experts, (self.rows,), generator=made).bincount(minlength=self.experts)

    @property
    def rows_of_active(self) -> int:
        """Mean rows of an active expert, as the cost model computes it."""
        return max(round(self.rows / num_active_experts(self.experts, self.rows)), 1)

    @property
    def one(self) -> Gemm:
        """GEMM of the same work, as the cost model prices it."""
        return same_work(num_active_experts(self.experts, self.rows), Gemm(self.rows, self.k, self.n))


CASES = tuple(
    GroupedCase(experts, rows * experts, k, n)
    for experts, k, n in (
        (8, 4096, 7168), (8, 3584, 4096), (128, 4096, 1536), (64, 2048, 1536), (128, 2048, 768), (128, 384, 2048),
    )
    for rows in (2, 4, 8, 64, 256, 1024, 4096) if rows * experts <= 131072
)  # fmt: skip
"""Experts of mixtures as ranks hold them, few large ones and many small ones, from few rows each to many."""


def has_grouped(device: torch.device) -> bool:
    """True if this torch supports grouped GEMMs on the device: older versions support only some GPUs."""
    rows, weights = torch.zeros(32, 16, device=device), torch.zeros(2, 16, 16, device=device)
    ends = torch.tensor([16, 32], device=device, dtype=torch.int32)
    try:
        torch._grouped_mm(rows.bfloat16(), weights.bfloat16().transpose(1, 2), ends)
    except (AttributeError, RuntimeError):
        return False
    return True


def grouped(clock: Clock, device: torch.device, case: GroupedCase, expected_us: float) -> tuple[Sample, Sample]:
    """The grouped GEMM, and one GEMM of the same work on the same weights."""
    rows = torch.randn(case.rows, case.k, device=device, dtype=torch.bfloat16)
    weights = torch.randn(case.experts, case.n, case.k, device=device, dtype=torch.bfloat16) * 0.05
    ends = case.counts.cumsum(0).to(device, torch.int32)
    wide = weights.view(case.experts * case.n, case.k)[: case.one.n].t()
    by_expert = clock.alone(lambda index: torch._grouped_mm(rows, weights.transpose(1, 2), ends), expected_us)
    at_once = clock.alone(lambda index: torch.mm(rows[: case.one.m], wide), expected_us)
    return by_expert, at_once


def grouped_slowdown(pairs: Iterable[tuple[Sample, Sample]]) -> float:
    """Slowdown of a grouped GEMM relative to one GEMM of the same work: the median over the cases."""
    return median(by_expert.us / at_once.us for by_expert, at_once in pairs)


@dataclass
class GroupedGemms(Family):
    """Measurements on GPUs for which torch has grouped GEMMs."""

    devices: ClassVar = frozenset({"cuda"})
    times: dict[GroupedCase, tuple[Sample, Sample]] = field(default_factory=dict)
    """Grouped, and as one GEMM."""

    def measure_alone(self, session: CalibrationSession) -> None:
        if not has_grouped(session.device):
            return
        cases = CASES[::3] if session.quick else CASES
        mine: list[tuple[Sample, Sample]] = []
        for done, case in enumerate(cases):
            session.show_progress("grouped GEMMs", done, len(cases))
            expected_us = 3.0 + guess_us(case.one.m, case.one.n, case.one.k)
            mine.append(grouped(session.clock, session.device, case, expected_us))
        by_expert, at_once = (slowest([pair[which] for pair in mine]) for which in (0, 1))
        self.times = dict(zip(cases, zip(by_expert, at_once, strict=True), strict=True))

    def write(self, draft: Draft) -> None:
        if self.times:
            samples = [sample for pair in self.times.values() for sample in pair]
            what = "grouped GEMMs against one of the same work, rows spread at random, bfloat16"
            origin = draft.origin("compiled", samples, what)
            sizes = sorted({case.elements for case in self.times})
            by_size = tuple(SizedSlowdowns(size, _by_rows(self.times, size)) for size in sizes)
            draft.compiled = CompiledCosts(origin, grouped=by_size)


def _by_rows(times: Mapping[GroupedCase, tuple[Sample, Sample]], elements: int) -> tuple[Slowdown, ...]:
    """Slowdowns for experts of that size, fewest rows first."""
    of_size = {case: pair for case, pair in times.items() if case.elements == elements}
    counts = sorted({case.rows_of_active for case in of_size})
    return tuple(
        Slowdown(
            count, round(grouped_slowdown(pair for case, pair in of_size.items() if case.rows_of_active == count), 3)
        )
        for count in counts
    )
