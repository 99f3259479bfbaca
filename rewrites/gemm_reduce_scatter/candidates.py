"""The ways to lower GEMMs and their reduce-scatter: one a fabric, with its estimate, and what speaks against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weaveopt.cost_model import Gemm, Machine, gemm_us, host_us, measured_parts_us, memory_us
from weaveopt.cost_model.kernels import traffic_us
from weaveopt.fabrics.reaching import not_measured, reaching
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.gemm_reduce_scatter.op import SITES
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Term
from weaveopt.records.site import DTYPE_BYTES, TokenCounts
from weaveopt.sites.scatter import ScatterFacts

RULE = "gemm_reduce_scatter"
EXCHANGE = "reduce_scatter"
"""Operation of the profile's curves."""


@dataclass(frozen=True)
class Work:
    """What the operation computes on every rank, at the hint."""

    gemms: tuple[Gemm, ...]
    dtype: str
    world: int
    hosts: int
    num_addends: int = 0
    """Values of the partial result's size that no GEMM makes."""
    num_residuals: int = 0
    """What is added to the shard by a kernel of its own, where partial results of several collectives are one."""

    @property
    def message_bytes(self) -> int:
        return self.gemms[0].m * self.gemms[0].n * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Lowered:
    """What the rule remembers of a candidate."""

    fabric: Fabric
    max_tokens: int


def work_of(facts: ScatterFacts, depths: Sequence[int], tokens: TokenCounts, addends: int, residuals: int) -> Work:
    """`depths`: k of every GEMM."""
    gemms = tuple(Gemm(tokens.hint, depth, facts.n) for depth in depths)
    return Work(gemms, facts.dtype, facts.world, facts.hosts, addends, residuals)


def candidates(
    work: Work, tokens: TokenCounts, topology: Topology, machine: Machine, usable_only: bool
) -> Iterator[tuple[Candidate, Lowered]]:
    for fabric, unreachable in reaching(topology, machine, SITES):
        parts = measured_parts_us(machine, fabric, EXCHANGE, work.message_bytes, work.world)
        unknown = parts is None and not unreachable
        reasons = (not_measured(machine, fabric, EXCHANGE),) if unknown else unreachable
        if reasons and usable_only:
            continue
        estimate = None if parts is None else _estimate(machine, work, parts)
        parameters = (("gemms", len(work.gemms)), ("max_tokens", tokens.most))
        yield Candidate(RULE, fabric, "", parameters, estimate, reasons), Lowered(fabric, tokens.most)


def _estimate(machine: Machine, work: Work, parts: tuple[float, float]) -> Estimate:
    """`gemm` (as without a rewrite), `add` (GEMMs and addends summed into one partial result, and residuals added to
    its shard), `synchronize`, `reduce`, `host`.

    The GEMMs are the same with and without a rewrite, so their error cancels in a saving and is left out.
    """
    slowdown, message = machine.oversubscription(work.world, work.hosts), work.message_bytes
    gemms_us = sum(gemm_us(machine, gemm, work.dtype) for gemm in work.gemms) * slowdown
    added_us = traffic_us(machine, 2 * message * (len(work.gemms) - 1)) + memory_us(machine, 3 * message) * (
        work.num_addends
    )
    if work.num_residuals:
        added_us += memory_us(machine, (2 + work.num_residuals) * message / work.world) + host_us(machine)
    latency_us, rest_us = parts
    uncertain = (
        Term("add", added_us * slowdown),
        Term("synchronize", latency_us),
        Term("reduce", rest_us),
        Term("host", host_us(machine) * slowdown),
    )
    estimate = Estimate(uncertain, machine.relative_error).plus(Estimate((Term("gemm", gemms_us),)))
    return replace(estimate, terms=tuple(sorted(estimate.terms, key=lambda term: term.name != "gemm")))
