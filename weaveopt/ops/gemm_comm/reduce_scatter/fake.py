"""Shapes and dtypes of the ops' results, for tracing: no memory, no peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, GemmReduceScatterNormCall

Tensor = torch.Tensor


def gemm_reduce_scatter(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    addends: Sequence[Tensor],
    outer: int,
    call: str,
    replicated: Sequence[Tensor] | None = None,
) -> Tensor:
    site = decode(GemmReduceScatterCall, call)
    if a[0].dtype is not getattr(torch, site.dtype):
        raise WeaveError(f"site {site.site}: planned for {site.dtype}, called with {a[0].dtype}")
    tokens, hidden = a[0].shape[0], b[0].shape[1]
    if site.columns:
        return a[0].new_empty(tokens, hidden // site.world)
    return a[0].new_empty(tokens // site.world, hidden)


def gemm_reduce_scatter_norm(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    call: str,
    replicated: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    site = decode(GemmReduceScatterNormCall, call)
    if a.dtype is not getattr(torch, site.dtype):
        raise WeaveError(f"site {site.site}: planned for {site.dtype}, called with {a.dtype}")
    num_rows, hidden = a.shape[0] // site.world, b.shape[1]
    return a.new_empty(num_rows, hidden), a.new_empty(site.sum_rows(num_rows), hidden)
