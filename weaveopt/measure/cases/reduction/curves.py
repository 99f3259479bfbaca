"""Times of the fused kernels at all sizes, and the fit of a profile's curves and link from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from weaveopt.cost_model.machine import Curve, Link
from weaveopt.measure.cases.reduction.calls import DTYPE, Fused
from weaveopt.measure.clock import Launch, Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.fit import never_falling
from weaveopt.measure.ranks import Ranks
from weaveopt.measure.session import CalibrationSession, Rows
from weaveopt.ops.reduction.variant import OP, Algorithm, KernelRow, Transfer, variant_name
from weaveopt.records.candidate import Fabric

Times = dict[tuple[int, int, KernelRow], Rows]
"""(bytes, time) by world, row length and kernel; its `max_tokens` is 0."""
WHAT = "fused all-reduce + add + RMSNorm, residual sharded, bfloat16"


def at_every_size(
    rows: Sequence[int], tokens: Sequence[int], limit_bytes: int, kernels_of: Callable[[int, int], Sequence[KernelRow]]
) -> Iterator[Fused]:
    """The kernels of each message up to `limit_bytes`; `kernels_of` returns those of (tokens, bytes)."""
    for row in rows:
        for count in tokens:
            size = count * row * DTYPE.itemsize
            if size <= limit_bytes:
                yield from (Fused(kernel, row, count) for kernel in kernels_of(count, size))


def measure_curves(
    session: CalibrationSession, ranks: Ranks, every: Sequence[Fused], launch_of: Callable[[Fused], Launch],
    guess_us: Callable[[int], float], what: Callable[[KernelRow], str],
) -> Times:  # fmt: skip
    """Times of every kernel and length of rows, all ranks together; `guess_us` is a first guess, by bytes."""
    by_kernel: dict[tuple[int, KernelRow], list[Fused]] = {}
    for fused in every:
        by_kernel.setdefault((fused.hidden, replace(fused.row, max_tokens=0)), []).append(fused)
    times: Times = {}
    for (row, kernel), sizes in by_kernel.items():

        def take(index: int, sizes: Sequence[Fused] = sizes) -> Sample:
            return session.clock.together(launch_of(sizes[index]), guess_us(sizes[index].bytes), ranks.process_group)

        times[ranks.world, row, kernel] = session.curve(what(kernel), [each.bytes for each in sizes], take)
    return times


def write_curves(draft: Draft, fabric: Fabric, name: str, times: Times) -> str:
    """Adds the curves of `times` to the profile; returns their origin."""
    origin = draft.origin(name, (sample for rows in times.values() for _, sample in rows), WHAT)
    for (world, row, kernel), rows in times.items():
        draft.add_curve(fabric, curve_of(origin, world, row, kernel, rows))
    return origin


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


def shm_link(origin: str, times: Times, whole_us: Mapping[int, float], size: int) -> Link:
    """Fit the link. α: two-shot beyond one-shot at the smallest size; β: the cost of also distributing the rows of the
    sum.

    `whole_us`, by world size: the two-shot exchange of `size` bytes that also distributes the rows of the sum.
    """
    smallest = min(whole_us)
    rows = fastest(times, smallest, Algorithm.TWO_SHOT)
    more_us = max(whole_us[smallest] - dict(rows)[size].us, 1.0)
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
