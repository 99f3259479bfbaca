"""Time of a GEMM: output tiles in waves, and where GEMMs were measured, the tiles' error between them.

The tiles' part follows what libraries do: a grid of output tiles (TokenWeave §3: 300 CTAs on 132 SMs are three
waves, the last one 27 % full), the K-loop of a tile perhaps split among several CTAs, a fixed cost of every wave for
its first loads and last stores, and never faster than reading both operands and writing the result once. What it
cannot know (which kernel a library's heuristic picks) is in the measured grid: at its corners the prediction is the
measurement, and between them the logarithm of measured / modelled is interpolated along log m, log n and log k.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from math import exp, floor, hypot, log, sqrt

from weaveopt.cost_model.curve import interpolate_rate
from weaveopt.cost_model.energy import PowerCosts, Work, at_other_clock
from weaveopt.cost_model.machine import GemmCosts, GemmTile, Machine, Samples
from weaveopt.cost_model.timed import KernelShape
from weaveopt.cost_model.uncertainty import UNMEASURED_ERROR, away_error, read
from weaveopt.records.price import Price
from weaveopt.records.site import DTYPE_BYTES

GEMM = "gemm"
"""Name of the kernel among those that are timed."""
# Where a profile has no row for a dtype: the row that stands in, and how many times slower that dtype runs.
_STAND_INS: dict[str, tuple[str, float]] = {"float16": ("bfloat16", 1.0), "float64": ("float32", 2.0)}
SPLITS = (1, 2, 4, 8)
"""CTAs that may share the K-loop of a tile; their partial results are added in fp32 through memory."""
ALIGNED = 8
"""Elements of 2 bytes in 16: rows of other lengths are read without TMA and 16-byte loads, by kernels that no sample
is of."""
SHARPNESS = 4.0
"""Arithmetic and traffic overlap: their p-norm, nearly the larger of the two."""


def num_waves(num_tiles: int, num_units: int) -> int:
    """`ceil(num_tiles / num_units)`: 300 CTAs on 132 SMs take 3 waves (TokenWeave §3)."""
    return -(-num_tiles // num_units)


@dataclass(frozen=True)
class Gemm:
    """`a[m, k] @ b[k, n]` on one rank."""

    m: int
    k: int
    n: int
    layout: str = field(default="", compare=False)
    """How the graph stores operands and what its call adds: `rc bias`. Empty: as whoever calls it; no curve has it."""


def gemm_us(machine: Machine, gemm: Gemm | None, dtype: str) -> float:
    """`a[m, k] @ b[k, n]` on one rank, in microseconds; 0 without a GEMM or with an empty one.

    As it was timed where it was, else by the profile.
    """
    if gemm is None or min(gemm.m, gemm.k, gemm.n) == 0:
        return 0.0
    costs, slowdown = _costs_of(machine, dtype)
    shape = KernelShape(GEMM, dtype, gemm.m, (gemm.k, gemm.n), gemm.layout)

    def by_profile(m: int) -> Price:
        reading = (GEMM, costs.dtype, m, gemm.n, gemm.k)
        away = partial(gemm_error, costs, m, gemm.n, gemm.k)
        return read(machine, costs.origin, _us(costs, m, gemm.n, gemm.k), reading, away) * slowdown

    return machine.timed.us(shape, by_profile)


@cache
def power_at_clock(machine: Machine) -> PowerCosts | None:
    """Energies of the machine's kernels by the times that it predicts: where GEMMs were timed, the profile's by other
    times. None where the profile has no energies."""
    if machine.power is None:
        return None

    def by_profile(shape: KernelShape) -> float:
        k, n = shape.rest
        return gemm_us(machine.untimed, Gemm(shape.size, k, n), shape.dtype)

    return at_other_clock(machine.power, Work.GEMM, machine.timed.slowdown(GEMM, by_profile))


def _costs_of(machine: Machine, dtype: str) -> tuple[GemmCosts, float]:
    """The profile's row for a dtype, or the one that stands in; and how many times slower that dtype runs."""
    by_dtype = {costs.dtype: costs for costs in machine.gemms}
    slowdown = 1.0
    if dtype not in by_dtype:
        dtype, slowdown = _STAND_INS.get(dtype, ("float32", 1.0))
    return by_dtype[dtype], slowdown


def num_units(machine: Machine, dtype: str) -> int:
    """Processors (SMs) that a dtype's tiles go over in waves; 0 on a machine without tiles."""
    costs, _ = _costs_of(machine, dtype)
    return costs.units if costs.tiles else 0


@dataclass(frozen=True)
class Waves:
    """How a GEMM's tiles run."""

    num_waves: int
    tile_m: int
    """Rows of a tile."""


def waves_of(machine: Machine, gemm: Gemm, dtype: str) -> Waves | None:
    """Waves of the tile shape that is predicted fastest, its K-loop unsplit; None where the machine has no tiles."""
    costs, _ = _costs_of(machine, dtype)
    if not costs.tiles:
        return None

    def us(tile: GemmTile) -> float:
        return _tiles_us(costs, tile, gemm.m, gemm.n, gemm.k, 1)

    tile = min(costs.tiles, key=us)
    return Waves(num_waves(num_waves(gemm.m, tile.m) * num_waves(gemm.n, tile.n), costs.units), tile.m)


@cache
def _us(costs: GemmCosts, m: int, n: int, k: int) -> float:
    modelled = modelled_us(costs, m, n, k)
    return modelled if costs.samples is None else modelled * exp(_correction(costs, costs.samples, m, n, k))


