"""Candidates of GEMMs and their reduce-scatter, with their estimates and rejections.

On `shm` there is one. On GPUs there are two: `partials`, whose results are summed after the library's GEMMs, and
`tiles`, one kernel that sends what it computes while it goes on. Where a residual and a norm of this rank's rows follow
there is a third, `tiles norm`: the same kernel, with both of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from weaveopt.cost_model import Gemm, Machine, host_us, memory_us
from weaveopt.cost_model.kernels import traffic_us
from weaveopt.cost_model.tile_config import TILES, TILES_NORM, TileConfig, TileKernelNames
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.gemm_comm.prices import Found, GemmCommPlan, PricedOperation, on_fabrics, with_gemms
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER, REDUCE_SCATTER_NORM
from weaveopt.ops.gemm_comm.reduce_scatter.op import SITES
from weaveopt.ops.gemm_comm.reduce_scatter.tiles import price, size_refused
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term, Values
from weaveopt.records.site import DTYPE_BYTES, TokenCounts

PARTIALS = "partials"
"""The other variant on GPUs; see `weaveopt.cost_model.tile_config`."""
EXCHANGE = "reduce_scatter"
"""Operation of the profile's curves."""


@dataclass(frozen=True)
class GemmReduceScatterWork:
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


def candidates(
    rule: str,
    work: GemmReduceScatterWork,
    tokens: TokenCounts,
    topology: Topology,
    machine: Machine,
    usable_only: bool,
    tiles_refused: tuple[Rejection, ...] = (),
    norm_refused: tuple[Rejection, ...] | None = None,
) -> Iterator[tuple[Candidate, GemmCommPlan]]:
    """Candidates of `rule`. `tiles_refused`: rejections of the kernel of tiles at the site, whatever the sizes;
    `norm_refused`: its rejections with the addition and the norm that follow, None if the rule leaves those alone."""
    parameters = (("gemms", len(work.gemms)),)
    priced = PricedOperation(
        rule, work, tokens, machine, EXCHANGE, partial(_estimate, machine, work), parameters, False
    )

    def on_gpus(limits: tuple[Rejection, ...]) -> list[Found]:
        found = [
            priced.in_turn(Fabric.PEER, PARTIALS, limits),
            _tiled(priced, work, (*limits, *tiles_refused), REDUCE_SCATTER, TILES),
        ]
        if norm_refused is not None:
            found.append(_tiled(priced, work, (*limits, *norm_refused), REDUCE_SCATTER_NORM, TILES_NORM))
        return found

    return on_fabrics(priced, SITES, topology, usable_only, on_gpus)


def _tiled(
    priced: PricedOperation,
    work: GemmReduceScatterWork,
    refused: tuple[Rejection, ...],
    kernels: TileKernelNames,
    variant: str,
) -> Found:
    """One kernel that sends its tiles; `kernels`: of the curves with its times."""
    gemm, fabric = work.gemms[0], Fabric.PEER

    def parameters_of(cut: TileConfig) -> Values:
        return (
            ("tile_columns", cut.tile_columns),
            ("group_pairs", cut.group_pairs),
            ("finisher_ctas", cut.reducer_ctas),
        )

    reasons = tuple(dict.fromkeys((*refused, *size_refused(gemm, work.dtype, work.world, priced.tokens))))
    found = price(priced.machine, fabric, gemm, work.dtype, work.world, kernels)
    return priced.overlapped(fabric, variant, reasons, found, parameters_of)


def _estimate(machine: Machine, work: GemmReduceScatterWork, fabric: Fabric, parts: tuple[float, float]) -> Estimate:
    """`gemm` (as without a rewrite), `add` (GEMMs and addends summed into one partial result, and residuals added to
    its shard), `synchronize`, `reduce`, `host`: the same terms on every fabric."""
    slowdown, message = machine.oversubscription(work.world, work.hosts), work.message_bytes
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
    return with_gemms(machine, work, uncertain)
