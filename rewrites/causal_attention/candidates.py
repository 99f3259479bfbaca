"""The kernels that could compute an attention, each with what it takes, or what speaks against it.

flash, cudnn     torch's kernels, causal or over all keys, grouped heads: where the mask is known
cpu              the same on CPU ranks
masked           weaveopt's kernel, which reads a mask of booleans and only those keys that it admits; also soft caps
                 and sinks, and a few queries against many keys
grouped          the operator that is there, with its mask, but keys and values not repeated
paged            weaveopt's kernel over a paged cache: each request of a batch reads its own rows, by their index
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from weaveopt.cost_model import Attention
from weaveopt.cost_model.attention import has_time
from weaveopt.inductor.calls import ATTENTION, MEMORY, AttentionCall, MemoryCall
from weaveopt.inductor.kernels import KernelContext
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term, Values
from weaveopt.records.site import DTYPE_BYTES, TokenCounts
from weaveopt.sites.attention.matcher import AttentionFacts
from weaveopt.sites.shared.masks import MaskKind

RULE = "causal_attention"


class AttentionImplementation(StrEnum):
    FLASH = "flash"
    CUDNN = "cudnn"
    CPU = "cpu"
    MASKED = "masked"
    GROUPED = "grouped"
    PAGED = "paged"


LIBRARY = frozenset({AttentionImplementation.FLASH, AttentionImplementation.CUDNN, AttentionImplementation.CPU})
FORMS = {
    "cuda": (
        AttentionImplementation.FLASH,
        AttentionImplementation.CUDNN,
        AttentionImplementation.MASKED,
        AttentionImplementation.GROUPED,
    ),
    "cpu": (AttentionImplementation.CPU, AttentionImplementation.GROUPED),
}
"""Those that a device may have; where keys are rows of a paged cache, `PAGED` too."""
TAKE_GROUPS = frozenset(
    {
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)
"""Operators that read one key head for several query heads; the memory-efficient one does not."""
HALVES = ("bfloat16", "float16")
LARGEST_HEAD = 256
LARGEST_HEAD_OF_CUDNN = 192
"""With values of at most 128; what torch's own checks let through on Hopper."""
PAGED_OPERATORS = 12
"""Operators of torch that `PAGED` runs on a CPU in addition to attention and to what the cache's update runs."""


@dataclass(frozen=True)
class CausalAttentionPlan:
    """How a proposal computes the site."""

    form: AttentionImplementation
    causal: bool = False
    window: int = 0
    num_keys: int = 0
    """Keys that some query reads, if the mask hides all later ones: those are sliced off. 0: all."""
    reads_mask: bool = False


@dataclass(frozen=True)
class CausalAttentionTerms:
    """Facts of the host that proposals depend on, in addition to the site."""

    surroundings: KernelContext
    has_triton: bool = True
    """False on a host with GPUs that lacks Triton: the masked kernel would be plain torch there."""
    is_forced: bool = False
    """True if the rule is used whatever it costs: then a kernel needs no time."""


def candidates(
    facts: AttentionFacts, tokens: TokenCounts, terms: CausalAttentionTerms, usable_only: bool
) -> Iterator[tuple[Candidate, CausalAttentionPlan]]:
    paged = () if facts.paged is None else (AttentionImplementation.PAGED,)
    for form in (*FORMS[terms.surroundings.machine.device], *paged):
        lowered = _lowered(form, facts)
        if isinstance(lowered, Rejection):
            reasons: tuple[Rejection, ...] = (lowered,)
        elif form is AttentionImplementation.PAGED:
            reasons = tuple(_against_paged(facts, _at(facts, tokens), terms))
        else:
            reasons = tuple(_against(form, lowered, facts, terms))
        if reasons:
            if not usable_only:
                yield Candidate(RULE, Fabric.LIBRARY, form.value, rejections=reasons), CausalAttentionPlan(form)
            continue
        assert isinstance(lowered, CausalAttentionPlan)
        estimate = _estimate(lowered, facts, _at(facts, tokens), terms.surroundings)
        yield Candidate(RULE, Fabric.LIBRARY, form.value, _parameters(lowered), estimate), lowered


def _parameters(lowered: CausalAttentionPlan) -> Values:
    named: list[tuple[str, bool | int]] = []
    if lowered.form in LIBRARY:
        named.append(("causal", lowered.causal))
    if lowered.window:
        named.append(("window", lowered.window))
    if lowered.num_keys:
        named.append(("keys", lowered.num_keys))
    if lowered.reads_mask:
        named.append(("reads_mask", True))
    return tuple(named)


