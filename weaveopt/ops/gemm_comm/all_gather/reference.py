"""Reference of `all_gather_gemm` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall, Weights
from weaveopt.ops.gemm_comm.all_gather.op import gathered

Tensor = torch.Tensor


def reference(shards: Sequence[Tensor], weights: Weights, outer: int, call: AllGatherGemmCall) -> list[Tensor]:
    """Results that the rank with `weights` must get: the rows, then the results of its GEMMs, multiplied in fp32."""
    rows = gathered(shards, outer, call)
    products = [
        rows.float() @ b.float() + (0 if addend is None else addend.float())
        for b, addend in zip(weights.b, weights.addends, strict=True)
    ]
    return [rows if call.returns_rows else rows.new_empty(0), *(product.to(rows.dtype) for product in products)]
