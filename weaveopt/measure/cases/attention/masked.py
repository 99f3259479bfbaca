"""The library's causal kernels, and the kernel that reads a mask: prefill of whole prompts, and decode."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model import Attention
from weaveopt.measure.cases.attention.curves import DECODE, PREFILL, Call, TimedKernel, operands, timed, turns
from weaveopt.measure.cases.family import Family
from weaveopt.measure.draft import Draft
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.attention.shapes import RANGE_ROWS

SCALE = 128**-0.5


def library(case: Attention, device: torch.device) -> Call:
    sets = [operands(case, device, repeated=False) for _ in range(turns(case))]

    def run(index: int) -> object:
        return library_call(*sets[index % len(sets)], SCALE, case.causal, case.kernel)

    return run


def library_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool, kernel: str
) -> object:
    """One of the library's kernels, without window."""
    return torch.ops.weave.library_attention(query, key, value, scale, causal, 0, kernel)


def masked(case: Attention, device: torch.device, reads_mask: bool = True) -> Call:
    """Build a call, with a boolean mask and its key ranges, which layers share, or without."""
    sets = [operands(case, device, repeated=False) for _ in range(turns(case))]
    admitted = ranges = None
    if reads_mask:
        admitted = torch.ones(case.batch, 1, case.q_len, case.kv_len, device=device, dtype=torch.bool)
        if case.causal:
            admitted = admitted.tril(case.kv_len - case.q_len)
        ranges = torch.ops.weave.key_ranges(admitted, RANGE_ROWS)
    hides = case.causal and not reads_mask

    def run(index: int) -> object:
        query, key, value = sets[index % len(sets)]
        return torch.ops.weave.masked_attention(query, key, value, admitted, ranges, None, SCALE, 0.0, hides)

    return run


@dataclass
class CausalKernels(Family):
    """Measurements on GPUs; CPU ranks have one kernel, whose arithmetic is derived from their GEMMs."""

    devices: ClassVar = frozenset({"cuda"})
    by_work: list[TimedKernel] = field(default_factory=list)

    def measure_alone(self, session: CalibrationSession) -> None:
        causal = tuple(replace(case, causal=True) for case in PREFILL)
        for kernel, cases, make, counts in (
            ("flash", causal, library, "steps"),
            ("cudnn", causal, library, "steps"),
            ("masked", causal, masked, "steps"),
            ("flash", DECODE, library, "bytes"),
            ("cudnn", DECODE, library, "bytes"),
            ("masked", DECODE, masked, "bytes"),
        ):
            chosen = cases[::4] if session.quick else cases

            def show_progress(done: int, of: int, what: str = f"{kernel} {cases[0].form}") -> None:
                session.show_progress(what, done, of)

            self.by_work.append(timed(session.clock, session.device, kernel, chosen, make, counts, show_progress))

    def write(self, draft: Draft) -> None:
        samples = [sample for each in self.by_work for _, sample in each.rows]
        origin = draft.origin("causal_attention", samples, "causal and masked attention, heads of 128, bfloat16")
        draft.kernels += [each.curve(origin, draft.units) for each in self.by_work]
