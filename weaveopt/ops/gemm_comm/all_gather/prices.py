"""Candidates of an all-gather and its GEMMs, with their estimates and rejections.

On `shm` there is one. On GPUs there are two: `copies`, after which the library's GEMMs run, and `pushed`, GEMMs that
begin before all rows are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from weaveopt.cost_model import Gemm, Machine, host_us, memory_us
from weaveopt.cost_model.tile_config import PUSHED, TileConfig
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.gemm_comm.all_gather.op import SITES
from weaveopt.ops.gemm_comm.all_gather.pushed import price, size_refused
from weaveopt.ops.gemm_comm.prices import Found, GemmCommPlan, PricedOperation, on_fabrics, with_gemms
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term, Values
from weaveopt.records.site import DTYPE_BYTES, TokenCounts

COPIES = "copies"
"""The other variant on GPUs; see `weaveopt.cost_model.tile_config`."""
EXCHANGE = "all_gather"
"""Operation of the profile's curves."""


@dataclass(frozen=True)
class AllGatherGemmWork:
    """Work of the operation on every rank, at the hint."""

    tokens: int
    """Gathered rows."""
    hidden: int
    """Elements of a row."""
    gemms: tuple[Gemm, ...]
    dtype: str
    world: int
    hosts: int
    returns_rows: bool = False

    @property
    def message_bytes(self) -> int:
        """Bytes of the gathered rows."""
        return self.tokens * self.hidden * DTYPE_BYTES[self.dtype]


def candidates(
    rule: str,
    work: AllGatherGemmWork,
    tokens: TokenCounts,
    topology: Topology,
    machine: Machine,
    usable_only: bool,
    pushed_refused: tuple[Rejection, ...] = (),
) -> Iterator[tuple[Candidate, GemmCommPlan]]:
    """Candidates of `rule`. `pushed_refused`: rejections of the kernel `pushed` at the site, whatever the sizes."""
    parameters = (("gemms", len(work.gemms)), ("hands_out_rows", work.returns_rows))
    priced = PricedOperation(rule, work, tokens, machine, EXCHANGE, partial(_estimate, machine, work), parameters, True)

    def on_gpus(limits: tuple[Rejection, ...]) -> list[Found]:
        return [
            priced.in_turn(Fabric.PEER, COPIES, limits),
            _pushed(priced, work, (*limits, *pushed_refused)),
        ]

    return on_fabrics(priced, SITES, topology, usable_only, on_gpus)


def _pushed(priced: PricedOperation, work: AllGatherGemmWork, refused: tuple[Rejection, ...]) -> Found:
    """GEMMs that begin before all rows are here."""
    fabric = Fabric.PEER
    if not work.gemms:
        return priced.refused(fabric, PUSHED, refused)

    def parameters_of(cut: TileConfig) -> Values:
        return (
            ("tile_columns", cut.tile_columns),
            ("group_pairs", cut.group_pairs),
            ("hands_out_rows", work.returns_rows),
        )

    reasons = (*refused, *size_refused(work.gemms, work.dtype, priced.tokens))
    found = price(priced.machine, fabric, work.gemms, work.dtype, work.world, work.returns_rows)
    return priced.overlapped(fabric, PUSHED, reasons, found, parameters_of)


def _estimate(machine: Machine, work: AllGatherGemmWork, fabric: Fabric, parts: tuple[float, float]) -> Estimate:
    """`gemm` (as without a rewrite), `synchronize`, `gather`, `host`, and on GPUs `rows` where they are returned."""
    latency_us, rest_us = parts
    uncertain = (
        Term("synchronize", latency_us),
        Term("gather", rest_us),
        Term("host", host_us(machine) * machine.oversubscription(work.world, work.hosts)),
    )
    estimate = with_gemms(machine, work, uncertain)
    if fabric is not Fabric.PEER or not work.returns_rows:
        return estimate
    # On CPU ranks the rows are gathered into the returned tensor.
    copied = Estimate((Term("rows", memory_us(machine, 2 * work.message_bytes)),))
    return estimate.plus(copied)
