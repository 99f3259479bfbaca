"""The op on CPUs: tokens sorted by expert, then the library's GEMMs, two an expert that has tokens."""

from __future__ import annotations

import torch

from weaveopt.expert_kernels.call import ExpertsCall
from weaveopt.expert_kernels.shapes import Operands, checked_shape
from weaveopt.mixtures.by_expert import ranges_of, through_experts

Tensor = torch.Tensor


def on_cpu(operands: Operands, call: ExpertsCall) -> Tensor:
    """`weave::moe_experts` on a CPU."""
    shape = checked_shape(operands, call)
    x, chosen = operands.x, operands.experts.reshape(-1)
    own = (chosen >= 0) & (chosen < shape.experts)
    by_expert, order = torch.where(own, chosen, shape.experts).sort(stable=True)
    counts = torch.bincount(by_expert, minlength=shape.experts + 1).tolist()[:-1]
    order = order[: sum(counts)]
    rows = x.index_select(0, order // shape.choices)
    product = through_experts(rows, ranges_of(counts), operands.of_experts, call.act)
    # Foreign choices' rows are zero.
    new = x.new_empty if len(order) == shape.rows else x.new_zeros
    results = new((shape.rows, shape.hidden))
    results.index_copy_(0, order, product)
    return combine(results.view(shape.tokens, shape.choices, shape.hidden), operands, own)


def combine(results: Tensor, operands: Operands, own: Tensor) -> Tensor:
    """The weighted sum of `results` [T, k, H] over the own ones of each token's choices, in their order, in fp32."""
    tokens, choices = operands.experts.shape
    # Zero times zero: a foreign choice's weight may be anything.
    weights = operands.weights.float().masked_fill(~own.view(tokens, choices), 0.0)
    y = results[:, 0].float() * weights[:, :1]
    for choice in range(1, choices):
        y.addcmul_(results[:, choice].float(), weights[:, choice : choice + 1])
    return y.to(operands.x.dtype)
