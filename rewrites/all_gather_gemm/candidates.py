"""The ways to lower an all-gather and its GEMMs, with their estimates, and what speaks against each.

On `shm` there is one. On GPUs there are two: `copies`, behind which the library's GEMMs run, and `pushed`, GEMMs that
begin before all rows are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weaveopt.cost_model import Gemm, Machine, gemm_us, host_us, measured_parts_us, memory_us
from weaveopt.fabrics.reaching import not_measured, reaching
from weaveopt.fabrics.topology import Topology
from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.all_gather_gemm.cut import PUSHED
from weaveopt.ops.all_gather_gemm.op import SITES
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term
from weaveopt.records.site import DTYPE_BYTES, TokenCounts
from weaveopt.rewrites.all_gather_gemm.pushed import price, size_refused
from weaveopt.sites.gather import GatherFacts

RULE = "all_gather_gemm"
COPIES = "copies"
"""The other variant on GPUs; see `weaveopt.ops.all_gather_gemm.cut`."""
EXCHANGE = "all_gather"
"""Operation of the profile's curves."""


@dataclass(frozen=True)
class Work:
    """What the operation computes on every rank, at the hint."""

    facts: GatherFacts
    gemms: tuple[Gemm, ...]
    tokens: TokenCounts

    @property
    def message_bytes(self) -> int:
        """Of the gathered rows."""
        return self.tokens.hint * self.facts.k * DTYPE_BYTES[self.facts.dtype]


@dataclass(frozen=True)
class Lowered:
    """What the rule remembers of a candidate."""

    fabric: Fabric
    max_tokens: int
    cut: str = ""
    """Of `pushed`."""


def candidates(
    facts: GatherFacts,
    widths: Sequence[int],
    tokens: TokenCounts,
    topology: Topology,
    machine: Machine,
    usable_only: bool,
    pushed_refused: tuple[Rejection, ...] = (),
) -> Iterator[tuple[Candidate, Lowered]]:
    """`widths`: columns of every GEMM. `pushed_refused`: why the kernel of `pushed` does not make the site at all."""
    work = Work(facts, tuple(Gemm(tokens.hint, facts.k, width) for width in widths), tokens)
    for fabric, unreachable in reaching(topology, machine, SITES):
        if unreachable:
            found = [_behind(work, machine, fabric, "", unreachable)]
        elif fabric is Fabric.PEER:
            limits = _world_refused(facts)
            found = [
                _behind(work, machine, fabric, COPIES, limits),
                _beside(work, machine, fabric, (*limits, *pushed_refused)),
            ]
        else:
            found = [_behind(work, machine, fabric, "", ())]
        for candidate, lowered in found:
            if candidate.allowed or not usable_only:
                yield candidate, lowered


def _world_refused(facts: GatherFacts) -> tuple[Rejection, ...]:
    most = TRAITS[Fabric.PEER].max_world
    if most is None or facts.world <= most:
        return ()
    return (Rejection("world_not_supported", f"the kernels join at most {most} ranks", (("world", facts.world),)),)


def _behind(
    work: Work, machine: Machine, fabric: Fabric, variant: str, reasons: tuple[Rejection, ...]
) -> tuple[Candidate, Lowered]:
    """The library's GEMMs behind all rows."""
    facts, tokens = work.facts, work.tokens
    parts = measured_parts_us(machine, fabric, EXCHANGE, work.message_bytes, facts.world)
    if parts is None and not reasons:
        reasons = (not_measured(machine, fabric, EXCHANGE),)
    estimate = None if parts is None else _estimate(machine, facts, work.gemms, parts)
    if estimate is not None and fabric is Fabric.PEER and facts.gathered_is_read:
        # On CPU ranks the rows are gathered where they are handed out.
        copied = Estimate((Term("rows", memory_us(machine, 2 * work.message_bytes)),), machine.relative_error)
        estimate = estimate.plus(copied)
    parameters = (
        ("gemms", len(work.gemms)),
        ("hands_out_rows", facts.gathered_is_read),
        ("max_tokens", tokens.most),
    )
    return Candidate(RULE, fabric, variant, parameters, estimate, reasons), Lowered(fabric, tokens.most)


def _beside(work: Work, machine: Machine, fabric: Fabric, refused: tuple[Rejection, ...]) -> tuple[Candidate, Lowered]:
    """GEMMs that begin before all rows are here."""
    facts, tokens = work.facts, work.tokens
    if not work.gemms:
        return Candidate(RULE, fabric, PUSHED, rejections=refused), Lowered(fabric, tokens.most)
    reasons = (*refused, *size_refused(work.gemms, facts.dtype, tokens))
    found = price(machine, fabric, work.gemms, facts.dtype, facts.world, facts.gathered_is_read)
    if isinstance(found, Rejection) or reasons:
        more = (found,) if isinstance(found, Rejection) else ()
        return Candidate(RULE, fabric, PUSHED, rejections=(*reasons, *more)), Lowered(fabric, tokens.most)
    cut, estimate = found
    parameters = (
        ("tile_columns", cut.tile_columns),
        ("group_pairs", cut.group_pairs),
        ("spare_ctas", cut.spare_ctas),
        ("num_pieces", cut.num_pieces),
        ("hands_out_rows", facts.gathered_is_read),
        ("max_tokens", tokens.most),
    )
    return Candidate(RULE, fabric, PUSHED, parameters, estimate), Lowered(fabric, tokens.most, str(cut))


def _estimate(machine: Machine, facts: GatherFacts, gemms: tuple[Gemm, ...], parts: tuple[float, float]) -> Estimate:
    """`gemm` (as without a rewrite), `synchronize`, `gather`, `host`.

    The GEMMs are the same with and without a rewrite, so their error cancels in a saving and is left out.
    """
    slowdown = machine.oversubscription(facts.world, facts.hosts)
    gemms_us = sum(gemm_us(machine, gemm, facts.dtype) for gemm in gemms) * slowdown
    latency_us, rest_us = parts
    uncertain = (
        Term("synchronize", latency_us),
        Term("gather", rest_us),
        Term("host", host_us(machine) * slowdown),
    )
    estimate = Estimate(uncertain, machine.relative_error).plus(Estimate((Term("gemm", gemms_us),)))
    return replace(estimate, terms=tuple(sorted(estimate.terms, key=lambda term: term.name != "gemm")))
