"""Constants over the calls of a `gemm_all_reduce_norm` site, and their encoding as the op's string argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from weaveopt.cost_model.tile_config import TILE_DTYPES, TILES, TileConfig, TileKernelNames
from weaveopt.errors import WeaveError
from weaveopt.fabrics import call_text
from weaveopt.ops.reduction import call as reductions
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.records.norm import NormKind, Quant


class WeightLayout(StrEnum):
    """How the GEMM's right operand is stored."""

    NK = "nk"
    """`[hidden, k]`, as linear layers keep their weights: the GEMM is `input @ weight.t()`."""
    KN = "kn"
    """`[k, hidden]`: the GEMM is `input @ weight`."""


class TileOutput(StrEnum):
    """Rows that every rank gets of variant `tiles`."""

    NORM = "norm"
    """Normalized ones; the sum's stay with their owners."""
    SUM = "sum"
    BOTH = "both"

    @property
    def variant(self) -> str:
        """Variant of the curves."""
        return f"{TILES} {self.value}"


ALL_REDUCE = TileKernelNames(
    "gemm_all_reduce", tuple(each.variant for each in TileOutput), "k", (128, 256), True, "tile_kernels"
)
"""Kernels of variant `tiles`."""


@dataclass(frozen=True)
class ChunkRow:
    """One row of a site's run-time table: calls of up to `max_tokens` tokens go in chunks of `chunk_tokens`."""

    max_tokens: int
    chunk_tokens: int


CHUNKS = "chunks"
"""The other variant; see `weaveopt.cost_model.tile_config`."""


@dataclass(frozen=True)
class GemmReductionCall:
    """One site's constants. `encode()` goes into the graph; equal on all ranks of the group."""

    reduction: ReductionCall
    """Reduction of the GEMM's rows, at most `max_tokens` of them at a time."""
    variant: str
    """Kind of overlap of the GEMM and the reduction: a word that the fabric's file knows, such as `chunks`."""
    chunks: tuple[ChunkRow, ...] = ()
    """Chunk sizes by token count, ascending; calls of more tokens use the last row. Empty: chunks of
    `reduction.max_tokens`."""
    cut: TileConfig | None = None
    """Tile configuration of variant `tiles`."""

    def chunk_tokens(self, tokens: int) -> int:
        """Rows of every chunk but the last, which may be shorter, of a call of `tokens` rows."""
        row = next((row for row in self.chunks if tokens <= row.max_tokens), self.chunks[-1] if self.chunks else None)
        return self.reduction.max_tokens if row is None else row.chunk_tokens

    def encode(self) -> str:
        return call_text.encode(self)


@cache
def decode(text: str) -> GemmReductionCall:
    """The call that `encode()` made `text` from. Raises `WeaveError` if it is none or its fields contradict."""
    call = call_text.decode(GemmReductionCall, text, "gemm_all_reduce_norm")
    reductions.check(call.reduction)
    where = f"site {call.reduction.site}"
    if call.reduction.quant is not Quant.NONE:
        raise WeaveError(f"{where}: gemm_all_reduce_norm returns rows that are not quantized")
    if call.variant == TILES:
        _check_tiles(call, where)
    else:
        _check_chunks(call, where)
    return call


def _check_tiles(call: GemmReductionCall, where: str) -> None:
    reduction, cut = call.reduction, call.cut
    if cut is None or call.chunks or not ALL_REDUCE.takes(cut):
        raise WeaveError(f"{where}: tiles cut as {cut}, in chunks {call.chunks}: there is no such kernel")
    if reduction.post is not None or (reduction.norm is not None and reduction.norm.kind is not NormKind.RMS):
        raise WeaveError(f"{where}: the kernel of tiles supports one RMS norm or none")
    if reduction.out_dtype != reduction.dtype or reduction.dtype not in TILE_DTYPES:
        raise WeaveError(f"{where}: tiles of {reduction.dtype} with normalized in {reduction.out_dtype}")
    if reduction.in_pieces:
        raise WeaveError(f"{where}: the kernel of tiles takes all tokens of a call at once")


def _check_chunks(call: GemmReductionCall, where: str) -> None:
    reduction, chunks = call.reduction, call.chunks
    if reduction.residual_sharded or reduction.sum_out is SumOut.SHARDED:
        raise WeaveError(f"{where}: a residual or sum that is sharded by tokens is divided otherwise than chunks are")
    if reduction.normalized_aliases_arena or call.cut is not None:
        raise WeaveError(f"{where}: chunks are not cut into tiles, and return rows in memory of their own")
    sizes = [reduction.max_tokens, *(row.chunk_tokens for row in chunks)]
    bounds = [row.max_tokens for row in chunks]
    if min(sizes) < 1 or max(sizes) > sizes[0] or bounds != sorted(set(bounds)):
        raise WeaveError(
            f"{where}: chunks of {sizes[1:]} rows, of calls of up to {bounds} tokens, in buffers for {sizes[0]}"
        )


def num_chunks(call: GemmReductionCall, tokens: int) -> int:
    """Into how many chunks `tokens` rows fall."""
    return -(-tokens // call.chunk_tokens(tokens))


def results_in_arena(arguments: Sequence[object]) -> tuple[int, ...]:
    """Positions of the results of a call of `weave::gemm_all_reduce_norm` that alias the arena."""
    return (0,) if decode(str(arguments[-1])).reduction.normalized_aliases_arena else ()
