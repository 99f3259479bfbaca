"""Curves of attention kernels by the work that counts: tiles of keys in prefill, bytes of keys and values in decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from weaveopt.cost_model import Attention
from weaveopt.cost_model.attention import steps
from weaveopt.cost_model.machine import KernelCurve, SizePoint
from weaveopt.measure import fit
from weaveopt.measure.clock import Clock, Sample

HEAD = 128
PREFILL = tuple(
    Attention(1, heads, kv_heads, n, n, HEAD, "bfloat16")
    for heads, kv_heads in ((32, 4), (8, 1))
    for n in (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
)
DECODE = tuple(
    Attention(batch, 8 * kv_heads, kv_heads, 1, keys, HEAD, "bfloat16")
    for batch in (1, 2, 4, 8, 16, 32, 64, 128)
    for kv_heads in (1, 4)
    for keys in (512, 2048, 8192)
    if batch * kv_heads * keys <= 1 << 20
)

Call = Callable[[int], object]
Make = Callable[[Attention, torch.device], Call]
"""One call of a kernel on separate operands; the index selects them, for buffers that take turns."""


@dataclass(frozen=True)
class TimedKernel:
    """A kernel in one form, and its times."""

    kernel: str
    counts: str
    """`steps` or `bytes`."""
    rows: tuple[tuple[Attention, Sample], ...]

    def curve(self, origin: str, units: int) -> KernelCurve:
        sized = [
            (steps(case, units) if self.counts == "steps" else case.num_bytes, sample.us) for case, sample in self.rows
        ]
        by_size: dict[int, list[float]] = {}
        for size, us in sized:
            by_size.setdefault(size, []).append(us)
        means = [(size, sum(times) / len(times)) for size, times in sorted(by_size.items())]
        points = tuple(SizePoint(point.bytes, point.us) for point in fit.never_falling(means))
        variant = f"{self.kernel} {self.rows[0][0].form} head_dim={HEAD}"
        return KernelCurve(origin, "attention", variant, self.counts, points)


TURNS_BYTES = 160 << 20
"""Keys and values of so many bytes take turns in decode: in a model the weights have driven them out of the cache."""


def turns(case: Attention) -> int:
    """How many sets of operands a call goes through."""
    return 1 if case.q_len > 1 else max(1, min(16, TURNS_BYTES // max(case.num_bytes, 1)))


def operands(case: Attention, device: torch.device, repeated: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values as projections leave them, heads side by side. `repeated`: for every query head."""
    kv_heads = case.heads if repeated else case.kv_heads
    dtype, values = getattr(torch, case.dtype), case.value_dim or case.head_dim
    made = (
        torch.randn(case.batch, length, heads, size, device=device, dtype=dtype).transpose(1, 2)
        for length, heads, size in (
            (case.q_len, case.heads, case.head_dim),
            (case.kv_len, kv_heads, case.head_dim),
            (case.kv_len, kv_heads, values),
        )
    )
    query, key, value = made
    return query, key, value


def timed(
    clock: Clock,
    device: torch.device,
    kernel: str,
    cases: Sequence[Attention],
    make: Make,
    counts: str,
    show_progress: Callable[[int, int], None],
) -> TimedKernel:
    rows = []
    for done, case in enumerate(cases):
        show_progress(done, len(cases))
        named = replace(case, kernel=kernel)
        rows.append((named, clock.alone(make(named, device), 30.0)))
    return TimedKernel(kernel, counts, tuple(rows))
