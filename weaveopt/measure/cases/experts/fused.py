"""Measurements of a mixture's expert kernels on GPUs: few rows an expert, by bytes of weights; many, by FLOP.

Triton's kernels, and on GPUs of compute capability 9.0 the native ones too, run through the same operation. Both are
measured at all sizes: their curves decide which of them serve a token count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.machine import KernelCurve, SizePoint
from weaveopt.cost_model.mixture import LEAST_ROWS, OPERATION, WIDE, Mixture, variant_of
from weaveopt.measure import fit
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Sample, slowest
from weaveopt.measure.draft import Draft
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.gpu import has_triton
from weaveopt.ops.experts.hopper import runs_on

NAMES = {
    ExpertsKernel.TRITON: "",
    ExpertsKernel.HOPPER: "hopper",
    ExpertsKernel.ONE: "one_kernel",
    ExpertsKernel.WIDE: WIDE,
}
"""Names of the kernels in the profile."""
DTYPE, CHOICES = "bfloat16", 4
FEW = tuple(
    Mixture(tokens, float(CHOICES), experts, hidden, width, True, DTYPE)
    for experts, hidden, width in ((16, 2048, 768), (32, 4096, 1536), (8, 6144, 8192))
    for tokens in (1, 2, 4, 8, 16, 32, 64)
)
"""Cases with few rows an expert, which are bound by reading the weights."""
MANY = tuple(
    Mixture(tokens, float(CHOICES), 8, hidden, width, True, DTYPE)
    for hidden, width in ((2048, 1536), (6144, 4096))
    for tokens in (1024, 2048, 4096, 8192)
)
SOME = tuple(
    Mixture(16 * experts, float(CHOICES), experts, hidden, width, True, DTYPE)
    for experts, hidden, width in ((16, 2048, 768), (32, 2048, 1536), (32, 4096, 1536), (8, 6144, 8192))
)
"""64 rows an expert, where the weights may still bind."""
TURNS_BYTES = 256 << 20
"""Weights of so many bytes take turns: in a model those of other layers have driven them out of the cache."""


def call_of(mixture: Mixture, kernels: ExpertsKernel, device: torch.device) -> Callable[[int], object]:
    """Build calls on weights that take turns; every token's choices differ, uniform over the experts."""
    made = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, device=device, dtype=torch.bfloat16) * 0.05

    experts, hidden, width = mixture.experts, mixture.hidden, mixture.width
    turns = max(1, min(8, TURNS_BYTES // max(mixture.weight_bytes, 1)))

    def weight(rows: int, columns: int) -> torch.Tensor:
        return normal(experts, columns, rows).transpose(1, 2) if mixture.transposed else normal(experts, rows, columns)

    weights = [(weight(2 * width, hidden), weight(hidden, width)) for _ in range(turns)]
    x = normal(mixture.tokens, hidden)
    # Transposed weights are gpt-oss', whose gates and ups alternate.
    call = ExpertsCall("silu", True, interleaved=mixture.transposed, kernels=kernels).encode()
    scores = torch.rand(mixture.tokens, experts, generator=made, device=device)
    share, chosen = scores.topk(CHOICES)

    def run(index: int) -> object:
        up, down = weights[index % turns]
        return torch.ops.weave.moe_experts(x, chosen, share, up, None, down, None, call)

    return run


def curve(origin: str, variant: str, counts: str, sized: Sequence[tuple[float, float]]) -> KernelCurve:
    """Times by size, those of one size averaged, never falling."""
    by_size: dict[int, list[float]] = {}
    for size, us in sized:
        by_size.setdefault(round(size), []).append(us)
    means = [(size, sum(times) / len(times)) for size, times in sorted(by_size.items())]
    points = tuple(SizePoint(point.bytes, point.us) for point in fit.never_falling(means))
    return KernelCurve(origin, OPERATION, variant, counts, points)


@dataclass
class ExpertKernels(Family):
    """Measurements on GPUs with Triton; CPU ranks run the library's GEMMs, whose times are in the profile."""

    devices: ClassVar = frozenset({"cuda"})
    times: dict[tuple[ExpertsKernel, Mixture], Sample] = field(default_factory=dict)

    def measure_alone(self, session: CalibrationSession) -> None:
        if not has_triton():
            return
        cases = _cases(session.quick, runs_on(session.device))
        mine: list[Sample] = []
        for done, (kernels, case) in enumerate(cases):
            session.show_progress("experts", done, len(cases))
            mine.append(session.clock.alone(call_of(case, kernels, session.device), 30.0))
        self.times = dict(zip(cases, slowest(mine), strict=True))

    def write(self, draft: Draft) -> None:
        if not self.times:
            return
        origin = draft.origin("experts", self.times.values(), "a mixture's experts, weights out of cache, bfloat16")
        for (kernels, name), transposed in itertools.product(NAMES.items(), (False, True)):
            found = {
                replace(case, transposed=False): sample.us
                for (used, case), sample in self.times.items()
                if (used, case.transposed) == (kernels, transposed)
            }
            weights = [(case.weight_bytes, us) for case, us in found.items() if case not in MANY]
            rows = [(case.flops, us) for case, us in found.items() if case in MANY]
            if weights and rows:
                draft.kernels.append(curve(origin, variant_of(name, DTYPE, "weights", transposed), "bytes", weights))
                draft.kernels.append(curve(origin, variant_of(name, DTYPE, "rows", transposed), "flop", rows))


def _cases(quick: bool, with_hopper: bool) -> tuple[tuple[ExpertsKernel, Mixture], ...]:
    """Cases to time; a third of them with `quick`."""
    measured = (
        (ExpertsKernel.TRITON, ExpertsKernel.HOPPER, ExpertsKernel.ONE) if with_hopper else (ExpertsKernel.TRITON,)
    )
    cases = (*FEW, *SOME, *MANY)[:: 3 if quick else 1]
    # Those are never a choice for few rows; what they take at least is in the time of the weights.
    of_wide = (*FEW[::3], *(case for case in MANY if case.rows_of_expert[0] >= LEAST_ROWS[WIDE])) if with_hopper else ()
    return (
        *(
            (kernels, replace(case, transposed=transposed))
            for kernels, transposed, case in itertools.product(measured, (False, True), cases)
        ),
        *((ExpertsKernel.WIDE, case) for case in of_wide),
    )
