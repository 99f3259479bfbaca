"""The ways to lower an all-gather and its GEMMs: one a fabric, with its estimate, and what speaks against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weaveopt.cost_model import Gemm, Machine, gemm_us, host_us, measured_parts_us
from weaveopt.fabrics.reaching import not_measured, reaching
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.all_gather_gemm.op import SITES
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Term
from weaveopt.records.site import DTYPE_BYTES, TokenCounts
from weaveopt.sites.gather import GatherFacts

RULE = "all_gather_gemm"
EXCHANGE = "all_gather"
"""Operation of the profile's curves."""


@dataclass(frozen=True)
class Lowered:
    """What the rule remembers of a candidate."""

    fabric: Fabric
    max_tokens: int


def candidates(
    facts: GatherFacts,
    widths: Sequence[int],
    tokens: TokenCounts,
    topology: Topology,
    machine: Machine,
    usable_only: bool,
) -> Iterator[tuple[Candidate, Lowered]]:
    """`widths`: columns of every GEMM."""
    message_bytes = tokens.hint * facts.k * DTYPE_BYTES[facts.dtype]
    gemms = tuple(Gemm(tokens.hint, facts.k, width) for width in widths)
    for fabric, unreachable in reaching(topology, machine, SITES):
        parts = measured_parts_us(machine, fabric, EXCHANGE, message_bytes, facts.world)
        unknown = parts is None and not unreachable
        reasons = (not_measured(machine, fabric, EXCHANGE),) if unknown else unreachable
        if reasons and usable_only:
            continue
        estimate = None if parts is None else _estimate(machine, facts, gemms, parts)
        parameters = (("gemms", len(widths)), ("hands_out_rows", facts.gathered_is_read), ("max_tokens", tokens.most))
        yield Candidate(RULE, fabric, "", parameters, estimate, reasons), Lowered(fabric, tokens.most)


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
