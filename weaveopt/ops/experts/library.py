"""The op through the library's GEMMs: on CPUs two for each expert that has tokens, on tokens sorted by expert; on GPUs
where the kernels do not run, every expert on every token."""

from __future__ import annotations

import torch

from weaveopt.ops.experts.by_expert import blocks_of, ranges_of, through_experts
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.expert_ranges import StackedWeight
from weaveopt.ops.experts.shapes import ExpertOperands, checked_shape

Tensor = torch.Tensor
COMBINED_TOKENS = 128
"""Tokens whose results are added at a time on a CPU: their sums in fp32 stay in the cache."""


def on_cpu(operands: ExpertOperands, call: ExpertsCall) -> Tensor:
    """`weave::moe_experts` on a CPU."""
    shape = checked_shape(operands, call)
    x, chosen = operands.x, operands.experts.reshape(-1)
    own = (chosen >= 0) & (chosen < shape.experts)
    by_expert, order = torch.where(own, chosen, shape.experts).sort(stable=True)
    counts = torch.bincount(by_expert, minlength=shape.experts + 1).tolist()[:-1]
    tokens = order // shape.choices
    # Foreign choices' rows are zero.
    new = x.new_empty if sum(counts) == shape.rows else x.new_zeros
    results = new((shape.rows, shape.hidden))
    for taken, ranges in blocks_of(ranges_of(counts)):
        rows = x.index_select(0, tokens[taken])
        results.index_copy_(0, order[taken], through_experts(rows, ranges, operands.of_experts, call.act))
    return combine(results.view(shape.tokens, shape.choices, shape.hidden), operands, own)


def combine(results: Tensor, operands: ExpertOperands, own: Tensor) -> Tensor:
    """The weighted sum of `results` [T, k, H] over the own ones of each token's choices, in their order, in fp32."""
    x = operands.x
    tokens, choices = operands.experts.shape
    # Zero times zero: the weight of a remote expert may be anything.
    weights = operands.weights.float().masked_fill(~own.view(tokens, choices), 0.0)
    most = COMBINED_TOKENS if x.is_cpu else max(tokens, 1)
    sums = x.new_empty((tokens, results.shape[2]))
    for first in range(0, tokens, most):
        taken = slice(first, first + most)
        y = results[taken, 0].float() * weights[taken, :1]
        for choice in range(1, choices):
            y.addcmul_(results[taken, choice].float(), weights[taken, choice : choice + 1])
        sums[taken] = y
    return sums


def plain(operands: ExpertOperands, call: ExpertsCall) -> Tensor:
    """`weave::moe_experts` on any device, without looking at what is on it: fp32, no Triton, no tensor cores for bf16.

    Graph-safe: every expert multiplies every token, and what was not chosen is left out by `where`. So it costs E / k
    times the arithmetic of the kernels, reads all of this rank's experts whoever was chosen, and passes k times over
    the result for each of them. It is there so that a call never fails; a rewrite that counts on it would not pay.
    """
    shape = checked_shape(operands, call)
    x, experts = operands.x, operands.experts
    results = x.new_zeros((shape.tokens, shape.choices, shape.hidden))
    for expert in range(shape.experts):
        inner = call.act(_linear(x, operands.gate_up, operands.gate_up_bias, expert))
        product = _linear(inner, operands.down, operands.down_bias, expert)
        results = torch.where((experts == expert)[..., None], product[:, None], results)
    return combine(results, operands, (experts >= 0) & (experts < shape.experts))


def _linear(rows: Tensor, weight: StackedWeight, bias: Tensor | None, expert: int) -> Tensor:
    return torch.mm(rows, weight[expert].T) if bias is None else torch.addmm(bias[expert], rows, weight[expert].T)
