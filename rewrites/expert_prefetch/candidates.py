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
    cached_bytes,
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
IN_PLACE, AHEAD = PrefetchForm.IN_PLACE.value, PrefetchForm.AHEAD.value
FABRICS = (Fabric.SHM, Fabric.PEER)
_KERNELS = {"": ExpertsKernel.TRITON, "hopper": ExpertsKernel.HOPPER}
"""Kernels of experts by their name in a profile. Those for many rows, `wide`, are for weights in this GPU's memory."""
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
    wide_tokens: int = 0
    in_place_tokens: int = 0
    cache_bytes: int = 0
    """As in `ExpertPrefetchCall`."""


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
            forms = [_over_link(machine, sharded, facts, node), _ahead(machine, sharded, facts, node, context)]
        for priced in forms:
            plan, estimate = priced.plan, _estimate(machine, facts, priced) if priced.terms else None
            reasons = (*unreachable, *against, *priced.against, *_against_places(facts, plan))
            parameters = (("form", plan.form), *priced.parameters, *_traffic(sharded, plan))
            yield Candidate(RULE, fabric, plan.form, parameters, estimate, reasons), plan


def _against(facts: ExchangeFacts, context: Context) -> Iterator[Rejection]:
    if context.phase in _TRAINING:
        message = "gradients of an expert are on the rank that has it, and peers read its weights at any time"
        yield Rejection("training", message, (("phase", context.phase),))
    if why := exported.refusal(facts.group):
        yield Rejection("not_shared", "the ranks could not share their experts", (("why", why),))


def _against_places(facts: ExchangeFacts, plan: PrefetchPlan) -> Iterator[Rejection]:
    """Experts that are fetched ahead are in a few ranges of this GPU's memory, whatever the number of ranks."""
    if plan.form == IN_PLACE and facts.world > MAX_RANGES:
        message = f"kernels take experts from at most {counted(MAX_RANGES, 'place')}"
        yield Rejection("too_many_places", message, (("ranks", facts.world),))


def _in_shared_memory(machine: Machine, sharded: ShardedMixture) -> _Priced:
    """Nothing is copied before the kernels run, so nothing is exposed at any token count."""
    parts = in_place_parts(machine, sharded)
    terms = (Term("experts", parts.experts), Term("memory", parts.memory), Term("host", parts.host))
    found = (("fetch_us", 0.0), ("exposed_us", 0.0), ("hidden_from_tokens", 1))
    return _Priced(PrefetchPlan(Fabric.SHM, IN_PLACE), terms, found)


def _over_link(machine: Machine, sharded: ShardedMixture, facts: ExchangeFacts, node: fx.Node) -> _Priced:
    """Kernels read the chosen experts of peers over the link, which nothing hides."""
    own = replace(of_own_tokens(sharded), transposed=is_transposed(node))
    name = fastest_kernels(machine, own, _names())
    plan = _with_kernels(PrefetchPlan(Fabric.PEER, IN_PLACE), name, own.experts, facts.choices)
    against = tuple(_against_kernels(facts))
    parts = None if name is None else read_parts(machine, Fabric.PEER, sharded, name)
    if parts is None:
        return _Priced(plan, against=(*against, not_measured(machine, Fabric.PEER, READS)))
    terms = (Term("experts", parts.experts), Term("reads", parts.reads), Term("host", parts.host))
    return _Priced(plan, terms, (("kernels", plan.kernels), ("exposed_us", round(parts.reads, 1))), against)


def _names() -> tuple[str, ...]:
    """Names of the kernels that run on this host's GPUs, if it has some."""
    return tuple(name for name, kernels in _KERNELS.items() if kernels is ExpertsKernel.TRITON or not lacks_hopper())


def _with_kernels(plan: PrefetchPlan, name: str | None, experts: int, choices: int) -> PrefetchPlan:
    """`plan` with the kernels of that name, and others for token counts that give experts too few rows for them."""
    if not name:  # few rows are Triton's
        return plan

    def least_tokens(kernels: str) -> int:
        return math.ceil(LEAST_ROWS[kernels] * experts / max(choices, 1))

    below = "hopper" if name == WIDE else name
    wide = least_tokens(WIDE) if name == WIDE else 0
    return replace(plan, kernels=_KERNELS[below].value, few_tokens=least_tokens(below) - 1, wide_tokens=wide)


