"""Reference of `all_gather_gemm` in plain torch, and the gather over the process group's own collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall, Weights

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional


def gathered(shards: Sequence[Tensor], outer: int, call: AllGatherGemmCall) -> Tensor:
    """The rows [outer, world, inner] of all ranks' `shards`, as [tokens, hidden], in one process."""
    blocks = torch.stack([shard.reshape(outer, -1, call.hidden) for shard in shards], dim=1)
    return blocks.reshape(-1, call.hidden)


def reference(shards: Sequence[Tensor], weights: Weights, outer: int, call: AllGatherGemmCall) -> list[Tensor]:
    """Results that the rank with `weights` must get: the rows, then the results of its GEMMs, multiplied in fp32."""
    rows = gathered(shards, outer, call)
    products = [
        rows.float() @ b.float() + (0 if addend is None else addend.float())
        for b, addend in zip(weights.b, weights.addends, strict=True)
    ]
    return [rows if call.hands_out_rows else rows.new_empty(0), *(product.to(rows.dtype) for product in products)]


def through_library(shard: Tensor, outer: int, call: AllGatherGemmCall) -> Tensor:
    """The gathered rows by the process group's own all-gather."""
    own = shard.reshape(-1, call.hidden).contiguous()
    whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(own, call.world, call.group))
    return gathered(whole.chunk(call.world), outer, call) if outer > 1 else whole
