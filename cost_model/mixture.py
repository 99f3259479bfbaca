"""Time of the experts of a mixture as one operation: gather, two GEMMs by expert, an activation, a weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from weaveopt.cost_model.batched import grouped_gemm_us, num_active_experts
from weaveopt.cost_model.gemm import Gemm
from weaveopt.cost_model.host import host_us
from weaveopt.cost_model.kernel_curve import kernel_curve_us
from weaveopt.cost_model.kernels import memory_us
from weaveopt.cost_model.machine import KernelCurve, Machine
from weaveopt.records.candidate import Rejection, Values
from weaveopt.records.price import hypotenuse
from weaveopt.records.site import DTYPE_BYTES
from weaveopt.records.skew import UNIFORM, Skew

OPERATION = "experts"
"""Operation of the curves in a profile: variant `bfloat16 weights` by bytes of weights, `bfloat16 rows` by FLOP. The
kernels' name, if any, precedes, and `transposed` for transposed weights: `hopper transposed bfloat16 rows`."""
WIDE = "wide"
"""The kernels for many rows an expert. Their tiles are of 256 rows: an expert with a few more than that has two of half
as many."""
LEAST_ROWS: Mapping[str, int] = MappingProxyType({"hopper": 4, "one_kernel": 4, WIDE: 2048})
"""Least mean rows of an expert from which kernels are a choice. With fewer, other kernels were faster on an H100 and on
an H200: with less than 4 up to 1.4 times, which curves by bytes of weights do not show. `wide` took 0.93 to 0.94 times
as long as `hopper` with 4096, 0.97 to 1.19 times with 1024, and up to 1.36 times with 256."""
OVERLAPS: Mapping[str, float] = MappingProxyType({"hopper": 2.3, "one_kernel": 2.3, WIDE: 2.3})
"""Exponents of `kernels_us` other than 2. These kernels fetch weights by bulk copies under the arithmetic, and overlap
more of both: with 2.3 the kernels that are chosen on two H100s reach 0.95 of the fastest at least, with 2 0.85."""
LIBRARY_CALLS = 6
"""Library calls for an expert's rows on a CPU: gather, two GEMMs, activation, multiplication with up, scatter."""


@dataclass(frozen=True)
class Mixture:
    """Experts `[width or 2 * width, hidden]` and `[hidden, width]`, of which each token takes some, on one rank."""

    tokens: int
    choices: float
    """Mean number of a token's choices that are experts of this rank."""
    experts: int
    """Experts on this rank that tokens choose from."""
    hidden: int
    width: int
    gated: bool
    dtype: str
    skew: Skew = UNIFORM
    """Skew of the choices among this rank's experts."""
    transposed: bool = False
    """True if weights are stored as `[experts, in, out]`: kernels have curves of their own for those."""

    @property
    def rows(self) -> int:
        """Choices that this rank computes."""
        return max(round(self.tokens * self.choices), 1) if self.tokens else 0

    @property
    def wide(self) -> int:
        """Results of an expert's first GEMM."""
        return self.width * (2 if self.gated else 1)

    @property
    def active(self) -> int:
        """Experts with any rows."""
        return num_active_experts(self.experts, self.rows, self.skew) if self.rows else 0

    @property
    def rows_of_expert(self) -> tuple[float, float]:
        """Rows of one of this rank's experts on average, and of the busiest."""
        return self.rows / self.experts, self.skew.rows_of_busiest(self.experts, self.rows)

    @property
    def weight_bytes(self) -> int:
        """Weights of the experts with any rows."""
        return self.active * (self.wide + self.width) * self.hidden * DTYPE_BYTES[self.dtype]

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * (self.wide + self.width) * self.hidden


def rows_by_expert(mixture: Mixture, assumed: Skew) -> Values:
    """For reports: rows of an expert on average and of the busiest, and the spread that they rest on."""
    mean, busiest = mixture.rows_of_expert
    return (("expert_rows", round(mean, 1)), ("busiest_expert_rows", round(busiest, 1)), ("routing", str(assumed)))


def variant_of(kernels: str, dtype: str, counted: str, transposed: bool = False) -> str:
    """Variant name of a curve: `kernels` is empty for those without a name; `counted` is `weights` or `rows`."""
    return " ".join(word for word in (kernels, "transposed" * transposed, dtype, counted) if word)


