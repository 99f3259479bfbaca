"""Fit of a profile's curves and link from samples of the fused kernels."""

from __future__ import annotations

from collections.abc import Mapping

from weaveopt.cost_model.machine import Curve, Link
from weaveopt.measure.clock import Sample
from weaveopt.measure.fit import never_falling
from weaveopt.measure.session import Rows
from weaveopt.ops.reduction.variant import OP, Algorithm, KernelRow, Transfer, variant_name

Times = dict[tuple[int, int, KernelRow], Rows]
"""(bytes, time) by world, row length and kernel; its `max_tokens` is 0."""
WHAT = "fused all-reduce + add + RMSNorm, residual sharded, bfloat16"


def curve_of(origin: str, world: int, row: int, kernel: KernelRow, rows: Rows) -> Curve:
    """Build one kernel's curve; `row` is 0 if the curve holds for every row length."""
    points = never_falling([(size, sample.us) for size, sample in rows])
    name = variant_name(kernel.algorithm, kernel.transfer, kernel.num_ctas)
    if kernel.transfer is not Transfer.LL_PACKET:
        return Curve(origin, OP, name, world, points, row)
    # Mailboxes end where they are no longer worth their memory. On fewer CTAs than fit, LL packets are measured
    # where they may pay. Nothing is known beyond either end.
    first_bytes = points[0].bytes if kernel.num_ctas else 0
    return Curve(origin, OP, name, world, points, row, first_bytes, points[-1].bytes)


def peer_link(origin: str, times: Times) -> Link:
    """α: half of two-shot at the smallest size; β: what the largest exchange of the largest group moves in its time."""
    largest = max(world for world, _, _ in times)
    rows = fastest(times, largest, Algorithm.TWO_SHOT)
    (size, sample), floor_us = rows[-1], rows[0][1].us
    rate = 2 * (largest - 1) / largest * size / (sample.us - floor_us) * 1e6
    return Link(origin, round(floor_us / 2, 3), round(rate, -8))


def shm_link(origin: str, times: Times, whole_us: Mapping[int, float]) -> Link:
    """Fit the link. α: two-shot beyond one-shot at the smallest size; β: the cost of also distributing the rows of the
    sum.

    `whole_us`, by world size: the largest two-shot exchange that also distributes the rows of the sum.
    """
    smallest = min(whole_us)
    rows = fastest(times, smallest, Algorithm.TWO_SHOT)
    size, sharded_us = rows[-1][0], rows[-1][1].us
    more_us = max(whole_us[smallest] - sharded_us, 1.0)
    latency_us = max(rows[0][1].us - fastest(times, smallest, Algorithm.ONE_SHOT)[0][1].us, 1.0)
    return Link(origin, round(latency_us, 3), round((smallest - 1) / smallest * size / more_us * 1e6, -6))


def fastest(times: Times, world: int, algorithm: Algorithm) -> Rows:
    """The fastest kernel's time at each size."""
    best: dict[int, Sample] = {}
    for (ranks, _, kernel), rows in times.items():
        if ranks == world and kernel.algorithm is algorithm and kernel.transfer is not Transfer.DIRECT:
            for size, sample in rows:
                if size not in best or sample.us < best[size].us:
                    best[size] = sample
    return sorted(best.items())
