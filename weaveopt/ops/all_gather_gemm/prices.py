"""Candidates of an all-gather and its GEMMs, with their estimates and rejections.

On `shm` there is one. On GPUs there are two: `copies`, after which the library's GEMMs run, and `pushed`, GEMMs that
begin before all rows are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weaveopt.cost_model import Gemm, Machine, gemm_us, host_us, measured_parts_us, memory_us
from weaveopt.cost_model.tile_config import PUSHED
from weaveopt.fabrics.reaching import not_measured, reaching, world_refused
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.all_gather_gemm.op import SITES
from weaveopt.ops.all_gather_gemm.pushed import price, size_refused
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term
from weaveopt.records.site import DTYPE_BYTES, TokenCounts

COPIES = "copies"
"""The other variant on GPUs; see `weaveopt.cost_model.tile_config`."""
EXCHANGE = "all_gather"
"""Operation of the profile's curves."""


@dataclass(frozen=True)
class Work:
    """Work of the operation on every rank, at the hint."""

    tokens: int
    """Gathered rows."""
    hidden: int
    """Elements of a row."""
    gemms: tuple[Gemm, ...]
    dtype: str
    world: int
    hosts: int
    hands_out_rows: bool = False

    @property
    def message_bytes(self) -> int:
        """Bytes of the gathered rows."""
        return self.tokens * self.hidden * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Lowered:
    """Plan of a candidate, as a rule keeps it until the rewrite."""

    fabric: Fabric
    max_tokens: int
    cut: str = ""
    """Tile configuration of `pushed`."""


def candidates(
    rule: str,
    work: Work,
    tokens: TokenCounts,
    topology: Topology,
    machine: Machine,
    usable_only: bool,
    pushed_refused: tuple[Rejection, ...] = (),
) -> Iterator[tuple[Candidate, Lowered]]:
    """Candidates of `rule`. `pushed_refused`: rejections of the kernel `pushed` at the site, whatever the sizes."""
    for fabric, unreachable in reaching(topology, machine, SITES):
        if unreachable:
            found = [_behind(rule, work, tokens, machine, fabric, "", unreachable)]
        elif fabric is Fabric.PEER:
            limits = world_refused(fabric, work.world)
            found = [
                _behind(rule, work, tokens, machine, fabric, COPIES, limits),
                _beside(rule, work, tokens, machine, fabric, (*limits, *pushed_refused)),
            ]
        else:
            found = [_behind(rule, work, tokens, machine, fabric, "", ())]
        for candidate, lowered in found:
            if candidate.allowed or not usable_only:
                yield candidate, lowered


def _behind(
    rule: str,
    work: Work,
    tokens: TokenCounts,
    machine: Machine,
    fabric: Fabric,
    variant: str,
    reasons: tuple[Rejection, ...],
) -> tuple[Candidate, Lowered]:
    """Candidate whose GEMMs are the library's, after all rows have arrived."""
    parts = measured_parts_us(machine, fabric, EXCHANGE, work.message_bytes, work.world)
    if parts is None and not reasons:
        reasons = (not_measured(machine, fabric, EXCHANGE),)
    estimate = None if parts is None else _estimate(machine, work, parts)
    if estimate is not None and fabric is Fabric.PEER and work.hands_out_rows:
        # On CPU ranks the rows are gathered where they are handed out.
        copied = Estimate((Term("rows", memory_us(machine, 2 * work.message_bytes)),), machine.relative_error)
        estimate = estimate.plus(copied)
    parameters = (
        ("gemms", len(work.gemms)),
        ("hands_out_rows", work.hands_out_rows),
        ("max_tokens", tokens.most),
    )
    return Candidate(rule, fabric, variant, parameters, estimate, reasons), Lowered(fabric, tokens.most)


def _beside(
    rule: str, work: Work, tokens: TokenCounts, machine: Machine, fabric: Fabric, refused: tuple[Rejection, ...]
) -> tuple[Candidate, Lowered]:
    """GEMMs that begin before all rows are here."""
    if not work.gemms:
        return Candidate(rule, fabric, PUSHED, rejections=refused), Lowered(fabric, tokens.most)
    reasons = (*refused, *size_refused(work.gemms, work.dtype, tokens))
    found = price(machine, fabric, work.gemms, work.dtype, work.world, work.hands_out_rows)
    if isinstance(found, Rejection) or reasons:
        more = (found,) if isinstance(found, Rejection) else ()
        return Candidate(rule, fabric, PUSHED, rejections=(*reasons, *more)), Lowered(fabric, tokens.most)
    cut, estimate = found
    parameters = (
        ("tile_columns", cut.tile_columns),
        ("group_pairs", cut.group_pairs),
        ("hands_out_rows", work.hands_out_rows),
        ("max_tokens", tokens.most),
    )
    return Candidate(rule, fabric, PUSHED, parameters, estimate), Lowered(fabric, tokens.most, str(cut))


def _estimate(machine: Machine, work: Work, parts: tuple[float, float]) -> Estimate:
    """`gemm` (as without a rewrite), `synchronize`, `gather`, `host`.

    The GEMMs are the same with and without a rewrite, so their error cancels in a saving and is left out.
    """
    slowdown = machine.oversubscription(work.world, work.hosts)
    gemms_us = sum(gemm_us(machine, gemm, work.dtype) for gemm in work.gemms) * slowdown
    latency_us, rest_us = parts
    uncertain = (
        Term("synchronize", latency_us),
        Term("gather", rest_us),
        Term("host", host_us(machine) * slowdown),
    )
    estimate = Estimate(uncertain, machine.relative_error).plus(Estimate((Term("gemm", gemms_us),)))
    return replace(estimate, terms=tuple(sorted(estimate.terms, key=lambda term: term.name != "gemm")))
