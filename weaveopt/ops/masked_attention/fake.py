"""Shapes, strides and dtypes of the ops' results, for tracing."""

from __future__ import annotations

import torch

from weaveopt.errors import WeaveError
from weaveopt.ops.masked_attention.shapes import Operands, checked_shape, empty_result

Tensor = torch.Tensor


def key_ranges(mask: Tensor, rows: int) -> Tensor:
    if mask.dim() != 4 or mask.dtype is not torch.bool or rows < 1:
        raise WeaveError(
            f"key_ranges takes a torch.bool of 4 dimensions and at least one row a tile, found {list(mask.shape)} "
            f"{mask.dtype} and {rows}"
        )
    batch, heads, queries, _ = mask.shape
    return mask.new_empty((batch, heads, -(-queries // rows), 4), dtype=torch.int32)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
) -> Tensor:
    checked_shape(Operands(query, key, value, mask, ranges, sinks))
    return empty_result(query, value)
