"""The ways to compute the experts of a mixture, each with what it takes, or what speaks against it.

by_expert     CPU ranks: tokens sorted by expert, the library's GEMMs over the rows of each
kernels       GPUs: routing, two grouped GEMMs that gather and scatter rows themselves, and a sum in the choices' order,
              in Triton
hopper        the same with GEMMs of our own, for compute capability 9.0
one_kernel    the same with both of these GEMMs in one kernel
wide          the same with GEMMs of our own for many rows an expert, which are gathered beforehand

Which of the last four serves a token count is what their measured curves say (`cost_model.mixture`). A graph that sees
several counts holds a table of them; every kernel takes any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from weaveopt.cost_model import Machine, host_us
from weaveopt.cost_model.mixture import (
    WIDE,
    Mixture,
    cpu_parts,
    fastest_kernels,
    few_rows,
    has_few_rows,
    kernels_us,
    rows_by_expert,
)
from weaveopt.cost_model.token_grid import grid_of
from weaveopt.inductor.calls import GEMM, MEMORY
from weaveopt.inductor.kernels import KernelContext
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, TableRow, Term
from weaveopt.records.site import TokenCounts
from weaveopt.records.skew import Skew
from weaveopt.sites.mixture.matcher import MixtureFacts
from weaveopt.solver.boundaries import runs

RULE = "moe_fused"
EXPERTS = "experts"
"""The term of the kernels' time."""
BY_EXPERT, KERNELS, HOPPER, ONE = "by_expert", "kernels", "hopper", "one_kernel"
HALVES = ("bfloat16", "float16")
ROW_MULTIPLE = 8
"""Elements: rows of the Hopper kernels' operands begin at multiples of 16 bytes."""


@dataclass(frozen=True)
class Host:
    """Requirements of the kernels that this process fulfils."""

    has_triton: bool
    lacks_hopper: bool = False
    """GPUs are here, and the Hopper kernels do not run on them."""


CURVES = {KERNELS: "", HOPPER: HOPPER, ONE: ONE, WIDE: WIDE}
"""Names of a candidate's kernels in a profile."""
VARIANTS = {name: variant for variant, name in CURVES.items()}


def mixture_of(facts: MixtureFacts, transposed: bool, tokens: int, skew: Skew) -> Mixture:
    """Mixture that the rank with the busiest experts computes, if choices are spread over all experts by `skew`."""
    ranks = max(facts.experts_in_all // facts.experts, 1) if facts.has_remote_experts else 1
    share, here = skew.of_busiest_rank(facts.experts, ranks) if ranks > 1 else (1.0, skew)
    return Mixture(
        tokens=tokens,
        choices=min(facts.choices_here * share * ranks, float(facts.choices)),
        experts=facts.experts,
        hidden=facts.hidden,
        width=facts.width,
        gated=facts.activation.gated,
        dtype=facts.dtype,
        skew=here,
        transposed=transposed,
    )


def candidates(
    facts: MixtureFacts,
    transposed: bool,
    tokens: TokenCounts,
    surroundings: KernelContext,
    host: Host,
    usable_only: bool,
) -> Iterator[Candidate]:
    """Candidates for the experts of a site. `transposed`: true if a weight is stored as `[experts, in, out]`."""
    machine = surroundings.machine
    mixture = mixture_of(facts, transposed, tokens.hint, machine.skew)
    sizes = (("active_experts", mixture.active), ("rows", mixture.rows))
    parameters = (*sizes, *rows_by_expert(mixture, machine.skew))
    if machine.device == "cpu":
        parts = cpu_parts(machine, mixture)
        shared, waited = surroundings.oversubscription, host_us(machine) * surroundings.oversubscription
        terms = (Term(GEMM, parts.gemm_us * shared), Term(MEMORY, parts.memory_us * shared + waited))
        yield Candidate(RULE, Fabric.LIBRARY, BY_EXPERT, parameters, Estimate(terms))
        return
    against = tuple(_against(facts, host))
    against_hopper = (*against, *_against_hopper(facts, host))
    against_wide = (*against_hopper, *_against_wide(mixture))
    refused = {KERNELS: against, HOPPER: against_hopper, ONE: against_hopper, WIDE: against_wide}
    able = [name for variant, name in CURVES.items() if not refused[variant]]
    fastest = fastest_kernels(machine, mixture, able)
    for variant, reasons in refused.items():
        us = None if reasons else kernels_us(machine, mixture, CURVES[variant])
        if not reasons and us is None:
            reasons = (_no_time(machine, mixture, variant),)
        if us is not None:
            estimate = Estimate((Term(EXPERTS, us + host_us(machine)),))
            several = CURVES[variant] == fastest and not tokens.is_static
            table = _by_tokens(machine, facts, transposed, tokens, tuple(able)) if several else ()
            yield Candidate(RULE, Fabric.LIBRARY, variant, parameters, estimate, table=table)
        elif not usable_only:
            yield Candidate(RULE, Fabric.LIBRARY, variant, parameters, rejections=reasons)


@cache
def _by_tokens(
    machine: Machine, facts: MixtureFacts, transposed: bool, tokens: TokenCounts, kernels: tuple[str, ...]
) -> tuple[TableRow, ...]:
    """Which of `kernels` serves which token counts that the graph may see."""

    def fastest(count: int) -> str | None:
        return fastest_kernels(machine, mixture_of(facts, transposed, count, machine.skew), kernels)

    found = list(runs(fastest, grid_of((tokens.hint,), tokens.most, max(tokens.least, 1))))
    lasts = [first - 1 for first, _ in found[1:]] + [tokens.most]
    return tuple(
        TableRow(last, VARIANTS[name]) for last, (_, name) in zip(lasts, found, strict=True) if name is not None
    )


def _against(facts: MixtureFacts, host: Host) -> Iterator[Rejection]:
    if facts.dtype not in HALVES:
        yield Rejection("dtype_not_supported", "the kernels support bfloat16 and float16", (("dtype", facts.dtype),))
    if not host.has_triton:
        yield Rejection("triton_missing", "Triton, which compiles the kernels, is not installed")


def _against_hopper(facts: MixtureFacts, host: Host) -> Iterator[Rejection]:
    if facts.hidden % ROW_MULTIPLE or facts.width % ROW_MULTIPLE:
        message = f"rows of the Hopper kernels' operands are of a multiple of {ROW_MULTIPLE} elements"
        yield Rejection("rows_not_aligned", message, (("hidden", facts.hidden), ("width", facts.width)))
    if host.lacks_hopper:
        message = "the Hopper kernels are for GPUs of compute capability 9.0, in a build with the CUDA part"
        yield Rejection("hopper_kernels_missing", message)


def _against_wide(mixture: Mixture) -> Iterator[Rejection]:
    if mixture.transposed:
        yield Rejection("weight_layout", "these kernels support weights stored as [experts, out, in]")


def _no_time(machine: Machine, mixture: Mixture, variant: str) -> Rejection:
    if has_few_rows(mixture, CURVES[variant]):
        return few_rows(mixture, CURVES[variant])
    message = "the profile holds no time of these kernels: measure it with `weaveopt calibrate`"
    return Rejection("not_measured", message, (("profile", machine.name), ("dtype", mixture.dtype)))
