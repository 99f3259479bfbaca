"""Predicted time of a site: left as it is, and rewritten as one fused all-reduce + add + norm."""

from __future__ import annotations

from weaveopt.cost_model.collectives import (
    all_reduce_parts_us,
    all_reduce_us,
    curve_us,
    fabric_costs,
    nearest_curve,
    traffic_factor,
)
from weaveopt.cost_model.kernels import memory_us, product_us, traffic_us
from weaveopt.cost_model.machine import Machine
from weaveopt.decision import Algorithm, Estimate, Fabric, Term, Workload

LARGEST_TOKENS = 1 << 20
"""Where the search for a threshold ends."""


def _estimate(machine: Machine, gemm_us: float, terms: list[Term]) -> Estimate:
    """The product is the same with and without a rewrite, so its error cancels in a saving and is left out."""
    uncertain_us = sum(term.us for term in terms)
    total_us = gemm_us + uncertain_us
    kept = tuple(term for term in (Term("gemm", gemm_us), *terms) if term.us != 0.0)
    return Estimate(kept, machine.relative_error * (uncertain_us / total_us) if total_us else 0.0)


def _gemm_us(machine: Machine, workload: Workload) -> float:
    return product_us(machine, workload.product, workload.dtype) * machine.crowding(workload.world, workload.hosts)


def estimate_unfused(machine: Machine, workload: Workload) -> Estimate:
    """`norm(all_reduce(a @ b) + residual)` as torch and Inductor run it: library all-reduce, then fused kernels.

    Terms: `gemm`, `all_reduce` (once per partial result), `add_norm` (one kernel that reads the reduced
    partials and the residual and writes the sum, if used, and the normed rows), and `norm` where a second
    norm needs a kernel of its own.
    """
    message = workload.message_bytes
    crowding = machine.crowding(workload.world, workload.hosts)
    reduce_us = all_reduce_us(machine, Fabric.LIBRARY, Algorithm.LIBRARY, message, workload.world, workload.hosts)
    reads = workload.num_partials + workload.has_residual
    terms = [Term("all_reduce", workload.num_partials * reduce_us)]
    if workload.num_norms > 1:
        terms.append(Term("add_norm", memory_us(machine, (reads + 1) * message) * crowding))
        terms.append(Term("norm", memory_us(machine, 2 * message) * crowding))
    else:
        writes = 1 + workload.sum_is_used
        terms.append(Term("add_norm", memory_us(machine, (reads + writes) * message) * crowding))
    return _estimate(machine, _gemm_us(machine, workload), terms)


def _exchange_terms(machine: Machine, workload: Workload, fabric: Fabric, algorithm: Algorithm) -> list[Term]:
    """The fused kernel itself, shared out among `synchronize`, `reduce`, `norm` and `distribute`.

    Where the fused kernel was measured, only the sharing out is modelled: the terms add up to the measurement.
    """
    message, world = workload.message_bytes, workload.world
    if world <= 1 or message <= 0:
        return []
    costs = fabric_costs(machine, fabric)
    rows = 1.0 if algorithm is Algorithm.ONE_SHOT else 1.0 / world
    # The residual is read and the sum written in the same pass; the normed row's write belongs to the exchange.
    passes = workload.has_residual + workload.sum_is_used + (workload.num_norms - 1)
    norm_us = traffic_us(machine, passes * message * rows) * machine.crowding(world, workload.hosts)
    curve = nearest_curve(costs.all_reduce_norm, algorithm, world) if workload.hosts == 1 else None
    if curve is not None:
        latency_us, rest_us = curve_us(machine, fabric, curve, message, world)
        norm_us = min(norm_us, rest_us / 2)
        moved_us = rest_us - norm_us
    else:
        latency_us, moved_us = all_reduce_parts_us(machine, fabric, algorithm, message, world, workload.hosts)
    terms = [Term("synchronize", latency_us)]
    if algorithm is Algorithm.TWO_SHOT:
        # Reading the peers' shares of this rank's rows and handing the finished rows out move equally much.
        terms += [Term("reduce", moved_us / 2), Term("norm", norm_us), Term("distribute", moved_us / 2)]
    else:
        terms += [Term("reduce", moved_us), Term("norm", norm_us)]
    return terms


def estimate_all_reduce_norm(
    machine: Machine, workload: Workload, fabric: Fabric, algorithm: Algorithm, sum_sharded: bool = True
) -> Estimate:
    """The same computation as one fused operation on `fabric` (TokenWeave §4.3 for the two-shot form).

    Terms: `gemm`; `add` (partial results summed before the one reduction); `copy` (into the arena, if no
    product writes there); `synchronize`, `reduce`, `norm`, `distribute`; `gather`, if the sum is used and
    `sum_sharded` is False: then two-shot also hands out the rows of the sum.
    """
    message, world = workload.message_bytes, workload.world
    if fabric is Fabric.LIBRARY or algorithm is Algorithm.LIBRARY:
        return estimate_unfused(machine, workload)
    crowding = machine.crowding(world, workload.hosts)
    terms = []
    extra = workload.num_partials - 1
    if workload.product is None:
        terms.append(Term("add", memory_us(machine, 3 * extra * message) * crowding))
        terms.append(Term("copy", memory_us(machine, 2 * message) * crowding))
    else:
        terms.append(Term("add", traffic_us(machine, extra * message) * crowding))
    terms += _exchange_terms(machine, workload, fabric, algorithm)
    if algorithm is Algorithm.TWO_SHOT and workload.sum_is_used and not sum_sharded and world > 1:
        link = fabric_costs(machine, fabric).link
        half = traffic_factor(fabric, algorithm, world) / 2
        terms.append(Term("gather", link.us(half * message) * crowding))
    return _estimate(machine, _gemm_us(machine, workload), terms)


def _one_shot_wins(
    machine: Machine, fabric: Fabric, tokens: int, hidden: int, dtype: str, world: int, hosts: int
) -> bool:
    workload = Workload(tokens, tokens, hidden, dtype, world, hosts)
    one_shot = estimate_all_reduce_norm(machine, workload, fabric, Algorithm.ONE_SHOT)
    return one_shot.us <= estimate_all_reduce_norm(machine, workload, fabric, Algorithm.TWO_SHOT).us


def one_shot_max_tokens(machine: Machine, fabric: Fabric, hidden: int, dtype: str, world: int, hosts: int = 1) -> int:
    """The largest token count up to which one-shot is predicted no slower than two-shot (0: never).

    Depends on nothing else, so every site of a chain has the same threshold. At most `LARGEST_TOKENS`.
    """
    if fabric is Fabric.LIBRARY:
        return 0
    if world <= 1:
        return LARGEST_TOKENS

    def wins(tokens: int) -> bool:
        return _one_shot_wins(machine, fabric, tokens, hidden, dtype, world, hosts)

    if not wins(1):
        return 0
    low = 1
    while low < LARGEST_TOKENS and wins(2 * low):
        low *= 2
    high = 2 * low
    if low >= LARGEST_TOKENS:
        return LARGEST_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        if wins(middle):
            low = middle
        else:
            high = middle
    return low
