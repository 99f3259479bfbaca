"""The GEMM of a call, by chunks of its rows."""

from __future__ import annotations

import torch

from weaveopt.errors import WeaveError
from weaveopt.ops.gemm_comm.all_reduce.call import GemmReductionCall, WeightLayout
from weaveopt.ops.reduction.operands import DeferredGemm

Tensor = torch.Tensor


def gemm_of(input: Tensor, weight: Tensor, layout: str, call: GemmReductionCall) -> DeferredGemm:
    """`input [tokens, k] @ weight`, not computed yet. Raises `WeaveError` where shapes or dtypes do not go together."""
    b = weight.t() if WeightLayout(layout) is WeightLayout.NK else weight
    known = call.reduction
    dtype = getattr(torch, known.dtype)
    fits = input.ndim == 2 and b.ndim == 2 and input.shape[1] == b.shape[0] and b.shape[1] == known.hidden
    if not fits or input.dtype is not dtype or weight.dtype is not dtype:
        raise WeaveError(
            f"site {known.site}: planned for [tokens, k] @ [k, {known.hidden}] in {known.dtype}, called with "
            f"{tuple(input.shape)} {input.dtype} and a weight {tuple(weight.shape)} {weight.dtype} stored as {layout}"
        )
    return DeferredGemm(input, b, None)


def rows_of(gemm: DeferredGemm, first: int, count: int) -> DeferredGemm:
    """The GEMM of `count` rows from `first` on."""
    return gemm._replace(a=gemm.a[first : first + count])
