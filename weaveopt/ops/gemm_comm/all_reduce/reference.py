"""Reference of `gemm_all_reduce_norm` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.ops.gemm_comm.all_reduce.call import GemmReductionCall
from weaveopt.ops.gemm_comm.all_reduce.operands import gemm_of
from weaveopt.ops.reduction import reference as reductions
from weaveopt.ops.reduction.operands import EpilogueOperands, Results

Tensor = torch.Tensor


def reference(
    factors: Sequence[tuple[Tensor, Tensor]], layout: str, operands: EpilogueOperands, call: GemmReductionCall
) -> Results:
    """Results that every rank must get from `factors`, an input and a weight per rank, in one process."""
    partials = [gemm_of(input, weight, layout, call).compute() for input, weight in factors]
    return reductions.reference(partials, operands, call.reduction)
