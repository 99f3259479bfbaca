"""What is constant over the calls of a `gemm_all_reduce_norm` site, and its encoding as the op's string argument."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from weaveopt.errors import WeaveError
from weaveopt.records.norm import Quant
from weaveopt.reductions import call as reductions
from weaveopt.reductions.call import ReductionCall, SumOut


class WeightLayout(StrEnum):
    """How the GEMM's right operand is stored."""

    NK = "nk"
    """`[hidden, k]`, as linear layers keep their weights: the GEMM is `input @ weight.t()`."""
    KN = "kn"
    """`[k, hidden]`: the GEMM is `input @ weight`."""


@dataclass(frozen=True)
class GemmReductionCall:
    """One site's constants. `encode()` goes into the graph; equal on all ranks of the group."""

    reduction: ReductionCall
    """What is done with rows of the product; of `chunks`, `max_tokens` are the rows of one chunk."""
    variant: str
    """How the GEMM and the reduction run beside each other: a word that the fabric's file knows, `chunks`."""

    def encode(self) -> str:
        record = {"reduction": self.reduction.encode(), "variant": self.variant}
        return json.dumps(record, separators=(",", ":"), sort_keys=True)


@cache
def decode(text: str) -> GemmReductionCall:
    """The call that `encode()` made `text` from. Raises `WeaveError` if it is none or its fields contradict."""
    try:
        record = json.loads(text)
        call = GemmReductionCall(reductions.decode(record["reduction"]), str(record["variant"]))
    except (ValueError, TypeError, KeyError) as error:
        raise WeaveError(f"not an encoded gemm_all_reduce_norm call: {text!r}: {error}") from None
    where = f"site {call.reduction.site}"
    if call.reduction.residual_sharded or call.reduction.sum_out is SumOut.SHARDED:
        raise WeaveError(f"{where}: a residual or sum that is sharded by tokens is divided otherwise than chunks are")
    if call.reduction.quant is not Quant.NONE or call.reduction.normalized_aliases_arena:
        raise WeaveError(f"{where}: gemm_all_reduce_norm hands out rows in memory of their own, not quantized")
    if call.reduction.max_tokens < 1:
        raise WeaveError(f"{where}: chunks of {call.reduction.max_tokens} rows")
    return call


def num_chunks(call: GemmReductionCall, tokens: int) -> int:
    """Into how many chunks `tokens` rows fall; all but the last have `max_tokens` rows."""
    return -(-tokens // call.reduction.max_tokens)
