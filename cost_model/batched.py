"""Time of many products in one kernel: a batch of equal ones, or one for each expert that tokens chose."""

from __future__ import annotations

from math import ceil

from weaveopt.cost_model.kernels import memory_us
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.products import product_us
from weaveopt.records.site import DTYPE_BYTES, Product


def batched_product_us(machine: Machine, batch: int, product: Product, dtype: str) -> float:
    """`a[batch, m, k] @ b[batch, k, n]` on one rank, in microseconds.

    Taken as one product with a result `batch` times as wide, which keeps rows and waves; never less than reading all
    of `a`, which that leaves out, and `b`, and writing the result.
    """
    if batch <= 1:
        return product_us(machine, product, dtype) if batch == 1 else 0.0
    m, k, n = product.m, product.k, product.n
    moved = batch * (m * k + k * n + m * n) * DTYPE_BYTES[dtype]
    return max(product_us(machine, Product(m, k, n * batch), dtype), memory_us(machine, moved))


def num_active_experts(experts: int, rows: int) -> int:
    """Experts that `rows` rows meet, spread evenly at random: `experts · (1 - (1 - 1 / experts) ** rows)`, rounded."""
    return max(1, min(experts, rows, round(experts * (1.0 - (1.0 - 1.0 / experts) ** rows))))


def grouped_product_us(machine: Machine, experts: int, product: Product, dtype: str) -> float:
    """`product.m` rows in all, each times the `[k, n]` weights of its expert, on one rank, in microseconds.

    Only the weights of experts that get rows are read. Taken as one product of the same work (`same_work`), times
    what the machine's grouped kernel takes more.
    """
    if product.m <= 0 or experts <= 0:
        return 0.0
    grouped = 1.0 if machine.compiled is None else machine.compiled.grouped
    return product_us(machine, same_work(num_active_experts(experts, product.m), product), dtype) * grouped


def same_work(active: int, product: Product) -> Product:
    """One product with the rows of one of `active` experts, and the results of all side by side."""
    return Product(ceil(product.m / active), product.k, product.n * active)
