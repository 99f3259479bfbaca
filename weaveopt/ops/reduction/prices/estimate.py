"""Predicted time of a site: left as it is, and rewritten as one fused all-reduce + add + norm."""

from __future__ import annotations

from weaveopt.cost_model.collectives import (
    LIBRARY,
    all_reduce_steps,
    all_reduce_us,
    fabric_costs,
    library_algorithm,
)
from weaveopt.cost_model.gemm import Gemm, gemm_us
from weaveopt.cost_model.kernels import memory_us, norm_us, traffic_us
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.uncertainty import estimated
from weaveopt.ops.reduction.prices.kernels import (
    READS_ANYWHERE,
    exchange_terms,
    variant_for,
)
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm, Transfer
from weaveopt.records.candidate import Estimate, Fabric, Term


def _estimate(gemm_us: float, terms: list[Term]) -> Estimate:
    return Estimate(tuple(term for term in (Term("gemm", gemm_us), *terms) if term.us != 0.0))


def _gemm_us(machine: Machine, workload: Workload) -> float:
    made_by = workload.gemm
    gemm = None if made_by is None else Gemm(made_by.m, made_by.k, made_by.n)
    return gemm_us(machine, gemm, workload.dtype) * machine.oversubscription(workload.world, workload.hosts)


def estimate_unfused(machine: Machine, workload: Workload) -> Estimate:
    """`norm(all_reduce(a @ b) + residual)` as torch and Inductor run it: library all-reduce, then fused kernels.

    Terms: `gemm`, `all_reduce` (once per partial result), `add_norm` (one kernel that reads the reduced
    partials and the residual and writes the sum, if used, and the normalized rows), and `norm` where a second
    norm needs a kernel of its own. Without any norm `add` in place of `add_norm`, where there is a residual.
    """
    message = workload.message_bytes
    slowdown = machine.oversubscription(workload.world, workload.hosts)
    reduce_us = all_reduce_us(machine, Fabric.LIBRARY, LIBRARY, message, workload.world, workload.hosts)
    reads = workload.num_partials + workload.has_residual
    algorithm = library_algorithm(machine, "all_reduce", message, workload.world, workload.hosts)
    terms = [Term(f"all_reduce {algorithm}".rstrip(), workload.num_partials * reduce_us)]
    if workload.num_norms == 0:
        if reads > 1:
            terms.append(Term("add", memory_us(machine, (reads + 1) * message) * slowdown))
    elif workload.num_norms > 1:
        terms.append(Term("add_norm", norm_us(machine, (reads + 1) * message, workload.hidden) * slowdown))
        terms.append(Term("norm", norm_us(machine, 2 * message, workload.hidden) * slowdown))
    else:
        writes = 1 + workload.sum_is_used
        terms.append(Term("add_norm", norm_us(machine, (reads + writes) * message, workload.hidden) * slowdown))
    return _estimate(_gemm_us(machine, workload), terms)


def gather_us(machine: Machine, workload: Workload, fabric: Fabric) -> float:
    """Time of a two-shot exchange for gathering rows of the sum in addition to normalized ones, if the sum is read."""
    if not (workload.has_norm and workload.sum_is_used) or workload.world <= 1:
        return 0.0
    half = all_reduce_steps(fabric, Algorithm.TWO_SHOT, workload.world).traffic / 2
    us = fabric_costs(machine, fabric).link.us(half * workload.message_bytes)
    total_us = us * machine.oversubscription(workload.world, workload.hosts)
    return estimated(machine, total_us, ("gather", fabric, workload.message_bytes, workload.world))


def estimate_fused(
    machine: Machine,
    workload: Workload,
    fabric: Fabric,
    algorithm: Algorithm,
    sum_sharded: bool = True,
    transfer: Transfer | None = None,
    num_ctas: int | None = None,
) -> Estimate:
    """The same computation as one fused operation on `fabric` (TokenWeave §4.3 for two-shot).

    Without `transfer`, the algorithm's fastest; without `num_ctas`, the fastest number of those measured. Terms:
    `gemm`; `add` (partial results summed before the one reduction); `copy` (into the arena, if the transfer needs it
    there and no GEMM writes there); `synchronize`, `reduce`, `norm`, `distribute`; `gather`, if the sum is used in
    addition to normalized rows and `sum_sharded` is False: then two-shot also gathers the rows of the sum.
    """
    message, world = workload.message_bytes, workload.world
    if fabric is Fabric.LIBRARY or algorithm is Algorithm.LIBRARY:
        return estimate_unfused(machine, workload)
    slowdown = machine.oversubscription(world, workload.hosts)
    variant = variant_for(machine, workload, fabric, algorithm, transfer, num_ctas)
    terms = []
    extra = workload.num_partials - 1
    # On `peer` the GEMM is the graph's own and makes an ordinary tensor.
    if workload.gemm is None or fabric in (Fabric.PEER, Fabric.HOST):
        terms.append(Term("add", memory_us(machine, 3 * extra * message) * slowdown))
        if variant.transfer not in READS_ANYWHERE:
            terms.append(Term("copy", memory_us(machine, 2 * message) * slowdown))
    else:
        terms.append(Term("add", traffic_us(machine, extra * message) * slowdown))
    terms += exchange_terms(machine, workload, fabric, variant)
    if algorithm is Algorithm.TWO_SHOT and not sum_sharded:
        terms.append(Term("gather", gather_us(machine, workload, fabric)))
    return _estimate(_gemm_us(machine, workload), terms)
