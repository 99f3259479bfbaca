"""Constants over the calls of an `all_reduce_norm` site, and their encoding as the op's string argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType

from weaveopt.errors import WeaveError
from weaveopt.fabrics import call_text
from weaveopt.ops.reduction.variant import KernelRow
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormSpec, Quant


@dataclass(frozen=True)
class Features:
    """Capabilities of this family's kernels on a fabric."""

    tabled: bool
    """A table says by token count which kernel runs; else one-shot up to a threshold, two-shot above."""
    quantizes: bool
    aliases_arena: bool
    """Normalized rows may be returned as views of the arena, where peers store them."""
    shards_sum: bool = True
    """The sum may stay with the rank that computed it."""
    overlaps: bool = True
    """A call that was begun runs while its rank computes."""


FEATURES: Mapping[Fabric, Features] = MappingProxyType({
    Fabric.SHM: Features(tabled=False, quantizes=False, aliases_arena=False, overlaps=False),
    Fabric.TCP: Features(tabled=True, quantizes=False, aliases_arena=False, shards_sum=False),
    Fabric.PEER: Features(tabled=True, quantizes=True, aliases_arena=True),
    Fabric.MULTIMEM: Features(tabled=True, quantizes=True, aliases_arena=True),
    Fabric.HOST: Features(tabled=True, quantizes=True, aliases_arena=False),
    Fabric.NVSHMEM: Features(tabled=True, quantizes=True, aliases_arena=False, shards_sum=False),
})  # fmt: skip
"""Fabrics that the family has kernels for; the library needs none."""


class SumOut(StrEnum):
    """Which rows of the op's second result a caller may read."""

    NONE = "none"
    WHOLE = "whole"
    SHARDED = "sharded"
    """This rank's token rows; all rows after a one-shot exchange."""


@dataclass(frozen=True)
class ReductionCall:
    """One site's constants. `encode()` goes into the graph; equal on all ranks of the group."""

    site: str
    group: str
    """Name of the process group."""
    fabric: Fabric
    """One of `FEATURES`, or `library`."""
    world: int
    hidden: int
    dtype: str
    """Dtype of partial, residual and sum: `bfloat16`, `float16` or `float32`."""
    out_dtype: str
    """Dtype of normalized: `dtype`, `float32`, or `float8_e4m3fn` if `quant` is set."""
    max_tokens: int
    """More tokens go through the library."""
    post: NormSpec | None
    norm: NormSpec | None
    timeout_s: float
    one_shot_max_tokens: int = 0
    """Fabrics without a table: more tokens are reduced in shares (two-shot)."""
    table: tuple[KernelRow, ...] = ()
    """Fabrics with a table: what runs by token count, ascending (`max_tokens` is the last row's)."""
    scale: float = 1.0
    residual_sharded: bool = False
    """After a two-shot exchange, only this rank's token rows of `residual` hold data."""
    sum_out: SumOut = SumOut.WHOLE
    quant: Quant = Quant.NONE
    normalized_aliases_arena: bool = False
    """`normalized` may be a view of the arena, good until the next call of the group, in any graph. Peers write its
    rows straight to it."""
    in_pieces: bool = False
    """Fabrics with a table: more than `max_tokens` tokens run in pieces of so many, each divided among ranks by itself,
    and not through the library: where the table ends for want of memory, not because the library is faster there."""
    partial_offset: int = 0
    output_offset: int = 0
    """Offsets of the buffers of these names in the arena's transient zone, if the fabric has them there."""
    hosts: int = 1
    """Hosts that the ranks are spread over, evenly; more than one only on fabrics that cross hosts."""
    channel: int = 0
    """Calls on one channel follow one another."""
    begun: bool = False
    """Two operators begin and end it. On GPUs it runs on the group's communication stream, whose channel has buffers of
    its own."""

    def encode(self) -> str:
        return call_text.encode(self)

    def share(self, tokens: int, rank: int) -> tuple[int, int]:
        """First and last + 1 of the token rows that `rank` reduces in a two-shot exchange."""
        return tokens * rank // self.world, tokens * (rank + 1) // self.world


@cache
def decode(text: str) -> ReductionCall:
    """The call that `encode()` made `text` from. Raises `WeaveError` if it is none or its fields contradict."""
    call = call_text.decode(ReductionCall, text, "all_reduce_norm")
    check(call)
    return call


def check(call: ReductionCall) -> None:
    """Raises `WeaveError` for what no kernel could run."""
    features = FEATURES.get(call.fabric)
    where = f"site {call.site}"
    if features is None and call.fabric is not Fabric.LIBRARY:
        raise WeaveError(f"{where}: all_reduce_norm has no {call.fabric.value} kernel")
    wide = (call.dtype, "float32") if call.quant is Quant.NONE else ("float8_e4m3fn",)
    if call.dtype not in ("bfloat16", "float16", "float32") or call.out_dtype not in wide:
        raise WeaveError(f"{where}: dtype {call.dtype} with normalized in {call.out_dtype} is not supported")
    if call.norm is None and call.quant is not Quant.NONE:
        raise WeaveError(f"{where}: there is no norm whose rows could be quantized ({call.quant.value})")
    if call.norm is None and call.sum_out is SumOut.NONE:
        raise WeaveError(f"{where}: neither norm nor sum is wanted")
    if call.quant is not Quant.NONE and features is not None and not features.quantizes:
        raise WeaveError(f"{where}: {call.fabric.value} does not quantize")
    if call.normalized_aliases_arena:
        if not (features and features.aliases_arena):
            raise WeaveError(f"{where}: {call.fabric.value} has no arena for normalized rows")
        if call.norm is None or call.quant is Quant.PER_TOKEN:
            raise WeaveError(f"{where}: only normalized rows without scales of their own can be stored in the arena")
    if call.begun and call.normalized_aliases_arena:
        raise WeaveError(
            f"{where}: rows of a call in flight cannot be stored in the arena: the next one may overwrite them"
        )
    if features is not None and features.tabled:
        bounds = [row.max_tokens for row in call.table]
        if not bounds or bounds != sorted(set(bounds)) or bounds[-1] != call.max_tokens:
            raise WeaveError(f"{where}: a table up to {bounds} tokens does not end at {call.max_tokens}")
    if min(call.partial_offset, call.output_offset) < 0:
        raise WeaveError(
            f"{where}: buffers at {call.partial_offset} and {call.output_offset} are before the transient zone"
        )


def results_in_arena(arguments: Sequence[object]) -> tuple[int, ...]:
    """Positions of the results of a call of `weave::all_reduce_norm` that alias the arena."""
    return (0,) if decode(str(arguments[-1])).normalized_aliases_arena else ()
