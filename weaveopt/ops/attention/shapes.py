"""Sizes, tensors and options of a call of the family, and the checks of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weaveopt.errors import WeaveError

Tensor = torch.Tensor

RANGE_ROWS = 128
"""Queries that share an entry of `ranges` where there is more than one entry. No tile of the kernel spans more."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one call."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    key_size: int
    """Elements of a query or key of one head."""
    value_size: int

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.heads // self.key_heads


@dataclass(frozen=True)
class AttentionOperands:
    """The tensors of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    ranges: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """How scores are made: `softcap * tanh(q @ k^T * scale / softcap)`, without the cap where it is 0."""

    scale: float
    softcap: float = 0.0
    causal: bool = False
    """Key j is admitted for query i only if j <= i + keys - queries."""


def checked_shape(operands: AttentionOperands) -> AttentionShape:
    """The call's sizes. Raises `WeaveError` where operands contradict one another."""
    query, key, value = operands.query, operands.key, operands.value
    if not query.dim() == key.dim() == value.dim() == 4:
        raise WeaveError(
            f"masked_attention takes query, key and value of 4 dimensions, found {query.dim()}, {key.dim()} and "
            f"{value.dim()}"
        )
    batch, heads, queries, key_size = query.shape
    _, key_heads, keys, value_size = value.shape
    if key.shape != (batch, key_heads, keys, key_size) or value.shape[0] != batch or heads % key_heads:
        raise WeaveError(
            f"masked_attention: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not "
            "belong together: [B, H, S, D], [B, Hkv, L, D] and [B, Hkv, L, Dv] with H % Hkv == 0 do"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise WeaveError(f"masked_attention: query, key and value are {query.dtype}, {key.dtype} and {value.dtype}")
    mask, ranges, sinks = operands.mask, operands.ranges, operands.sinks
    whole = (batch, heads, queries, keys)
    if mask is not None and (mask.dtype is not torch.bool or not _broadcasts(mask, whole) or mask.shape[3] != keys):
        raise WeaveError(
            f"masked_attention: mask is {list(mask.shape)} {mask.dtype}, not a torch.bool that broadcasts to {whole}"
        )
    if ranges is not None:
        tiles = -(-queries // RANGE_ROWS)
        if ranges.dtype is not torch.int32 or not _broadcasts(ranges, (batch, heads, tiles, 4)) or ranges.shape[3] != 4:
            raise WeaveError(
                f"masked_attention: ranges are {list(ranges.shape)} {ranges.dtype}, not a torch.int32 [{batch} or 1, "
                f"{heads} or 1, {tiles} or 1, 4]: key_ranges(mask, {RANGE_ROWS}) makes them"
            )
    if sinks is not None and sinks.shape != (heads,):
        raise WeaveError(f"masked_attention: sinks are {list(sinks.shape)}, not one for each of {heads} heads")
    return AttentionShape(batch, heads, key_heads, queries, keys, key_size, value_size)


def _broadcasts(tensor: Tensor, whole: tuple[int, ...]) -> bool:
    return tensor.dim() == len(whole) and all(size in (1, full) for size, full in zip(tensor.shape, whole, strict=True))


def empty_result(query: Tensor, value: Tensor) -> Tensor:
    """[B, H, S, Dv] whose memory is [B, S, H, Dv]: a model's transpose of the result is free."""
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
