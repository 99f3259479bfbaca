"""Weights that are loaded into L2 while an exchange waits: what the GEMM that reads them next takes less."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model.l2_prefetch import L2_SHARE, NOTHING_US, OPERATION, Order, variant_of
from weaveopt.cost_model.machine import KernelCurve, SizePoint
from weaveopt.measure.cases.all_reduce_norm.calls import DTYPE, Fused, is_supported, peer_call, reserve
from weaveopt.measure.cases.family import Family
from weaveopt.measure.clock import Collectives, Launch, Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import Session
from weaveopt.reductions.call import Prefetch, ReductionCall
from weaveopt.reductions.variant import Algorithm, KernelRow, Transfer

HIDDEN, COLUMNS = 8192, 4096
"""Of the GEMM behind the exchange: 64 MiB of weights, more than any cache keeps of them."""
ONE_SHOT, TWO_SHOT = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT
KERNELS = tuple(
    KernelRow(tokens, how, Transfer.LL_PACKET) for tokens, how in ((1, ONE_SHOT), (8, ONE_SHOT), (64, TWO_SHOT))
)
"""By token count, as they are chosen about there."""
MEBIBYTES = (1, 2, 4, 8, 12, 16, 24, 32)
COLD_CACHES = 4
"""Weights take turns that are so many times as large as L2: in a model those of other layers have driven them out."""
MEMORY_BYTES_PER_US = 3e6
"""About, for how many calls a measurement makes."""
What = tuple[Order, int] | None
"""Order and bytes; None: nothing is loaded beside the exchange."""


def sizes_of(l2_bytes: int, quick: bool) -> tuple[int, ...]:
    """Bytes that are measured: no more than a share of the cache."""
    fitting = [each << 20 for each in MEBIBYTES if each << 20 <= l2_bytes * L2_SHARE]
    return tuple(fitting[:: 3 if quick else 1])


def call_of(ranks: Ranks, row: KernelRow, what: What) -> ReductionCall:
    prefetch = None if what is None else Prefetch(what[1], what[0], row.max_tokens)
    fused = Fused(row, HIDDEN, row.max_tokens)
    call = peer_call(f"calibrate.prefetch.{row.max_tokens}.{what}", ranks.name, ranks.world, fused, True)
    return replace(call, prefetch=prefetch)


def launch_of(ranks: Ranks, call: ReductionCall, weights: Sequence[torch.Tensor]) -> Launch:
    """The exchange, and the GEMM of its rows with weights that take turns."""
    tokens, device = call.max_tokens, ranks.device
    numbers = torch.Generator(device).manual_seed(tokens)  # the same on all ranks, as a residual is
    partial, residual = torch.randn(2, tokens, HIDDEN, generator=numbers, device=device).to(DTYPE).unbind()
    scale = torch.ones(HIDDEN, device=device, dtype=DTYPE)
    out = torch.empty(tokens, COLUMNS, device=device, dtype=DTYPE)
    op, text = torch.ops.weave.all_reduce_norm_prefetch.default, call.encode()

    def run(index: int) -> object:
        weight = weights[index % len(weights)]
        normalized, _ = op(partial, None, None, residual, None, None, scale, None, [weight], text)
        return torch.mm(normalized, weight.t(), out=out)

    return run


@dataclass
class PrefetchedWeights(Family):
    """On the fabric `peer`: an exchange and a GEMM, with and without, in turns.

    Only where it is asked for: whether what is saved here is saved in steps of a whole model is not measured.
    """

    devices: ClassVar = frozenset({"cuda"})
    unasked: ClassVar = False
    times: dict[tuple[int, int], dict[What, Sample]] = field(default_factory=dict)
    """By number of ranks and of tokens."""

    def measure_together(self, session: Session, ranks: Ranks) -> None:
        l2_bytes = torch.cuda.get_device_properties(ranks.device).L2_cache_size
        sizes = sizes_of(l2_bytes, session.quick)
        rows = KERNELS[1:2] if session.quick else KERNELS
        rows = tuple(row for row in rows if is_supported(Fused(row, HIDDEN, row.max_tokens), ranks.world, ranks.device))
        if not rows or not sizes:
            return
        every: list[What] = [None, *itertools.product(Order, sizes)]
        # One arena for all that is captured, before any of it is: graphs hold its addresses.
        reserve(ranks, [call_of(ranks, row, what) for row in rows for what in every])
        weight_bytes = COLUMNS * HIDDEN * DTYPE.itemsize
        turns = max(2, -(-COLD_CACHES * l2_bytes // weight_bytes))
        weights = torch.randn(turns, COLUMNS, HIDDEN, device=ranks.device, dtype=DTYPE).unbind()
        guess_us = 10.0 + weight_bytes / MEMORY_BYTES_PER_US
        for index, row in enumerate(rows):
            session.tell(f"weights prefetched beside exchanges of {ranks.world} ranks", index, len(rows))
            launches = [launch_of(ranks, call_of(ranks, row, what), weights) for what in every]
            taken = session.clock.in_turns(launches, [guess_us] * len(launches), Collectives(ranks.process_group))
            self.times[ranks.world, row.max_tokens] = dict(zip(every, taken, strict=True))

    def write(self, draft: Draft) -> None:
        if not self.times:
            return
        samples = (sample for taken in self.times.values() for sample in taken.values())
        origin = draft.origin("prefetched", samples, "exchange and GEMM, weights out of cache, bfloat16: time saved")
        for (world, tokens), taken in self.times.items():
            for order in Order:
                points = saved(taken, order)
                draft.kernels.append(KernelCurve(origin, OPERATION, variant_of(order, tokens, world), "bytes", points))


def saved(taken: dict[What, Sample], order: Order) -> tuple[SizePoint, ...]:
    """Microseconds by bytes, up to the size that saves most; what is within the spread of the times is nothing."""
    without = taken[None]
    rows = []
    for what, sample in taken.items():
        if what is not None and what[0] is order:
            us, noise_us = without.us - sample.us, max(without.spread, sample.spread) * without.us / 2
            rows.append((what[1], us if us > noise_us else 0.0))
    rows.sort()
    best = max(range(len(rows)), key=lambda index: rows[index][1])
    return tuple(SizePoint(each.bytes, max(each.us, NOTHING_US)) for each in never_falling(rows[: best + 1]))
