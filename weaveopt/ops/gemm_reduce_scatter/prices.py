"""Candidates of GEMMs and their reduce-scatter, with their estimates and rejections.

On `shm` there is one. On GPUs there are two: `partials`, whose results are summed after the library's GEMMs, and
`tiles`, one kernel that sends what it computes while it goes on. Where a residual and a norm of this rank's rows follow
there is a third, `tiles norm`: the same kernel, with both of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weaveopt.cost_model import Gemm, Machine, gemm_us, host_us, measured_parts_us, memory_us
from weaveopt.cost_model.kernels import traffic_us
from weaveopt.cost_model.tile_config import TILES, TILES_NORM, TileKernels
from weaveopt.fabrics.reaching import not_measured, reaching, world_refused
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.gemm_reduce_scatter.call import REDUCE_SCATTER, REDUCE_SCATTER_NORM
from weaveopt.ops.gemm_reduce_scatter.op import SITES
from weaveopt.ops.gemm_reduce_scatter.tiles import price, size_refused
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term
from weaveopt.records.site import DTYPE_BYTES, TokenCounts

PARTIALS = "partials"
"""The other variant on GPUs; see `weaveopt.cost_model.tile_config`."""
EXCHANGE = "reduce_scatter"
"""Operation of the profile's curves."""


@dataclass(frozen=True)
class Work:
    """Work of the operation on every rank, at the hint."""

    gemms: tuple[Gemm, ...]
    dtype: str
    world: int
    hosts: int
    num_addends: int = 0
    """Values of the partial result's size that no GEMM makes."""
    num_residuals: int = 0
    """Values added to the shard by a kernel of its own, if it sums partial results of several collectives."""

    @property
    def message_bytes(self) -> int:
        return self.gemms[0].m * self.gemms[0].n * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Lowered:
    """Plan of a candidate, as a rule keeps it until the rewrite."""

    fabric: Fabric
    max_tokens: int
    cut: str = ""
    """Tile configuration of `tiles`."""


def candidates(
    rule: str,
    work: Work,
    tokens: TokenCounts,
    topology: Topology,
    machine: Machine,
    usable_only: bool,
    tiles_refused: tuple[Rejection, ...] = (),
    norm_refused: tuple[Rejection, ...] | None = None,
) -> Iterator[tuple[Candidate, Lowered]]:
    """Candidates of `rule`. `tiles_refused`: rejections of the kernel of tiles at the site, whatever the sizes;
    `norm_refused`: its rejections with the addition and the norm that follow, None if the rule leaves those alone."""
    for fabric, unreachable in reaching(topology, machine, SITES):
        if unreachable:
            found = [_summed(rule, work, tokens, machine, fabric, "", unreachable)]
        elif fabric is Fabric.PEER:
            limits = world_refused(fabric, work.world)
            found = [
                _summed(rule, work, tokens, machine, fabric, PARTIALS, limits),
                _tiled(rule, work, tokens, machine, fabric, (*limits, *tiles_refused)),
            ]
            if norm_refused is not None:
                reasons = (*limits, *norm_refused)
                found.append(_tiled(rule, work, tokens, machine, fabric, reasons, REDUCE_SCATTER_NORM, TILES_NORM))
        else:
            found = [_summed(rule, work, tokens, machine, fabric, "", ())]
        for candidate, lowered in found:
            if candidate.allowed or not usable_only:
                yield candidate, lowered


def _summed(
    rule: str,
    work: Work,
    tokens: TokenCounts,
    machine: Machine,
    fabric: Fabric,
    variant: str,
    reasons: tuple[Rejection, ...],
) -> tuple[Candidate, Lowered]:
    """Candidate with the library's GEMMs, whose results are summed afterwards."""
    parts = measured_parts_us(machine, fabric, EXCHANGE, work.message_bytes, work.world)
    if parts is None and not reasons:
        reasons = (not_measured(machine, fabric, EXCHANGE),)
    estimate = None if parts is None else _estimate(machine, work, parts)
    parameters = (("gemms", len(work.gemms)), ("max_tokens", tokens.most))
    return Candidate(rule, fabric, variant, parameters, estimate, reasons), Lowered(fabric, tokens.most)


def _tiled(
    rule: str,
    work: Work,
    tokens: TokenCounts,
    machine: Machine,
    fabric: Fabric,
    refused: tuple[Rejection, ...],
    kernels: TileKernels = REDUCE_SCATTER,
    variant: str = TILES,
) -> tuple[Candidate, Lowered]:
    """One kernel that sends its tiles; `kernels`: of the curves with its times."""
    gemm = work.gemms[0]
    reasons = tuple(dict.fromkeys((*refused, *size_refused(gemm, work.dtype, work.world, tokens))))
    found = price(machine, fabric, gemm, work.dtype, work.world, kernels)
    if isinstance(found, Rejection) or reasons:
        more = (found,) if isinstance(found, Rejection) else ()
        return Candidate(rule, fabric, variant, rejections=(*reasons, *more)), Lowered(fabric, tokens.most)
    cut, estimate = found
    parameters = (
        ("tile_columns", cut.tile_columns),
        ("group_pairs", cut.group_pairs),
        ("finisher_ctas", cut.finisher_ctas),
        ("max_tokens", tokens.most),
    )
    return Candidate(rule, fabric, variant, parameters, estimate), Lowered(fabric, tokens.most, str(cut))


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
