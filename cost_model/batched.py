"""Time of many GEMMs in one kernel: a batch of equal ones, or one for each expert that tokens chose."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, log2

from weaveopt.cost_model.compiled import CompiledCosts, Slowdown
from weaveopt.cost_model.gemm import Gemm, gemm_us
from weaveopt.cost_model.kernels import memory_us
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.timed import KernelShape
from weaveopt.records.site import DTYPE_BYTES
from weaveopt.records.skew import UNIFORM, Skew

BATCHED, GROUPED = "bmm", "grouped_gemm"
"""Names of the kernels among those that are timed."""


def batched_gemm_us(machine: Machine, batch: int, gemm: Gemm, dtype: str) -> float:
    """`a[batch, m, k] @ b[batch, k, n]` on one rank, in microseconds.

    Taken as one GEMM with a result `batch` times as wide, which keeps rows and waves; never less than reading all
    of `a`, which that leaves out, and `b`, and writing the result.
    """
    if batch <= 1:
        return gemm_us(machine, gemm, dtype) if batch == 1 else 0.0
    k, n, by_curves = gemm.k, gemm.n, machine.untimed

    def by_profile(m: int) -> float:
        moved = batch * (m * k + k * n + m * n) * DTYPE_BYTES[dtype]
        return max(gemm_us(by_curves, Gemm(m, k, n * batch), dtype), memory_us(by_curves, moved))

    return machine.timed.us(KernelShape(BATCHED, dtype, gemm.m, (batch, k, n), gemm.layout), by_profile)


def num_active_experts(experts: int, rows: int, skew: Skew = UNIFORM) -> int:
    """Experts that get any of `rows` rows, spread at random: `experts · (1 - (1 - 1 / experts) ** rows)`, rounded.

    With a skew the same of each of its two parts.
    """
    return skew.active(experts, rows)


def grouped_gemm_us(machine: Machine, experts: int, gemm: Gemm, dtype: str) -> float:
    """`gemm.m` rows in all, each times the `[k, n]` weights of its expert, on one rank, in microseconds.

    Only the weights of experts that get rows are read. Taken as one GEMM of the same work (`same_work`), times
    what the machine's grouped kernel takes more: much of it where experts have few rows, little where they have many.
    """
    if gemm.m <= 0 or experts <= 0:
        return 0.0
    costs, by_curves = machine.compiled, machine.untimed

    def by_profile(rows: int) -> float:
        active = num_active_experts(experts, rows, machine.skew)
        slowdown = 1.0 if costs is None else grouped_slowdown(costs, rows / active, gemm.k * gemm.n)
        return gemm_us(by_curves, same_work(active, replace(gemm, m=rows)), dtype) * slowdown

    if machine.skew != UNIFORM:  # rows are timed as they spread at random
        return by_profile(gemm.m)
    return machine.timed.us(KernelShape(GROUPED, dtype, gemm.m, (experts, gemm.k, gemm.n), gemm.layout), by_profile)


def grouped_slowdown(costs: CompiledCosts, rows: float, elements: int) -> float:
    """Slowdown of a grouped GEMM against one GEMM of the same work, where an expert has `rows` rows and `elements` of
    weight: interpolated over the logarithm of either, and constant beyond the ends."""
    if not costs.grouped:
        return 1.0
    return _straight([(each.elements, _by_rows(each.rows, rows)) for each in costs.grouped], elements)


def _by_rows(points: Sequence[Slowdown], rows: float) -> float:
    return _straight([(point.rows, point.times) for point in points], rows)


def _straight(points: Sequence[tuple[int, float]], at: float) -> float:
    """Between the points, whose first values grow; at least one."""
    right = bisect_right(points, at, key=lambda point: point[0])
    if right in (0, len(points)):
        return points[min(right, len(points) - 1)][1]
    (low, below), (high, above) = points[right - 1], points[right]
    return below + log2(at / low) / log2(high / low) * (above - below)


def same_work(active: int, gemm: Gemm) -> Gemm:
    """One GEMM with the rows of one of `active` experts, and the results of all side by side."""
    return Gemm(ceil(gemm.m / active), gemm.k, gemm.n * active)
