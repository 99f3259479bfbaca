"""Fit of a profile's constants from samples of GEMMs: tiles in waves, or rates by number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from random import Random
from statistics import fmean

from weaveopt.cost_model.gemm import modelled_us
from weaveopt.cost_model.machine import GemmCosts, GemmTile, Rate, Samples
from weaveopt.measure.clock import Sample

TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 192), (192, 128), (64, 256), (128, 256), (256, 128))
"""Output tiles of the GEMMs of GPU libraries."""
Corner = tuple[int, int, int]
"""(m, n, k)."""


@dataclass(frozen=True)
class Grid:
    """Rows, columns and depths of GEMMs, at whose corners they are measured."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]

    @property
    def corners(self) -> list[Corner]:
        """(m, n, k) by n, then k, then m."""
        return [(m, n, k) for n in self.n for k in self.k for m in self.m]


def tiled_gemms(dtype: str, origin: str, units: int, grid: Grid, times: Mapping[Corner, Sample]) -> GemmCosts:
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


def _costs(dtype: str, origin: str, units: int, samples: Samples, constants: Sequence[float]) -> GemmCosts:
    launch_us, bytes_per_s, rate, loss, fill_us, last_wave = constants
    # A tile of m x n does 2 m n operations a k for m + n values loaded: a small one is bound by its loads.
    tiles = tuple(GemmTile(m, n, round(rate / (1 + 64 * loss * (1 / m + 1 / n)), -9)) for m, n in TILES)
    return GemmCosts(
        dtype, origin, round(launch_us, 3), round(bytes_per_s, -9), units, tiles,
        fill_us=round(fill_us, 3), last_wave=round(last_wave, 3), samples=samples,
    )  # fmt: skip


def _error(costs: GemmCosts, shown: Sequence[tuple[Corner, float]]) -> float:
    return fmean(abs(log(modelled_us(costs, *corner) / us)) for corner, us in shown)


def rated_gemms(dtype: str, origin: str, launch_us: float, size: int, times: Mapping[Corner, Sample]) -> GemmCosts:
    """Rates by rows, for machines without waves: n = k = `size`. The traffic limit is what few rows reach."""
    item = 2 if dtype != "float32" else 4
    rates = []
    for (m, _, _), sample in sorted(times.items()):
        rates.append(Rate(m, round(2.0 * m * size * size / max(sample.us - launch_us, 0.1) * 1e6, -6)))
    rows, fastest = min(((corner[0], sample.us) for corner, sample in times.items()), key=lambda pair: pair[1])
    bytes_per_s = (size * size + 2 * rows * size) * item / max(fastest - launch_us, 0.1) * 1e6
    return GemmCosts(dtype, origin, round(launch_us, 3), round(bytes_per_s, -6), rates=tuple(rates))


def with_samples(costs: GemmCosts, grid: Grid, times: Mapping[Corner, Sample]) -> GemmCosts:
    """The same costs, held to the samples of a grid."""
    us = tuple(round(times[corner].us, 3) if corner in times else 0.0 for corner in grid.corners)
    return replace(costs, samples=Samples(grid.m, grid.n, grid.k, us))
