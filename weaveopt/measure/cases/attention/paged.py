"""The kernel over a paged cache: decode of many requests, and prompts that are in the cache already."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from weaveopt.cost_model import Attention
from weaveopt.measure.cases.attention.curves import DECODE, PREFILL, Call, TimedKernel, timed, turns
from weaveopt.measure.cases.family import Family
from weaveopt.measure.draft import Draft
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.attention import paged_gpu
from weaveopt.ops.attention.paged_shapes import PagedOperands, PagedRows
from weaveopt.ops.attention.shapes import Scores

PAGE = 256
"""Rows of a page, which is whole in memory; transformers' default."""


def paged_operands(case: Attention, device: torch.device) -> PagedOperands:
    """Requests of equal lengths, whose pages stand in a random order; keys and values alternate by page, as in
    transformers' cache of one layer."""
    numbers = torch.Generator(device=device).manual_seed(0)
    pages = -(-case.kv_len // PAGE)
    order = torch.randperm(case.batch * pages, device=device, generator=numbers).view(case.batch, pages)
    at = torch.arange(case.kv_len, device=device)
    index = order[:, at // PAGE] * 2 * PAGE + at % PAGE

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=getattr(torch, case.dtype), generator=numbers)

    new = case.batch * case.q_len
    bounds = torch.arange(case.batch + 1, device=device, dtype=torch.int32)
    keys, values = (rows(new, case.kv_heads, case.head_dim) for _ in range(2))
    cache = rows(case.batch * pages * PAGE, 2, case.kv_heads, case.head_dim)
    query = rows(new, case.heads, case.head_dim).transpose(0, 1)[None]
    kept = PagedRows(cache, keys, values, index.flatten(), index[:, -case.q_len :].flatten(), 0, PAGE, -1)
    return PagedOperands(query, kept, bounds * case.q_len, bounds * case.kv_len, None, case.kv_len, case.window)


def paged(case: Attention, device: torch.device) -> Call:
    """The kernel alone: what writes the new rows is the same without it."""
    sets = [paged_operands(case, device) for _ in range(turns(case))]
    scores = Scores(case.head_dim**-0.5)

    def run(index: int) -> object:
        return paged_gpu.attend(sets[index % len(sets)], scores)

    return run


@dataclass
class PagedKernels(Family):
    """Measurements on GPUs; CPU ranks take torch's attention, request by request."""

    devices: ClassVar = frozenset({"cuda"})
    by_work: list[TimedKernel] = field(default_factory=list)

    def measure_alone(self, session: CalibrationSession) -> None:
        causal = tuple(replace(case, causal=True) for case in PREFILL)
        for cases, counts in ((causal, "steps"), (DECODE, "bytes")):
            chosen = cases[::4] if session.quick else cases

            def show_progress(done: int, of: int, what: str = f"paged {cases[0].form}") -> None:
                session.show_progress(what, done, of)

            self.by_work.append(timed(session.clock, session.device, "paged", chosen, paged, counts, show_progress))

    def write(self, draft: Draft) -> None:
        samples = [sample for each in self.by_work for _, sample in each.rows]
        origin = draft.origin("paged_attention", samples, "attention over a paged cache, heads of 128, bfloat16")
        draft.kernels += [each.curve(origin, draft.units) for each in self.by_work]
