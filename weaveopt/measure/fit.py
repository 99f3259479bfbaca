"""Curves from samples: times that never fall, outliers measured again, the error of interpolation between points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from statistics import fmean

import torch

from weaveopt.cost_model.curve import interpolate_us
from weaveopt.cost_model.machine import Point
from weaveopt.measure.clock import Sample


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


BETTER = 0.02
"""Smallest reduction of the error that justifies one more factor."""
SUSPECT = 1.25
"""Ratio to the time interpolated from the neighbours on a curve above which a sample is measured again."""


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


def line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of `a + b x` with the least squares of relative errors; both at least a little above zero."""
    mean_x, mean_y, slope = _regression(rows)
    slope = max(slope, 1e-9)
    return max(mean_y - slope * mean_x, 1e-3), slope


def relative_line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of `a + b x` with the least squares of relative errors, whatever their signs."""
    mean_x, mean_y, slope = _regression(rows)
    return mean_y - slope * mean_x, slope


def relative_plane(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) of `z = a x + b y` with the least squares of relative errors, from rows (x, y, z)."""
    scaled = [(x / z, y / z) for x, y, z in rows]
    xx, xy, yy = sum(u * u for u, _ in scaled), sum(u * v for u, v in scaled), sum(v * v for _, v in scaled)
    x, y = sum(u for u, _ in scaled), sum(v for _, v in scaled)
    determinant = xx * yy - xy * xy
    if not determinant:
        return 0.0, 0.0
    return (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant


def relative_nonnegative(rows: Sequence[tuple[Sequence[float], float, float]]) -> tuple[float, ...]:
    """Factors, none below zero, of `z = sum of factor x`, from rows (x, z, y): least squares of errors over `y`.

    As few as there are that others do not better by `BETTER`: of columns that say the same, the first one's.
    """
    left = torch.tensor([[x / y for x in values] for values, _, y in rows], dtype=torch.float64)
    right = torch.tensor([z / y for _, z, y in rows], dtype=torch.float64)
    # Columns of one length: bytes and calls are numbers of very different size.
    lengths = left.norm(dim=0).clamp_min(1e-30)
    left = left / lengths
    num_factors = left.shape[1]
    best, least = torch.zeros(num_factors, dtype=torch.float64), float(right.norm())
    for count in range(1, num_factors + 1):
        for chosen in combinations(range(num_factors), count):
            part = left[:, chosen]
            factors = torch.linalg.lstsq(part, right, driver="gelsd").solution
            error = float((part @ factors - right).norm())
            if bool((factors >= 0).all()) and error < least * (1 - BETTER):
                least = error
                best = torch.zeros(num_factors, dtype=torch.float64)
                best[list(chosen)] = factors
    return tuple((best / lengths).tolist())


def _regression(rows: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(mean x, mean y, slope), every row weighted by `1 / y²`."""
    weights = [1 / y**2 for _, y in rows]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, rows, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, rows, strict=True)) / total
    covariance = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, rows, strict=True))
    variance = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, rows, strict=True))
    return mean_x, mean_y, covariance / variance if variance else 0.0
