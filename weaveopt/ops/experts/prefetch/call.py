"""Constants over the calls of an `expert_prefetch`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.exchange.call import SpreadExpertsCall


class PrefetchForm(StrEnum):
    """How experts of other ranks come to the kernels."""

    IN_PLACE = "in_place"
    """Kernels read the chosen ones where they are stored."""
    AHEAD = "ahead"
    """Copy engines pull all of them, a layer ahead."""


@dataclass(frozen=True)
class ExpertPrefetchCall(SpreadExpertsCall):
    """The call of `weave::expert_prefetch`. Every rank may have its own: nobody compares it."""

    form: str = PrefetchForm.IN_PLACE
    """A word of `PrefetchForm`."""
    kernels: str = ExpertsKernel.TRITON
    """The experts' kernels on GPUs, a word of `ExpertsKernel`."""
    few_tokens: int = 0
    """Largest token count of a rank for which Triton's kernels run, whatever `kernels` are."""
    wide_tokens: int = 0
    """Least token count of a rank for which `ExpertsKernel.WIDE` runs instead; 0: none."""
    in_place_tokens: int = 0
    """Largest token count of a rank for which form `ahead` reads in place: few tokens choose few experts."""
    cache_bytes: int = 0
    """Bytes of other ranks' experts that form `ahead` keeps for good, of each layer."""
    last: bool = True
    """True if no later call of its graph reads the same weights, so that their slot may be filled anew."""


@cache
def experts_call(call: ExpertPrefetchCall) -> ExpertsCall:
    """Call of the experts' kernels, which have the weights of all ranks."""
    act, few, many = call.act, call.few_tokens, call.wide_tokens
    table = ((few, ExpertsKernel.TRITON.value),) if few else ()
    kernels = call.kernels
    if many and many - 1 > few:
        table, kernels = (*table, (many - 1, kernels)), ExpertsKernel.WIDE.value
    return ExpertsCall(act.name, act.gated, act.interleaved, act.alpha, act.limit, kernels, table)
