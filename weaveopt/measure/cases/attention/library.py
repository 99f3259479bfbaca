"""Attention as compiled models call it: prefill with a mask tensor and causal, and decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from weaveopt.cost_model import Attention
from weaveopt.cost_model.machine import AttentionCosts
from weaveopt.measure.cases.attention.curves import DECODE, PREFILL, Call, TimedKernel, operands, timed, turns
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Clock, Sample, slowest
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import line
from weaveopt.measure.session import CalibrationSession

HEAD = 128


@dataclass(frozen=True)
class AttentionCase:
    """Attention of `batch` sequences: `queries` against `keys`, heads of 128."""

    batch: int
    heads: int
    queries: int
    keys: int
    causal: bool = False


CASES = (
    *(AttentionCase(1, 16, n, n) for n in (128, 256, 512, 1024, 2048, 4096)),
    *(AttentionCase(1, heads, 2048, 2048) for heads in (8, 32)),
    *(AttentionCase(1, 16, n, n, causal=True) for n in (256, 512, 1024, 2048, 4096)),
    *(AttentionCase(batch, 16, 1, 2048) for batch in (1, 8, 32)),
)  # fmt: skip


def attention(clock: Clock, device: torch.device, case: AttentionCase, expected_us: float) -> Sample:
    """Build an attention call as compiled models make it: with a mask in memory, or causal, on keys repeated for
    every head."""
    shape = (case.batch, case.heads)
    query = torch.randn(*shape, case.queries, HEAD, device=device, dtype=torch.bfloat16)
    key, value = torch.randn(2, *shape, case.keys, HEAD, device=device, dtype=torch.bfloat16).unbind()
    mask = None
    if not case.causal:
        mask = torch.zeros(case.batch, 1, case.queries, case.keys, device=device, dtype=torch.bfloat16)
        mask = mask.expand(-1, case.heads, -1, -1)

    def run(index: int) -> object:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=case.causal)

    with torch.no_grad():
        return clock.alone(run, expected_us)


def as_compiled(case: Attention, device: torch.device) -> Call:
    """`scaled_dot_product_attention` with a mask in memory, on keys and values that stand there for every head."""
    sets = [operands(case, device, repeated=True) for _ in range(turns(case))]
    mask = torch.zeros(case.batch, 1, case.q_len, case.kv_len, device=device, dtype=getattr(torch, case.dtype))

    def run(index: int) -> object:
        query, key, value = sets[index % len(sets)]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return run


TILE_Q = TILE_KV = 128


def attention_costs(origin: str, units: int, times: Mapping[AttentionCase, Sample]) -> AttentionCosts:
    """Launch and step from prefill (`launch + waves * steps * step`, a line of least squares), the rate from decode."""
    masked = [(steps_of(case, units), sample.us) for case, sample in times.items() if _is_prefill(case, causal=False)]
    causal = [(steps_of(case, units), sample.us) for case, sample in times.items() if _is_prefill(case, causal=True)]
    launch_us, step_us = line(masked)
    decode = [(case, sample.us) for case, sample in times.items() if case.queries == 1]
    widest = max(2 * 2 * case.batch * case.heads * case.keys * 128 / us * 1e6 for case, us in decode)
    return AttentionCosts(
        origin, units, TILE_Q, TILE_KV, round(launch_us, 3), round(step_us, 4),
        round(line(causal)[1], 4), round(widest, -9),
    )  # fmt: skip


def _is_prefill(case: AttentionCase, causal: bool) -> bool:
    return case.queries > 1 and case.causal == causal


def masked_cases() -> tuple[Attention, ...]:
    return tuple(replace(case, mask_bytes=2 * case.q_len * case.kv_len) for case in PREFILL)


def repeated_cases() -> tuple[Attention, ...]:
    """Decode over keys that were written out for every query head; of these fewer fit."""
    return tuple(replace(case, kv_heads=case.heads) for case in DECODE if case.batch * case.kv_heads <= 64)


def steps_of(case: AttentionCase, units: int) -> int:
    """Steps of the K-loop in all waves of query tiles, one after the other."""
    tiles = case.batch * case.heads * -(-case.queries // TILE_Q)
    return -(-tiles // units) * -(-case.keys // TILE_KV)


@dataclass
class AttentionKernels(Family):
    """Measurements of attention on GPUs; the arithmetic of CPU ranks is derived from their GEMMs."""

    devices: ClassVar = frozenset({"cuda"})
    times: dict[AttentionCase, Sample] = field(default_factory=dict)
    by_work: list[TimedKernel] = field(default_factory=list)

    def measure_alone(self, session: CalibrationSession) -> None:
        cases = CASES[::2] if session.quick else CASES
        mine = []
        for done, case in enumerate(cases):
            session.show_progress("attention", done, len(cases))
            mine.append(attention(session.clock, session.device, case, 30.0))
        self.times = dict(zip(cases, slowest(mine), strict=True))
        for what, taken, counts in (
            ("attention, masked", masked_cases(), "steps"),
            # A single query fills no tile: sequences of unlike lengths and counts take what their bytes take.
            ("attention, decode", repeated_cases(), "bytes"),
        ):
            chosen = taken[::4] if session.quick else taken

            def show_progress(done: int, of: int, what: str = what) -> None:
                session.show_progress(what, done, of)

            self.by_work.append(
                timed(session.clock, session.device, "sdpa", chosen, as_compiled, counts, show_progress)
            )

    def write(self, draft: Draft) -> None:
        what = "scaled_dot_product_attention, heads of 128, bfloat16"
        origin = draft.origin("attention", self.times.values(), what)
        draft.attention = attention_costs(origin, draft.units, self.times)
        draft.kernels += [each.curve(origin, draft.units) for each in self.by_work]
