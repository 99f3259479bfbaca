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
class ChunkRow:
    """One row of a site's run-time table: calls of up to `max_tokens` tokens go in chunks of `chunk_tokens`."""

    max_tokens: int
    chunk_tokens: int


@dataclass(frozen=True)
class GemmReductionCall:
    """One site's constants. `encode()` goes into the graph; equal on all ranks of the group."""

    reduction: ReductionCall
    """What is done with rows of the product, at most `max_tokens` of them at a time."""
    variant: str
    """How the GEMM and the reduction run beside each other: a word that the fabric's file knows, `chunks`."""
    chunks: tuple[ChunkRow, ...] = ()
    """By token count, ascending; calls of more tokens go by the last row. Empty: chunks of `reduction.max_tokens`."""

    def chunk_tokens(self, tokens: int) -> int:
        """Rows of every chunk but the last, which may be shorter, of a call of `tokens` rows."""
        row = next((row for row in self.chunks if tokens <= row.max_tokens), self.chunks[-1] if self.chunks else None)
        return self.reduction.max_tokens if row is None else row.chunk_tokens

    def encode(self) -> str:
        chunks = [[row.max_tokens, row.chunk_tokens] for row in self.chunks]
        record = {"reduction": self.reduction.encode(), "variant": self.variant, "chunks": chunks}
        return json.dumps(record, separators=(",", ":"), sort_keys=True)


@cache
def decode(text: str) -> GemmReductionCall:
    """The call that `encode()` made `text` from. Raises `WeaveError` if it is none or its fields contradict."""
    try:
        record = json.loads(text)
        chunks = tuple(ChunkRow(int(most), int(rows)) for most, rows in record["chunks"])
        call = GemmReductionCall(reductions.decode(record["reduction"]), str(record["variant"]), chunks)
    except (ValueError, TypeError, KeyError) as error:
        raise WeaveError(f"not an encoded gemm_all_reduce_norm call: {text!r}: {error}") from None
    where = f"site {call.reduction.site}"
    if call.reduction.residual_sharded or call.reduction.sum_out is SumOut.SHARDED:
        raise WeaveError(f"{where}: a residual or sum that is sharded by tokens is divided otherwise than chunks are")
    if call.reduction.quant is not Quant.NONE or call.reduction.normalized_aliases_arena:
        raise WeaveError(f"{where}: gemm_all_reduce_norm hands out rows in memory of their own, not quantized")
    sizes, bounds = (
        [call.reduction.max_tokens, *(row.chunk_tokens for row in chunks)],
        [row.max_tokens for row in chunks],
    )
    if min(sizes) < 1 or max(sizes) > sizes[0] or bounds != sorted(set(bounds)):
        raise WeaveError(
            f"{where}: chunks of {sizes[1:]} rows, of calls of up to {bounds} tokens, in buffers for {sizes[0]}"
        )
    return call


def num_chunks(call: GemmReductionCall, tokens: int) -> int:
    """Into how many chunks `tokens` rows fall."""
    return -(-tokens // call.chunk_tokens(tokens))
