"""Shapes and dtypes of the op's results, for tracing: no memory, no peers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.all_gather_gemm.call import AllGatherGemmCall

Tensor = torch.Tensor


def all_gather_gemm(
    shard: Tensor, b: Sequence[Tensor], addends: Sequence[Tensor | None], outer: int, call: str
) -> list[Tensor]:
    site = decode(AllGatherGemmCall, call)
    if shard.dtype is not getattr(torch, site.dtype):
        raise WeaveError(f"site {site.site}: planned for {site.dtype}, called with {shard.dtype}")
    *leading, last = shard.shape
    own = prod(leading) if last == site.hidden else shard.numel() // site.hidden
    tokens = own * site.world
    rows = shard.new_empty((tokens, site.hidden) if site.hands_out_rows else (0,))
    return [rows, *(shard.new_empty(tokens, each.shape[1]) for each in b)]