def _lowered(form: AttentionImplementation, facts: AttentionFacts) -> CausalAttentionPlan | Rejection:
    """The arguments that make `form` compute what the site does."""
    mask = facts.mask
    if form is AttentionImplementation.PAGED:
        assert facts.paged is not None
        return CausalAttentionPlan(form, causal=True, window=facts.paged.window)
    if form is AttentionImplementation.GROUPED:
        if facts.is_repeated and facts.operator in TAKE_GROUPS:
            return CausalAttentionPlan(form)
        return Rejection("not_repeated", "the graph does not repeat keys and values for an operator that takes groups")
    can_read = form is AttentionImplementation.MASKED and facts.has_booleans
    read = CausalAttentionPlan(form, reads_mask=True)
    if mask is None:
        return read if can_read else Rejection("mask_not_known", "what the mask hides is known at run time only")
    if facts.has_symbols and mask.kind is not MaskKind.NONE:
        aligned = facts.is_square and mask.offset == 0 and mask.num_filled is None
        if not aligned or mask.kind not in (MaskKind.CAUSAL, MaskKind.WINDOW):
            why = Rejection("symbolic_sizes", "how many keys each query reads differs from call to call")
            return read if can_read else why
    if mask.kind in (MaskKind.NONE, MaskKind.FULL):
        return CausalAttentionPlan(form, num_keys=mask.filled(facts.keys) % facts.keys)
    # weaveopt's kernel has no window of its own, for one query neither.
    if mask.kind is MaskKind.CHUNKED or (form is AttentionImplementation.MASKED and mask.kind is MaskKind.WINDOW):
        why = Rejection("mask_not_supported", "the kernel does not support this mask", (("mask", str(mask)),))
        return read if can_read else why
    last = facts.queries + mask.offset
    if mask.offset < 0 or last > mask.filled(facts.keys):
        values = (("queries", facts.queries), ("keys", facts.keys), ("mask", str(mask)))
        return Rejection("mask_not_supported", "the last query is not at the last key that some query reads", values)
    return CausalAttentionPlan(form, causal=True, window=mask.window, num_keys=last % facts.keys)


def _against_paged(facts: AttentionFacts, whole: Attention, terms: CausalAttentionTerms) -> Iterator[Rejection]:
    machine = terms.surroundings.machine
    if machine.device != "cuda":
        return
    if facts.dtype not in HALVES:
        yield Rejection("dtype_not_supported", "the kernel supports bfloat16 and float16", (("dtype", facts.dtype),))
    if not terms.has_triton:
        yield Rejection("no_triton", "Triton, which the kernel is written in, is not installed: pip install triton")
    if facts.head_dim > LARGEST_HEAD:
        values = (("head_dim", facts.head_dim),)
        yield Rejection("head_size", "the kernel supports head sizes of at most 256", values)
    if not terms.is_forced and not has_time(machine, _of_requests(facts, whole, machine.device)):
        message = "the profile holds no time of this kernel: run `weaveopt calibrate`, or set the option tune_budget_s"
        yield Rejection("not_measured", message, (("profile", machine.name), ("dtype", facts.dtype)))


