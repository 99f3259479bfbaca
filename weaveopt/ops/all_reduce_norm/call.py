"""What is constant over the calls of an `all_reduce_norm` site, and its encoding as the op's string argument."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from weaveopt.errors import WeaveError
from weaveopt.records.candidate import Algorithm, Fabric, Form, Lowering
from weaveopt.records.memory import RegionNeed as RegionNeed
from weaveopt.records.site import DTYPE_BYTES

ALIGNMENT_BYTES = 64
KERNEL_FABRICS = frozenset({Fabric.SHM, Fabric.PEER, Fabric.MULTIMEM})
"""Fabrics that this family has a kernel for; the library needs none."""
GPU_FABRICS = frozenset({Fabric.PEER, Fabric.MULTIMEM})
SCALE_BYTES = 16
"""What a row's scale takes beside the row, where normed is quantized by token."""


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True)
class NormForm:
    """A norm over the last dimension, in fp32.

    `rms`: `x * rsqrt(mean(x^2) + eps)`; `layer`: `(x - mean(x)) * rsqrt(var(x) + eps)`; then `* (weight +
    weight_offset) + bias`, each where given.
    """

    kind: NormKind
    eps: float
    weight_offset: float = 0.0
    """1.0 for Gemma, which stores weights around zero."""
    cast_before_weight: bool = False
    """Round to the activation dtype before the weight is applied (Llama), not only after (Gemma)."""


class SumOut(StrEnum):
    """Which rows of the op's second result a caller may read."""

    NONE = "none"
    WHOLE = "whole"
    SHARDED = "sharded"
    """This rank's token rows; all rows after a one-shot exchange."""


class Quant(StrEnum):
    """How normed becomes e4m3: `normed / scale`, rounded to nearest and saturated at 448."""

    NONE = "none"
    STATIC = "static"
    """One scale, an operand of the op."""
    PER_TOKEN = "per_token"
    """`scale[t] = max(|normed[t]|) / 448`, the op's third result."""


@dataclass(frozen=True)
class ArenaNeed:
    """Bytes of a rank's segment that a site works in, both multiples of 64."""

    partial_bytes: int
    """Of one partial buffer. A site has two, one after the other, from `partial_offset` on."""
    output_bytes: int
    """Of the output region, from `output_offset` on."""


