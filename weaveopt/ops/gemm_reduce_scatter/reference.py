"""What `gemm_reduce_scatter` computes, in plain torch, and how it runs over the process group's own collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.ops.gemm_reduce_scatter.call import GemmReduceScatterCall, Products, part_of

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional


def reference(partials: Sequence[Tensor], outer: int, call: GemmReduceScatterCall) -> list[Tensor]:
    """Of every rank its part of the sum of `partials` [tokens, hidden], one per rank, in one process."""
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


def _by_rank(whole: Tensor, outer: int, call: GemmReduceScatterCall) -> Tensor:
    part = part_of(call, whole.shape[0], outer)
    return whole.view(part.outer, call.world, part.inner, part.row).transpose(0, 1)
