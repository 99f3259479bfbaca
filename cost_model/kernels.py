"""Time of one rank's own work: matrix products and kernels bound by memory."""

from __future__ import annotations

from weaveopt.cost_model.curve import interpolate_rate, interpolate_us
from weaveopt.cost_model.machine import Machine, ProductCosts
from weaveopt.decision import DTYPE_BYTES, Product

# Where a profile has no row for a dtype: the row that stands in, and how many times slower that dtype runs.
_STAND_INS: dict[str, tuple[str, float]] = {"float16": ("bfloat16", 1.0), "float64": ("float32", 2.0)}


def num_waves(num_tiles: int, num_units: int) -> int:
    """`ceil(num_tiles / num_units)`: 300 CTAs on 132 SMs take 3 waves (TokenWeave §3)."""
    return -(-num_tiles // num_units)


def _costs(machine: Machine, dtype: str) -> tuple[ProductCosts, float]:
    by_dtype = {costs.dtype: costs for costs in machine.products}
    if dtype in by_dtype:
        return by_dtype[dtype], 1.0
    stand_in, slowdown = _STAND_INS.get(dtype, ("float32", 1.0))
    return by_dtype[stand_in], slowdown


def _compute_us(costs: ProductCosts, product: Product) -> float:
    if not costs.tiles:
        flops = 2.0 * product.m * product.k * product.n
        return flops / interpolate_rate(costs.rates, product.m) * 1e6
    times = []
    for tile in costs.tiles:
        tiles = num_waves(product.m, tile.m) * num_waves(product.n, tile.n)
        wave_us = 2.0 * tile.m * tile.n * product.k * costs.units / tile.flops_per_s * 1e6
        times.append(num_waves(tiles, costs.units) * wave_us)
    # A library tries its tile shapes and keeps the fastest.
    return min(times)


def product_us(machine: Machine, product: Product | None, dtype: str) -> float:
    """`a[m, k] @ b[k, n]` on one rank, in microseconds; 0 without a product or with an empty one.

    The larger of the arithmetic (waves of the best tile shape, or a measured rate) and of reading both
    operands and writing the result once, plus the launch.
    """
    if product is None or min(product.m, product.k, product.n) == 0:
        return 0.0
    costs, slowdown = _costs(machine, dtype)
    elements = product.m * product.k + product.k * product.n + product.m * product.n
    traffic_us = elements * DTYPE_BYTES[dtype] / costs.bytes_per_s * 1e6
    return costs.launch_us + max(_compute_us(costs, product) * slowdown, traffic_us)


def memory_us(machine: Machine, num_bytes: float) -> float:
    """A kernel that reads and writes `num_bytes` in all, its launch included; 0 for no bytes.

    The measured curve where the profile has one, else `max(floor_us, num_bytes / bytes_per_s)`.
    """
    if num_bytes <= 0:
        return 0.0
    memory = machine.memory
    if memory.points:
        return interpolate_us(memory.points, num_bytes)
    return max(memory.floor_us, num_bytes / memory.bytes_per_s * 1e6)


def traffic_us(machine: Machine, num_bytes: float) -> float:
    """`num_bytes` more read or written inside a kernel that runs anyway: no launch, no floor."""
    return num_bytes / machine.memory.bytes_per_s * 1e6