def _of_requests(facts: AttentionFacts, whole: Attention, device: str) -> Attention:
    """Attention of every query with the keys of its own request, of requests as long as one another. The longest of the
    traced step is no better: transformers traces a step that it makes up."""
    assert facts.paged is not None
    requests = facts.paged.requests
    keys = -(-whole.kv_len // requests)
    if device == "cpu":
        return replace(whole, kv_len=keys, kernel="sdpa")
    queries = -(-whole.q_len // requests)
    return replace(
        whole,
        batch=requests,
        q_len=queries,
        kv_len=max(keys, queries),
        causal=queries > 1,
        kernel=AttentionImplementation.PAGED.value,
    )


def _against(
    form: AttentionImplementation, lowered: CausalAttentionPlan, facts: AttentionFacts, terms: CausalAttentionTerms
) -> Iterator[Rejection]:
    keys = lowered.num_keys or facts.keys
    heads = (("head_dim", facts.head_dim), ("value_dim", facts.value_dim))
    if form is not AttentionImplementation.MASKED and (facts.softcap or facts.has_sinks):
        yield Rejection("scores_changed", "no kernel of the library supports soft caps or sinks")
    if (
        form in (AttentionImplementation.FLASH, AttentionImplementation.CUDNN, AttentionImplementation.MASKED)
        and facts.dtype not in HALVES
    ):
        yield Rejection("dtype_not_supported", "the kernel supports bfloat16 and float16", (("dtype", facts.dtype),))
    if form is AttentionImplementation.MASKED and not terms.has_triton:
        yield Rejection("no_triton", "Triton, which the kernel is written in, is not installed: pip install triton")
    if form is AttentionImplementation.FLASH:
        if facts.head_dim != facts.value_dim or facts.head_dim > LARGEST_HEAD or facts.head_dim % 8:
            yield Rejection("head_size", "the kernel supports equal head sizes of at most 256", heads)
    elif form is AttentionImplementation.CUDNN:
        if facts.head_dim > LARGEST_HEAD_OF_CUDNN or facts.value_dim > 128 or (facts.head_dim | facts.value_dim) % 8:
            yield Rejection("head_size", "the kernel supports head sizes of at most 128, and keys of 192", heads)
    elif form is AttentionImplementation.CPU:
        if facts.head_dim != facts.value_dim:
            yield Rejection("head_size", "the kernel supports equal head sizes", heads)
    elif form is AttentionImplementation.MASKED and max(facts.head_dim, facts.value_dim) > LARGEST_HEAD:
        yield Rejection("head_size", "the kernel supports head sizes of at most 256", heads)
    if form in (AttentionImplementation.CUDNN, AttentionImplementation.CPU) and lowered.causal:
        if lowered.window:
            yield Rejection("mask_not_supported", "the kernel does not support windows", (("window", lowered.window),))
        elif facts.queries != keys:
            values = (("queries", facts.queries), ("keys", keys))
            yield Rejection(
                "mask_not_supported", "the kernel is causal where queries and keys are equally many", values
            )


def _at(facts: AttentionFacts, tokens: TokenCounts) -> Attention:
    """Over all keys, at another token count: the one that the site as it is gets its price at."""
    attention = Attention(
        batch=facts.batch,
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        q_len=facts.queries,
        kv_len=facts.keys,
        head_dim=facts.head_dim,
        value_dim=facts.value_dim,
        dtype=facts.dtype,
    )
    return AttentionCall(attention).at(tokens.hint / (facts.batch * facts.queries))


def _paged_estimate(attention: Attention, surroundings: KernelContext) -> Estimate:
    if surroundings.machine.device != "cpu":
        return Estimate((Term(ATTENTION, surroundings.us_of(ATTENTION, AttentionCall(attention))),))
    # There it is several of torch's operators; the rows that they gather are gathered by the update too.
    attention_us = surroundings.us_of(ATTENTION, AttentionCall(attention))
    others_us = PAGED_OPERATORS * surroundings.us_of(MEMORY, MemoryCall(1))
    return Estimate((Term(ATTENTION, attention_us), Term(MEMORY, others_us)))


def _estimate(
    lowered: CausalAttentionPlan, facts: AttentionFacts, whole: Attention, surroundings: KernelContext
) -> Estimate:
    """`whole`: what the site computes at the token count, over all keys."""
    if lowered.form is AttentionImplementation.PAGED:
        return _paged_estimate(_of_requests(facts, whole, surroundings.machine.device), surroundings)
    positions = whole.batch * whole.q_len * whole.kv_len
    mask_bytes = positions if lowered.reads_mask else 0
    if lowered.form is AttentionImplementation.GROUPED and facts.has_mask:
        mask_bytes = positions * DTYPE_BYTES[facts.dtype]
    keys = min(lowered.num_keys, whole.kv_len) if lowered.num_keys else whole.kv_len
    attention = replace(
        whole,
        kv_len=max(keys, whole.q_len if lowered.causal else 1),
        # A mask that is read at run time hides about as much, in graphs that have more than one query.
        causal=lowered.causal
        or (lowered.form is AttentionImplementation.MASKED and lowered.reads_mask and whole.q_len > 1),
        mask_bytes=mask_bytes,
        window=lowered.window,
        kernel="sdpa"
        if lowered.form in (AttentionImplementation.GROUPED, AttentionImplementation.CPU)
        else lowered.form.value,
    )
    found = [Term(ATTENTION, surroundings.us_of(ATTENTION, AttentionCall(attention)))]
    if lowered.reads_mask:
        # One kernel finds the keys that the mask admits, for all sites that read it.
        ranges_us = surroundings.us_of(MEMORY, MemoryCall(mask_bytes)) / facts.reads_of_mask
        found.append(Term(MEMORY, ranges_us))
    return Estimate(tuple(found))
