"""References of the operators in plain torch, and the operators over the process group's own collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.ops.gemm_comm.reduce_scatter.call import (
    GemmReduceScatterCall,
    GemmReduceScatterNormCall,
    Products,
    part_of,
)

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional


def reference(partials: Sequence[Tensor], outer: int, call: GemmReduceScatterCall) -> list[Tensor]:
    """Each rank's part of the sum of `partials` [tokens, hidden], one per rank, in one process."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    whole = (total * call.scale).to(partials[0].dtype)
    part = part_of(call, whole.shape[0], outer)
    return [each.reshape(part.shape(call)).contiguous() for each in _by_rank(whole, outer, call)]


def through_library(products: Products, outer: int, call: GemmReduceScatterCall) -> Tensor:
    """The op with the process group's own reduce-scatter, which sums in `call.dtype`."""
    partial = products.compute()
    part = part_of(call, partial.shape[0], outer)
    in_order = _by_rank(partial, outer, call).reshape(call.world * part.outer, part.inner * part.row)
    waiting = _c10d.reduce_scatter_tensor(in_order.contiguous(), "sum", call.world, call.group)
    total: Tensor = _c10d.wait_tensor(waiting).view(part.shape(call))
    return total if call.scale == 1.0 else total * call.scale


def reference_norm(
    partials: Sequence[Tensor], residual: Tensor, weight: Tensor | None, call: GemmReduceScatterNormCall
) -> list[tuple[Tensor, Tensor]]:
    """Each rank's normalized rows and rows of the sum, of `partials` and `residual` [tokens, hidden]."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    each = zip(total.chunk(call.world), residual.chunk(call.world), strict=True)
    return [add_and_normalize(rows, added, weight, call) for rows, added in each]


def add_and_normalize(
    rows: Tensor, residual: Tensor, weight: Tensor | None, call: GemmReduceScatterNormCall
) -> tuple[Tensor, Tensor]:
    """Normalized rows, and rows + residual, which is what is normalized; `rows` in fp32, as summed or rounded."""
    total = (rows + residual.float()).to(residual.dtype)
    x = total.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps)
    if call.cast_before_weight:
        x = x.to(total.dtype).float()
    if weight is not None:
        x = x * (weight.float() + call.weight_offset)
    return x.to(total.dtype), total


def _by_rank(whole: Tensor, outer: int, call: GemmReduceScatterCall) -> Tensor:
    part = part_of(call, whole.shape[0], outer)
    return whole.view(part.outer, call.world, part.inner, part.row).transpose(0, 1)
