"""Candidates of the rule at one site: their prices, what speaks against them, and what the report says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch.fx as fx

from weaveopt.cost_model import Machine
from weaveopt.cost_model.exchange import ShardedMixture
from weaveopt.cost_model.mixture import LEAST_ROWS, WIDE, fastest_kernels
from weaveopt.cost_model.prefetch import (
    READS,
    AheadParts,
    ahead_parts,
    copy_contention,
    in_place_parts,
    layer_missing_bytes,
    missing_bytes,
    of_own_tokens,
    read_parts,
)
from weaveopt.fabrics import exported
from weaveopt.fabrics.fabric_eligibility import eligible_fabrics, not_measured
from weaveopt.inductor.calls import window_of
from weaveopt.ops.experts.call import ExpertsKernel
from weaveopt.ops.experts.expert_ranges import MAX_RANGES
from weaveopt.ops.experts.gpu import has_triton
from weaveopt.ops.experts.hopper import lacks_hopper
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall, PrefetchForm
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term, Values
from weaveopt.records.site import TokenCounts
from weaveopt.rule import Context
from weaveopt.sites.mixture.exchange_matcher import ExchangeFacts, is_transposed
from weaveopt.wording import counted

RULE = "expert_prefetch"
COPIES = "copy_engine"
IN_PLACE, AHEAD = PrefetchForm.IN_PLACE.value, "ahead"
"""Forms; the word of the second is of one that this version prices on GPUs and does not run."""
FABRICS = (Fabric.SHM, Fabric.PEER)
_KERNELS = {"": ExpertsKernel.TRITON, "hopper": ExpertsKernel.HOPPER}
"""Kernels of experts by their name in a profile. Those for many rows, `wide`, are for weights that are here."""
_TRAINING = ("forward", "backward")
_HALVES = ("bfloat16", "float16")
_MOST_TOKENS = 1 << 20
"""Largest token count that is asked whether it hides a fetch."""


@dataclass(frozen=True)
class PrefetchPlan:
    """Plan of a candidate, as the rule keeps it until the rewrite."""

    fabric: Fabric
    form: str
    kernels: str = ExpertPrefetchCall.kernels
    few_tokens: int = 0


@dataclass(frozen=True)
class _Priced:
    """One form on one fabric: its plan, its times if the profile has them, and what speaks against it."""

    plan: PrefetchPlan
    terms: tuple[Term, ...] = ()
    parameters: Values = ()
    against: tuple[Rejection, ...] = ()


def candidates(
    facts: ExchangeFacts, node: fx.Node, tokens: TokenCounts, context: Context
) -> Iterator[tuple[Candidate, PrefetchPlan]]:
    """One for each form on each fabric that joins the devices of the group."""
    machine = context.machine
    against = tuple(_against(facts, context))
    for fabric, unreachable in eligible_fabrics(context.topologies[facts.group], machine, FABRICS):
        if fabric not in FABRICS:
            continue
        sharded = facts.sharded(tokens.hint, machine.skew)
        if fabric is Fabric.SHM:
            forms = [_in_shared_memory(machine, sharded)]
        else:
            forms = [_over_link(machine, sharded, facts, node), _ahead(machine, sharded, node, context)]
        for priced in forms:
            plan, estimate = priced.plan, _estimate(machine, facts, priced) if priced.terms else None
            reasons = (*unreachable, *against, *priced.against)
            parameters = (("form", plan.form), *priced.parameters, *_traffic(sharded, plan.form))
            yield Candidate(RULE, fabric, plan.form, parameters, estimate, reasons), plan


def _against(facts: ExchangeFacts, context: Context) -> Iterator[Rejection]:
    if context.phase in _TRAINING:
        message = "gradients of an expert are on the rank that has it, and peers read its weights at any time"
        yield Rejection("training", message, (("phase", context.phase),))
    if facts.world > MAX_RANGES:
        message = f"kernels take experts from at most {counted(MAX_RANGES, 'place')}"
        yield Rejection("too_many_places", message, (("ranks", facts.world),))
    if why := exported.refusal(facts.group):
        yield Rejection("not_shared", "the ranks could not share their experts", (("why", why),))


def _in_shared_memory(machine: Machine, sharded: ShardedMixture) -> _Priced:
    """Nothing is copied before the kernels run, so nothing is exposed at any token count."""
    parts = in_place_parts(machine, sharded)
    terms = (Term("experts", parts.experts), Term("memory", parts.memory), Term("host", parts.host))
    found = (("fetch_us", 0.0), ("exposed_us", 0.0), ("hidden_from_tokens", 1))
    return _Priced(PrefetchPlan(Fabric.SHM, IN_PLACE), terms, found)


def _over_link(machine: Machine, sharded: ShardedMixture, facts: ExchangeFacts, node: fx.Node) -> _Priced:
    """Kernels read the chosen experts of peers over the link, which nothing hides."""
    own = replace(of_own_tokens(sharded), transposed=is_transposed(node))
    names = [name for name, kernels in _KERNELS.items() if kernels is ExpertsKernel.TRITON or not lacks_hopper()]
    name = fastest_kernels(machine, own, names)
    plan = PrefetchPlan(Fabric.PEER, IN_PLACE)
    against = tuple(_against_kernels(facts))
    if name:  # few rows are Triton's
        few = math.ceil(LEAST_ROWS[name] * own.experts / max(facts.choices, 1)) - 1
        plan = replace(plan, kernels=_KERNELS[name].value, few_tokens=few)
    parts = None if name is None else read_parts(machine, Fabric.PEER, sharded, name)
    if parts is None:
        return _Priced(plan, against=(*against, not_measured(machine, Fabric.PEER, READS)))
    terms = (Term("experts", parts.experts), Term("reads", parts.reads), Term("host", parts.host))
    return _Priced(plan, terms, (("kernels", plan.kernels), ("exposed_us", round(parts.reads, 1))), against)


def _against_kernels(facts: ExchangeFacts) -> Iterator[Rejection]:
    if facts.dtype not in _HALVES:
        yield Rejection("dtype_not_supported", "the kernels support bfloat16 and float16", (("dtype", facts.dtype),))
    if not has_triton():
        yield Rejection("triton_missing", "Triton, which compiles the kernels, is not installed")


def _ahead(machine: Machine, sharded: ShardedMixture, node: fx.Node, context: Context) -> _Priced:
    plan = PrefetchPlan(Fabric.PEER, AHEAD)
    message = "this version has no pulls by copy engines: it prices them"
    against: tuple[Rejection, ...] = (Rejection("not_supported", message, (("form", AHEAD),)),)
    transposed = is_transposed(node)
    window = window_of(node, context.topologies)

    def parts_of(tokens: int) -> AheadParts | None:
        of_rank = replace(sharded.of_rank, tokens=tokens, transposed=transposed)
        asked = replace(sharded, of_rank=of_rank)
        kernels = fastest_kernels(machine, of_own_tokens(asked), (*_KERNELS, WIDE))
        return None if kernels is None else ahead_parts(machine, asked, kernels, window.us(machine, tokens))

    parts = parts_of(sharded.of_rank.tokens)
    if parts is None or copy_contention(machine) is None:
        against = (*against, not_measured(machine, Fabric.PEER, COPIES))
    if parts is None:
        return _Priced(plan, against=against)
    terms = (
        Term("experts", parts.experts + parts.contention),
        Term("fetch", parts.fetch),
        Term("hidden", -parts.hidden),
        Term("host", parts.host),
    )
    found: Values = (
        ("window_us", round(window.us(machine, sharded.of_rank.tokens), 1)),
        ("fetch_us", round(parts.fetch, 1)),
        ("exposed_us", round(parts.exposed, 1)),
    )
    least = least_hiding(lambda tokens: (each := parts_of(tokens)) is not None and each.exposed <= 0.0)
    if least is not None:
        found = (*found, ("hidden_from_tokens", least))
    return _Priced(plan, terms, found, against)


def least_hiding(hides: Callable[[int], bool]) -> int | None:
    """The smallest token count, to 2 %, at which `hides` is true, which holds for every larger one; None: nowhere."""
    if not hides(_MOST_TOKENS):
        return None
    low, high = 0, _MOST_TOKENS
    while high - low > max(high // 50, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return high


def _traffic(sharded: ShardedMixture, form: str) -> Values:
    """Bytes that a rank gets from others in one layer: by tokens, had those moved, and by weights."""
    moved = missing_bytes(sharded) if form == IN_PLACE else layer_missing_bytes(sharded)
    return (("bytes_by_tokens", sharded.wire_bytes), ("bytes_by_weights", moved))


def _estimate(machine: Machine, facts: ExchangeFacts, priced: _Priced) -> Estimate:
    slowdown = machine.oversubscription(facts.world, facts.hosts)
    terms = tuple(Term(term.name, term.us * slowdown) for term in priced.terms if term.us)
    return Estimate(terms)
