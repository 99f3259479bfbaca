"""The experts of one rank on rows that came, in plain torch; see `weaveopt.ops.experts.by_expert`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from weaveopt.ops.experts.by_expert import ExpertWeights, RowRange, ranges_of, through_experts
from weaveopt.ops.experts.exchange.call import SpreadExpertsCall

Tensor = torch.Tensor


def expert_rows(
    x: Tensor, experts: Tensor, operands: ExpertWeights, call: SpreadExpertsCall, differentiable: bool = False
) -> Tensor:
    """Applies expert `experts[r]` to `x[r]`: [rows, hidden] in the dtype of `x`, rounded after each GEMM.

    `experts` [rows] are ids of this rank's experts in ascending order.
    """
    ranges = ranges_of(torch.bincount(experts, minlength=call.num_experts).tolist())
    if x.is_cpu and not differentiable:
        return through_experts(x, ranges, operands, call.act)
    return _in_parts(x, ranges, operands, call)


def _in_parts(x: Tensor, ranges: Sequence[RowRange], operands: ExpertWeights, call: SpreadExpertsCall) -> Tensor:
    """Differentiable, for no rows too."""
    parts = [_one_expert(x[each.first : each.end], each.expert, operands, call) for each in ranges]
    if not parts:
        return _one_expert(x, 0, operands, call)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _one_expert(x: Tensor, expert: int, operands: ExpertWeights, call: SpreadExpertsCall) -> Tensor:
    gate_up_bias = None if operands.gate_up_bias is None else operands.gate_up_bias[expert]
    down_bias = None if operands.down_bias is None else operands.down_bias[expert]
    inner = call.act(functional.linear(x, operands.gate_up[expert], gate_up_bias))
    return functional.linear(inner, operands.down[expert], down_bias)
