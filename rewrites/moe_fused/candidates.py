"""The ways to compute the experts of a mixture, each with what it takes, or what speaks against it.

by_expert     CPU ranks: tokens sorted by expert, the library's GEMMs over the rows of each
kernels       GPUs: routing, two grouped GEMMs that gather and scatter rows themselves, and a sum in the choices' order
"""

from __future__ import annotations

from collections.abc import Iterator

from weaveopt.cost_model import host_us
from weaveopt.cost_model.mixture import Mixture, cpu_parts, kernels_us
from weaveopt.inductor.calls import GEMM, MEMORY
from weaveopt.inductor.kernels import Surroundings
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term
from weaveopt.records.site import TokenCounts
from weaveopt.sites.mixture import MixtureFacts

RULE = "moe_fused"
BY_EXPERT, KERNELS = "by_expert", "kernels"
HALVES = ("bfloat16", "float16")


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
    facts: MixtureFacts, tokens: TokenCounts, surroundings: Surroundings, has_triton: bool, usable_only: bool
) -> Iterator[Candidate]:
    machine, mixture = surroundings.machine, mixture_of(facts, tokens)
    parameters = (("active_experts", mixture.active), ("rows", mixture.rows))
    if machine.device == "cpu":
        parts = cpu_parts(machine, mixture)
        shared, waited = surroundings.oversubscription, host_us(machine) * surroundings.oversubscription
        terms = (Term(GEMM, parts.gemm_us * shared), Term(MEMORY, parts.memory_us * shared + waited))
        yield Candidate(RULE, Fabric.LIBRARY, BY_EXPERT, parameters, Estimate(terms, machine.relative_error))
        return
    reasons = tuple(_against(facts, has_triton))
    us = None if reasons else kernels_us(machine, mixture)
    if not reasons and us is None:
        message = "the profile holds no time of these kernels: measure it with `weaveopt calibrate`"
        reasons = (Rejection("not_measured", message, (("profile", machine.name), ("dtype", facts.dtype))),)
    if reasons:
        if not usable_only:
            yield Candidate(RULE, Fabric.LIBRARY, KERNELS, parameters, rejections=reasons)
        return
    assert us is not None
    estimate = Estimate((Term(RULE, us + host_us(machine)),), machine.relative_error)
    yield Candidate(RULE, Fabric.LIBRARY, KERNELS, parameters, estimate)


def _against(facts: MixtureFacts, has_triton: bool) -> Iterator[Rejection]:
    if facts.dtype not in HALVES:
        yield Rejection("dtype_not_supported", "the kernels take bfloat16 and float16", (("dtype", facts.dtype),))
    if not has_triton:
        yield Rejection("triton_missing", "Triton, which compiles the kernels, is not installed")