def arena_bytes(max_tokens: int, hidden: int, dtype: str, out_dtype: str, world: int) -> ArenaNeed:
    """What a site with at most `max_tokens` tokens needs in every rank's segment.

    Sites of a group may share regions: calls follow one another, and where the layout changes from one call to
    the next, an extra synchronization keeps them apart. So it pays to give all sites of a group the same
    `partial_offset`, `partial_bytes` and `output_offset`. Partial buffers and output region of one site
    must not overlap.
    """
    rows = -(-max_tokens // world)
    return ArenaNeed(
        partial_bytes=_aligned(max_tokens * hidden * DTYPE_BYTES[dtype]),
        output_bytes=_aligned(rows * hidden * DTYPE_BYTES[out_dtype]) + _aligned(rows * hidden * DTYPE_BYTES[dtype]),
    )


def region_need(lowering: Lowering, hidden: int, dtype: str, out_dtype: str, world: int) -> RegionNeed:
    """What calls of up to `lowering.max_tokens` tokens need of a GPU arena, the sum handed out whole if need be."""
    tokens, share = lowering.max_tokens, -(-lowering.max_tokens // world)
    row, out_row = hidden * DTYPE_BYTES[dtype], -(-hidden * DTYPE_BYTES[out_dtype] // 16) * 16 + SCALE_BYTES
    match lowering.form, lowering.algorithm:
        case Form.MAIL, Algorithm.ONE_SHOT:
            return RegionNeed(mailbox_bytes=_page_aligned((world - 1) * tokens * row))
        case Form.MAIL, _:
            return RegionNeed(mailbox_bytes=_page_aligned((world - 1) * share * (2 * row + out_row)))
        case Form.BULK, _:
            output = _page_aligned(tokens * out_row) + _page_aligned(tokens * row)
            return RegionNeed(staging_bytes=_page_aligned((world - 1) * share * row), output_bytes=output)
        case _:
            output = _page_aligned(tokens * out_row) + _page_aligned(tokens * row)
            return RegionNeed(output_bytes=output, partial_bytes=_page_aligned(tokens * row))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _page_aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


@dataclass(frozen=True)
class AllReduceNormCall:
    """One site's constants. `encode()` goes into the graph; equal on all ranks of the group."""

    site: str
    group: str
    """Name of the process group."""
    fabric: Fabric
    """`shm`, `peer`, `multimem` or `library`."""
    world: int
    hidden: int
    dtype: str
    """Of partial, residual and sum: `bfloat16`, `float16` or `float32`."""
    out_dtype: str
    """Of normed: `dtype`, `float32`, or `float8_e4m3fn` where `quant` is set."""
    partial_offset: int
    output_offset: int
    partial_bytes: int
    max_tokens: int
    """More tokens go through the library."""
    one_shot_max_tokens: int
    """More tokens are reduced in shares (two-shot)."""
    post: NormForm | None
    norm: NormForm | None
    timeout_s: float
    scale: float = 1.0
    residual_sharded: bool = False
    """Above `one_shot_max_tokens`, only this rank's token rows of `residual` hold data."""
    sum_out: SumOut = SumOut.WHOLE
    quant: Quant = Quant.NONE
    lowerings: tuple[Lowering, ...] = ()
    """GPU fabrics: what runs by token count, ascending (`max_tokens` is the last row's)."""
    normed_lands: bool = False
    """GPU fabrics: normed may be a view of the arena, good until the next call of the group, in any graph. Peers write
    its rows straight to it."""
    in_pieces: bool = False
    """GPU fabrics: more than `max_tokens` tokens run in pieces of so many, each divided among ranks by itself, and not
    through the library: where the table ends for want of memory, not because the library is faster from there on."""

    def encode(self) -> str:
        record = {name: vars(value) if isinstance(value, NormForm) else value for name, value in vars(self).items()}
        record["lowerings"] = [vars(lowering) for lowering in self.lowerings]
        return json.dumps(record, separators=(",", ":"), sort_keys=True)

    def need(self) -> ArenaNeed:
        return arena_bytes(self.max_tokens, self.hidden, self.dtype, self.out_dtype, self.world)

    def share(self, tokens: int, rank: int) -> tuple[int, int]:
        """First and last + 1 of the token rows that `rank` reduces in a two-shot exchange."""
        return tokens * rank // self.world, tokens * (rank + 1) // self.world


def _form(record: dict[str, str | float | bool] | None) -> NormForm | None:
    if record is None:
        return None
    return NormForm(
        NormKind(str(record["kind"])),
        float(record["eps"]),
        float(record["weight_offset"]),
        bool(record["cast_before_weight"]),
    )


def _lowering(row: dict[str, str | int]) -> Lowering:
    return Lowering(
        int(row["max_tokens"]), Algorithm(str(row["algorithm"])), Form(str(row["form"])), int(row["num_ctas"])
    )


@cache
def decode(text: str) -> AllReduceNormCall:
    """The call that `encode()` made `text` from. Raises `WeaveError` if it is none or its fields contradict."""
    try:
        record = json.loads(text)
        record["fabric"] = Fabric(record["fabric"])
        record["sum_out"] = SumOut(record["sum_out"])
        record["post"] = _form(record["post"])
        record["norm"] = _form(record["norm"])
        record["quant"] = Quant(record["quant"])
        record["lowerings"] = tuple(_lowering(row) for row in record["lowerings"])
        call = AllReduceNormCall(**record)
    except (ValueError, TypeError, KeyError) as error:
        raise WeaveError(f"not an encoded all_reduce_norm call: {text!r}: {error}") from None
    _check(call)
    return call


def _check(call: AllReduceNormCall) -> None:
    """Raises `WeaveError` for what no kernel could run."""
    if call.fabric is not Fabric.LIBRARY and call.fabric not in KERNEL_FABRICS:
        raise WeaveError(f"site {call.site}: all_reduce_norm has no {call.fabric.value} kernel")
    wide = (call.dtype, "float32") if call.quant is Quant.NONE else ("float8_e4m3fn",)
    if call.dtype not in ("bfloat16", "float16", "float32") or call.out_dtype not in wide:
        raise WeaveError(f"site {call.site}: dtype {call.dtype} with normed in {call.out_dtype} is not supported")
    if call.norm is None and call.quant is not Quant.NONE:
        raise WeaveError(f"site {call.site}: there is no norm whose rows could be quantized ({call.quant.value})")
    if call.norm is None and call.sum_out is SumOut.NONE:
        raise WeaveError(f"site {call.site}: neither norm nor sum is wanted")
    if call.fabric in GPU_FABRICS:
        bounds = [lowering.max_tokens for lowering in call.lowerings]
        if not bounds or bounds != sorted(set(bounds)) or bounds[-1] != call.max_tokens:
            raise WeaveError(f"site {call.site}: a table up to {bounds} tokens does not end at {call.max_tokens}")
        if call.normed_lands and (call.norm is None or call.quant is Quant.PER_TOKEN):
            raise WeaveError(f"site {call.site}: only normed rows without scales of their own can lie in the arena")
        return
    if call.normed_lands:
        raise WeaveError(f"site {call.site}: {call.fabric.value} has no arena in which normed rows could lie")
    if call.quant is not Quant.NONE:
        raise WeaveError(f"site {call.site}: {call.fabric.value} does not quantize")
    if call.fabric is Fabric.LIBRARY:
        return
    need = call.need()
    partial_end = call.partial_offset + 2 * call.partial_bytes
    output_end = call.output_offset + need.output_bytes
    if call.partial_bytes < need.partial_bytes or call.partial_bytes % ALIGNMENT_BYTES:
        raise WeaveError(
            f"site {call.site}: partial buffers of {call.partial_bytes} bytes, expected {need.partial_bytes}"
        )
    if call.partial_offset < output_end and call.output_offset < partial_end:
        raise WeaveError(
            f"site {call.site}: partial buffers [{call.partial_offset}, {partial_end}) and output region "
            f"[{call.output_offset}, {output_end}) overlap"
        )


def results_in_arena(arguments: Sequence[object]) -> tuple[int, ...]:
    """Of a call of `weave::all_reduce_norm`: its results that lie in the arena, by position."""
    return (0,) if decode(str(arguments[-1])).normed_lands else ()
