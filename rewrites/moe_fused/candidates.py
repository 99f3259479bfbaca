"""The ways to compute the experts of a mixture, each with what it takes, or what speaks against it.

by_expert     CPU ranks: tokens sorted by expert, the library's GEMMs over the rows of each
kernels       GPUs: routing, two grouped GEMMs that gather and scatter rows themselves, and a sum in the choices' order,
              in Triton
hopper        the same with GEMMs of our own, for compute capability 9.0; with few rows an expert it is `kernels`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weaveopt.cost_model import host_us
from weaveopt.cost_model.mixture import Mixture, cpu_parts, kernels_us
from weaveopt.inductor.calls import GEMM, MEMORY
from weaveopt.inductor.kernels import Surroundings
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term
from weaveopt.records.site import TokenCounts
from weaveopt.sites.mixture import MixtureFacts

RULE = "moe_fused"
BY_EXPERT, KERNELS, HOPPER = "by_expert", "kernels", "hopper"
HALVES = ("bfloat16", "float16")
ROW_MULTIPLE = 8
"""Elements: rows of the Hopper kernels' operands begin at multiples of 16 bytes."""


@dataclass(frozen=True)
class Host:
    """What this process has of what the kernels need."""

    has_triton: bool
    lacks_hopper: bool = False
    """GPUs are here, and the Hopper kernels do not run on them."""


CURVES = {KERNELS: "", HOPPER: HOPPER}
"""What the kernels of a candidate are called in a profile."""


def mixture_of(facts: MixtureFacts, tokens: TokenCounts) -> Mixture:
    """What this rank computes at the hint, its choices spread uniformly over the experts."""
    return Mixture(
        tokens=tokens.hint,
        choices=facts.choices_here,
        experts=facts.experts,
        hidden=facts.hidden,
        width=facts.width,
        gated=facts.activation.gated,
        dtype=facts.dtype,
    )


def candidates(
    facts: MixtureFacts,
    transposed: bool,
    tokens: TokenCounts,
    surroundings: Surroundings,
    host: Host,
    usable_only: bool,
) -> Iterator[Candidate]:
    """`transposed`: whether a weight lies as `[experts, in, out]`."""
    machine, mixture = surroundings.machine, mixture_of(facts, tokens)
    parameters = (("active_experts", mixture.active), ("rows", mixture.rows))
    if machine.device == "cpu":
        parts = cpu_parts(machine, mixture)
        shared, waited = surroundings.oversubscription, host_us(machine) * surroundings.oversubscription
        terms = (Term(GEMM, parts.gemm_us * shared), Term(MEMORY, parts.memory_us * shared + waited))
        yield Candidate(RULE, Fabric.LIBRARY, BY_EXPERT, parameters, Estimate(terms, machine.relative_error))
        return
    against = tuple(_against(facts, host))
    for variant, reasons in ((KERNELS, against), (HOPPER, (*against, *_against_hopper(facts, transposed, host)))):
        us = None if reasons else kernels_us(machine, mixture, CURVES[variant])
        if not reasons and us is None:
            message = "the profile holds no time of these kernels: measure it with `weaveopt calibrate`"
            reasons = (Rejection("not_measured", message, (("profile", machine.name), ("dtype", facts.dtype))),)
        if us is not None:
            estimate = Estimate((Term(RULE, us + host_us(machine)),), machine.relative_error)
            yield Candidate(RULE, Fabric.LIBRARY, variant, parameters, estimate)
        elif not usable_only:
            yield Candidate(RULE, Fabric.LIBRARY, variant, parameters, rejections=reasons)


def _against(facts: MixtureFacts, host: Host) -> Iterator[Rejection]:
    if facts.dtype not in HALVES:
        yield Rejection("dtype_not_supported", "the kernels take bfloat16 and float16", (("dtype", facts.dtype),))
    if not host.has_triton:
        yield Rejection("triton_missing", "Triton, which compiles the kernels, is not installed")


def _against_hopper(facts: MixtureFacts, transposed: bool, host: Host) -> Iterator[Rejection]:
    if transposed:
        yield Rejection("weights_transposed", "the Hopper kernels read weights that are contiguous along their inputs")
    if facts.hidden % ROW_MULTIPLE or facts.width % ROW_MULTIPLE:
        message = f"rows of the Hopper kernels' operands are of a multiple of {ROW_MULTIPLE} elements"
        yield Rejection("rows_not_aligned", message, (("hidden", facts.hidden), ("width", facts.width)))
    if host.lacks_hopper:
        message = "the Hopper kernels are for GPUs of compute capability 9.0, in a build with the CUDA part"
        yield Rejection("hopper_kernels_missing", message)