@cache
def gemm_error(costs: GemmCosts, m: int, n: int, k: int) -> float:
    """Relative error of `gemm_us` beyond that at a measured size: along each axis the residuals of the corners around,
    each left out and predicted by its neighbours on that axis, and the root of the sum of squares over the axes.

    0 without samples: then the whole model has the error of its constants.
    """
    samples = costs.samples
    if samples is None:
        return 0.0
    around = [_around(axis, value) for axis, value in zip((samples.m, samples.n, samples.k), (m, n, k), strict=True)]
    errors = [_along(costs, samples, axis, (m, n, k)[axis], around) for axis in range(3)]
    aligned = n % ALIGNED == 0 and k % ALIGNED == 0
    return hypot(*errors, 0.0 if aligned else UNMEASURED_ERROR)


def _along(
    costs: GemmCosts, samples: Samples, axis: int, value: int, around: Sequence[tuple[tuple[int, float], ...]]
) -> float:
    """The error along one axis: root mean square over the corners of the other two, each by its share."""
    sizes = (samples.m, samples.n, samples.k)[axis]
    if value in sizes:
        return 0.0
    total = weight = 0.0
    others = [each for at, each in enumerate(around) if at != axis]
    for (first, first_share), (second, second_share) in product(*others):
        known = []
        for at, size in enumerate(sizes):
            corner = [first, second]
            corner.insert(axis, at)
            ratio = _corner(costs, samples, *corner)
            if ratio is not None:
                known.append((float(size), ratio))
        if known:
            share = first_share * second_share
            error = away_error([size for size, _ in known], [ratio for _, ratio in known], value)
            total += share * error * error
            weight += share
    return sqrt(total / weight) if weight else 0.0


def modelled_us(costs: GemmCosts, m: int, n: int, k: int) -> float:
    """The tiles' part alone: launch, and the p-norm of arithmetic and traffic."""
    traffic_us = (m * k + k * n + m * n) * DTYPE_BYTES[costs.dtype] / costs.bytes_per_s * 1e6
    if not costs.tiles:
        arithmetic_us = 2.0 * m * k * n / interpolate_rate(costs.rates, m) * 1e6
        return costs.launch_us + max(arithmetic_us, traffic_us)
    arithmetic_us = min(_split_us(costs, m, n, k, split) for split in _splits(costs))
    if costs.samples is None:
        return costs.launch_us + max(arithmetic_us, traffic_us)
    return costs.launch_us + float((arithmetic_us**SHARPNESS + traffic_us**SHARPNESS) ** (1 / SHARPNESS))


def _splits(costs: GemmCosts) -> tuple[int, ...]:
    # Without a measured cost of a wave, splitting would look free.
    return SPLITS if costs.fill_us > 0 else SPLITS[:1]


def _split_us(costs: GemmCosts, m: int, n: int, k: int, split: int) -> float:
    """The fastest tile shape (a library keeps the fastest) with the K-loop shared by `split` CTAs."""
    best = min(_tiles_us(costs, tile, m, n, k, split) for tile in costs.tiles)
    partial_sums_us = 0.0 if split == 1 else costs.fill_us + 8.0 * m * n * split / costs.bytes_per_s * 1e6
    return best + partial_sums_us


def _tiles_us(costs: GemmCosts, tile: GemmTile, m: int, n: int, k: int, split: int) -> float:
    num_tiles = num_waves(m, tile.m) * num_waves(n, tile.n) * split
    wave_us = 2.0 * tile.m * tile.n * costs.units * (k / split) / tile.flops_per_s * 1e6 + costs.fill_us
    return _waves(num_tiles / costs.units, costs.last_wave) * wave_us


def _waves(full: float, last_wave: float) -> float:
    """Waves in time: a last one that is partly full takes between `last_wave` and one wave."""
    whole = floor(full)
    rest = full - whole
    return max(whole + (last_wave + (1 - last_wave) * rest if rest > 0 else 0.0), min(last_wave, 1.0))


def _correction(costs: GemmCosts, samples: Samples, m: int, n: int, k: int) -> float:
    """log(measured / modelled), trilinear between the corners around (m, n, k); beyond the grid its edge holds."""
    total = weight = 0.0
    for i, share_m in _around(samples.m, m):
        for j, share_n in _around(samples.n, n):
            for h, share_k in _around(samples.k, k):
                known = _corner(costs, samples, i, j, h)
                if known is not None:
                    share = share_m * share_n * share_k
                    total += share * known
                    weight += share
    return total / weight if weight > 0 else 0.0


@cache
def _corner(costs: GemmCosts, samples: Samples, i: int, j: int, h: int) -> float | None:
    us = samples.at(i, j, h)
    return log(us / modelled_us(costs, samples.m[i], samples.n[j], samples.k[h])) if us > 0 else None


def _around(axis: tuple[int, ...], value: int) -> tuple[tuple[int, float], ...]:
    """Indices on both sides of `value` with their shares, linear in the logarithm."""
    inside = min(max(value, axis[0]), axis[-1])
    right = bisect_left(axis, inside)
    if axis[right] == inside:
        return ((right, 1.0),)
    low, high = axis[right - 1], axis[right]
    share = log(inside / low) / log(high / low)
    return ((right - 1, 1.0 - share), (right, share))


def was_measured(machine: Machine, shape: KernelShape) -> bool:
    """True if the profile measured a GEMM of this size; other kernels are always read between points."""
    costs = next((each for each in machine.gemms if each.dtype == shape.dtype), None)
    if shape.kernel != GEMM or costs is None or costs.samples is None:
        return False
    samples, (k, n) = costs.samples, shape.rest
    if shape.size not in samples.m or n not in samples.n or k not in samples.k:
        return False
    return samples.at(samples.m.index(shape.size), samples.n.index(n), samples.k.index(k)) > 0