def has_few_rows(mixture: Mixture, kernels: str) -> bool:
    """True if experts have too few rows for the kernels of that name."""
    return mixture.rows_of_expert[0] < LEAST_ROWS.get(kernels, 0)


def few_rows(mixture: Mixture, kernels: str) -> Rejection:
    """Rejection of kernels whose experts have too few rows."""
    message = f"with fewer than {LEAST_ROWS[kernels]} rows an expert other kernels are the faster ones"
    return Rejection("few_rows", message, (("expert_rows", round(mixture.rows_of_expert[0], 1)),))


def kernels_us(machine: Machine, mixture: Mixture, kernels: str = "") -> float | None:
    """Microseconds of the kernels of that name on a GPU, by their measured curves; None where the profile has none, and
    where experts have too few rows for them.

    Reading the weights of the experts with rows and the arithmetic run at the same time, but where both take long each
    delays the other: the root of the sum of their squares, or of a power that `OVERLAPS` names. More than was ever
    measured goes on at the rate of the most, and less arithmetic at that of the least: what a call costs at least is in
    the time of its weights.
    """
    curves = _curves(machine.untimed, kernels, mixture.dtype, mixture.transposed)
    if len(curves) < 2 or has_few_rows(mixture, kernels):
        return None
    least = curves["rows"].points[0].size
    arithmetic_us = _on_curve(machine, curves["rows"], mixture.flops) * min(mixture.flops / least, 1.0)
    weights_us = _on_curve(machine, curves["weights"], mixture.weight_bytes)
    return hypotenuse(weights_us, arithmetic_us, OVERLAPS.get(kernels, 2.0))


def _on_curve(machine: Machine, curve: KernelCurve, size: float) -> float:
    most = curve.points[-1].size
    return kernel_curve_us(machine, curve, min(size, most)) * max(size / most, 1.0)


def fastest_kernels(machine: Machine, mixture: Mixture, kernels: Sequence[str]) -> str | None:
    """Which of the kernels of these names take least for the mixture, the first of equals; None: none was measured."""
    times = [(us, at) for at, name in enumerate(kernels) if (us := kernels_us(machine, mixture, name)) is not None]
    return kernels[min(times)[1]] if times else None


@cache
def _curves(machine: Machine, kernels: str, dtype: str, transposed: bool) -> dict[str, KernelCurve]:
    named = {variant_of(kernels, dtype, counted, transposed): counted for counted in ("weights", "rows")}
    return {named[each.variant]: each for each in machine.kernels if each.op == OPERATION and each.variant in named}


def gemms_us(machine: Machine, mixture: Mixture) -> float:
    """The library's two GEMMs, grouped by expert."""
    if not mixture.rows:
        return 0.0
    up = Gemm(mixture.rows, mixture.hidden, mixture.wide)
    down = Gemm(mixture.rows, mixture.width, mixture.hidden)
    routed = machine if machine.skew == mixture.skew else replace(machine, skew=mixture.skew)
    return sum(grouped_gemm_us(routed, mixture.experts, gemm, mixture.dtype) for gemm in (up, down))


@dataclass(frozen=True)
class CpuParts:
    """Times of the operation on a CPU, in microseconds."""

    gemm_us: float
    memory_us: float


def cpu_parts(machine: Machine, mixture: Mixture) -> CpuParts:
    """Microseconds on a CPU: the library's GEMMs expert by expert, and the memory traffic between them.

    Rows are gathered and scattered once, activations read twice and written twice, and the sum reads every row.
    """
    if not mixture.rows:
        return CpuParts(0.0, host_us(machine))
    size = DTYPE_BYTES[mixture.dtype]
    passes = (4 * mixture.hidden + 2 * mixture.wide + 2 * mixture.width) * mixture.rows * size
    summed = (mixture.rows * 2 + mixture.tokens) * mixture.hidden * size
    calls = LIBRARY_CALLS * mixture.active * machine.memory.floor_us
    return CpuParts(gemms_us(machine, mixture), memory_us(machine, passes) + memory_us(machine, summed) + calls)
