"""From samples to a profile's constants: curves that never fall, tiles of products, links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from random import Random
from statistics import fmean, median

from weaveopt.cost_model.curve import interpolate_us
from weaveopt.cost_model.machine import AttentionCosts, Point, ProductCosts, Rate, Samples, Tile
from weaveopt.cost_model.products import modelled_us
from weaveopt.measure.clock import Sample
from weaveopt.measure.kernels import AttentionCase, Grid

TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 192), (192, 128), (64, 256), (128, 256), (256, 128))
"""Output tiles of the products of GPU libraries."""
Corner = tuple[int, int, int]
"""(m, n, k)."""


def never_falling(rows: Sequence[tuple[int, float]]) -> tuple[Point, ...]:
    """Times that fall with growing size are noise: neighbours that do are set to their mean, until none does."""
    pools: list[list[float]] = []
    for _, us in rows:
        pools.append([us])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            tail = pools.pop()
            pools[-1] += tail
    smooth = [fmean(pool) for pool in pools for _ in pool]
    return tuple(Point(size, round(us, 3)) for (size, _), us in zip(rows, smooth, strict=True))


def tiled_products(dtype: str, origin: str, units: int, grid: Grid, times: Mapping[Corner, Sample]) -> ProductCosts:
    """Tiles whose model comes closest to the samples, and the samples themselves.

    The constants are found by a random walk with a fixed seed, so that the same samples give the same profile.
    """
    us = tuple(round(times[corner].us, 3) if corner in times else 0.0 for corner in grid.corners)
    samples = Samples(grid.m, grid.n, grid.k, us)
    known = sorted(times)
    numbers = Random(0)
    shown = [(corner, times[corner].us) for corner in numbers.sample(known, min(len(known), 200))]
    item = 2 if dtype != "float32" else 4
    fastest = max(2.0 * m * n * k / times[m, n, k].us * 1e6 for m, n, k in known)
    widest = max((m * n + m * k + n * k) * item / times[m, n, k].us * 1e6 for m, n, k in known)
    least = min(times[corner].us for corner in known)
    # launch, bytes a second, full rate, what a small tile loses, fill, last wave
    best = [least / 2, widest, fastest, 0.2, 1.0, 0.6]
    best_error = _error(_costs(dtype, origin, units, samples, best), shown)
    stride = 0.25
    for step in range(160):
        tried = [value * exp(numbers.gauss(0, stride)) if numbers.random() < 0.5 else value for value in best]
        tried[0], tried[5] = min(tried[0], 0.9 * least), min(tried[5], 1.0)
        error = _error(_costs(dtype, origin, units, samples, tried), shown)
        if error < best_error:
            best, best_error = tried, error
        elif step % 40 == 39:
            stride *= 0.6
    return _costs(dtype, origin, units, samples, best)


def _costs(dtype: str, origin: str, units: int, samples: Samples, constants: Sequence[float]) -> ProductCosts:
    launch_us, bytes_per_s, rate, loss, fill_us, last_wave = constants
    # A tile of m x n does 2 m n operations a k for m + n values loaded: a small one is bound by its loads.
    tiles = tuple(Tile(m, n, round(rate / (1 + 64 * loss * (1 / m + 1 / n)), -9)) for m, n in TILES)
    return ProductCosts(
        dtype, origin, round(launch_us, 3), round(bytes_per_s, -9), units, tiles,
        fill_us=round(fill_us, 3), last_wave=round(last_wave, 3), samples=samples,
    )  # fmt: skip


def _error(costs: ProductCosts, shown: Sequence[tuple[Corner, float]]) -> float:
    return fmean(abs(log(modelled_us(costs, *corner) / us)) for corner, us in shown)


def rated_products(
    dtype: str, origin: str, launch_us: float, size: int, times: Mapping[Corner, Sample]
) -> ProductCosts:
    """Rates by rows, for machines without waves: n = k = `size`. The traffic limit is what few rows reach."""
    item = 2 if dtype != "float32" else 4
    rates = []
    for (m, _, _), sample in sorted(times.items()):
        rates.append(Rate(m, round(2.0 * m * size * size / max(sample.us - launch_us, 0.1) * 1e6, -6)))
    rows, fastest = min(((corner[0], sample.us) for corner, sample in times.items()), key=lambda pair: pair[1])
    bytes_per_s = (size * size + 2 * rows * size) * item / max(fastest - launch_us, 0.1) * 1e6
    return ProductCosts(dtype, origin, round(launch_us, 3), round(bytes_per_s, -6), rates=tuple(rates))


def with_samples(costs: ProductCosts, grid: Grid, times: Mapping[Corner, Sample]) -> ProductCosts:
    """The same costs, held to the samples of a grid."""
    us = tuple(round(times[corner].us, 3) if corner in times else 0.0 for corner in grid.corners)
    return replace(costs, samples=Samples(grid.m, grid.n, grid.k, us))


SUSPECT = 1.25
"""Of what its neighbours on a curve let expect: a time above it is measured again."""


def suspects(rows: Sequence[tuple[int, Sample]]) -> list[int]:
    """Positions of times that stand out of their curve: above a larger size's, or far above both neighbours' line."""
    found = []
    for index, (size, sample) in enumerate(rows):
        after = rows[index + 1] if index + 1 < len(rows) else None
        before = rows[index - 1] if index else None
        falls = after is not None and sample.us > after[1].us
        stands_out = False
        if before is not None and after is not None:
            ends = Point(before[0], before[1].us), Point(after[0], max(after[1].us, before[1].us))
            stands_out = sample.us > SUSPECT * interpolate_us(ends, size)
        if falls or stands_out:
            found.append(index)
    return found


def calmed(rows: list[tuple[int, Sample]], again: Callable[[int], Sample], rounds: int = 3) -> list[tuple[int, Sample]]:
    """The curve with its outliers measured again, by position; the faster of the two times counts."""
    rows = list(rows)
    for _ in range(rounds):
        for index in suspects(rows):
            size, sample = rows[index]
            rows[index] = size, min(sample, again(index), key=lambda each: each.us)
    return rows


def between_error(curves: Iterable[Sequence[Point]]) -> float:
    """How far readings between two points are off, at three of four of them: each inner point from its neighbours."""
    errors = sorted(
        abs(interpolate_us((before, after), point.bytes) / point.us - 1)
        for points in curves
        for before, point, after in zip(points, points[1:], points[2:], strict=False)
    )
    # A gap between two points of a profile is half of the one that was bridged here.
    return errors[int(0.75 * len(errors))] / 2 if errors else 0.0


def grouped_slowdown(pairs: Iterable[tuple[Sample, Sample]]) -> float:
    """Of a grouped product against one product of the same work: the median over the cases."""
    return median(by_expert.us / at_once.us for by_expert, at_once in pairs)


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


def steps_of(case: AttentionCase, units: int) -> int:
    """Steps of the K-loop in all waves of query tiles, one after the other."""
    tiles = case.batch * case.heads * -(-case.queries // TILE_Q)
    return -(-tiles // units) * -(-case.keys // TILE_KV)


def line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of `a + b x` with the least squares of relative errors; both at least a little above zero."""
    weights = [1 / y**2 for _, y in rows]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, rows, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, rows, strict=True)) / total
    covariance = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, rows, strict=True))
    variance = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, rows, strict=True))
    slope = max(covariance / variance if variance else 0.0, 1e-9)
    return max(mean_y - slope * mean_x, 1e-3), slope