def _against_kernels(facts: ExchangeFacts) -> Iterator[Rejection]:
    if facts.dtype not in _HALVES:
        yield Rejection("dtype_not_supported", "the kernels support bfloat16 and float16", (("dtype", facts.dtype),))
    if not has_triton():
        yield Rejection("triton_missing", "Triton, which compiles the kernels, is not installed")


def _ahead(machine: Machine, sharded: ShardedMixture, facts: ExchangeFacts, node: fx.Node, context: Context) -> _Priced:
    """Copy engines pull all experts that a rank lacks, a layer ahead; the kernels find all of them here."""
    against = tuple(_against_kernels(facts))
    transposed, cache_bytes = is_transposed(node), context.config.expert_cache_bytes
    window = window_of(node, context.topologies)
    names = (*_names(), *(() if lacks_hopper() else (WIDE,)))

    def asked_for(tokens: int) -> ShardedMixture:
        return replace(sharded, of_rank=replace(sharded.of_rank, tokens=tokens, transposed=transposed))

    def parts_of(tokens: int) -> AheadParts | None:
        asked = asked_for(tokens)
        kernels = fastest_kernels(machine, of_own_tokens(asked), names)
        if kernels is None:
            return None
        return ahead_parts(machine, asked, kernels, window.us(machine, tokens), cache_bytes)

    def beats_in_place(tokens: int) -> bool:
        """True also where the profile does not say how long reads in place take."""
        ahead, asked = parts_of(tokens), asked_for(tokens)
        kernels = fastest_kernels(machine, of_own_tokens(asked), _names())
        read = None if kernels is None else read_parts(machine, Fabric.PEER, asked, kernels)
        if ahead is None or read is None:
            return True
        return ahead.experts + ahead.contention + ahead.exposed <= read.experts + read.reads

    tokens = sharded.of_rank.tokens
    own = of_own_tokens(asked_for(tokens))
    plan = PrefetchPlan(Fabric.PEER, AHEAD, cache_bytes=cache_bytes)
    plan = _with_kernels(plan, fastest_kernels(machine, own, names), own.experts, facts.choices)
    parts = parts_of(tokens)
    if parts is None or copy_contention(machine) is None:
        against = (*against, not_measured(machine, Fabric.PEER, COPIES))
    if machine.power is None and not facts.independent and RULE not in context.config.force:
        message = "copies draw power with the kernels that they run under, and the profile does not say how much"
        against = (*against, Rejection("power_not_measured", message, (("machine", machine.name),)))
    if parts is None:
        return _Priced(plan, against=against)
    plan = replace(plan, in_place_tokens=(least_hiding(beats_in_place) or 1) - 1)
    terms = (
        Term("experts", parts.experts + parts.contention),
        Term("fetch", parts.fetch),
        Term("hidden", -parts.hidden),
        Term("host", parts.host),
    )
    kept = cached_bytes(sharded, cache_bytes)
    fetched = layer_missing_bytes(sharded) - kept
    found: Values = (
        ("kernels", ExpertsKernel.WIDE.value if plan.wide_tokens else plan.kernels),
        ("in_place_tokens", plan.in_place_tokens),
        ("window_us", round(window.us(machine, tokens), 1)),
        ("fetch_us", round(parts.fetch, 1)),
        ("hidden_us", round(parts.hidden, 1)),
        ("exposed_us", round(parts.exposed, 1)),
        ("slot_bytes", 2 * fetched),
        ("first_layer_bytes", fetched),
        ("cache_bytes", kept),
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


def _traffic(sharded: ShardedMixture, plan: PrefetchPlan) -> Values:
    """Bytes that a rank gets from others in one layer: by tokens, had those moved, and by weights."""
    moved = missing_bytes(sharded)
    if plan.form == AHEAD:
        moved = layer_missing_bytes(sharded) - cached_bytes(sharded, plan.cache_bytes)
    return (("bytes_by_tokens", sharded.wire_bytes), ("bytes_by_weights", moved))


def _estimate(machine: Machine, facts: ExchangeFacts, priced: _Priced) -> Estimate:
    slowdown = machine.oversubscription(facts.world, facts.hosts)
    terms = tuple(Term(term.name, term.us * slowdown) for term in priced.terms if term.us)
    return Estimate(terms)
