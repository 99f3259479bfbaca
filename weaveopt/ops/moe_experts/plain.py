"""The op in plain torch for GPUs where the kernels do not run: fp32, no Triton, no tensor cores for bf16.

Graph-safe: every expert multiplies every token, and what was not chosen is left out by `where`. So it costs E / k times
the arithmetic of the kernels, reads all of this rank's experts whoever was chosen, and passes k times over the result
for each of them. It is there so that a call never fails; a rewrite that counts on it would not pay.
"""

from __future__ import annotations

import torch

from weaveopt.expert_kernels.call import ExpertsCall
from weaveopt.expert_kernels.shapes import Operands, checked_shape
from weaveopt.ops.moe_experts.cpu import combine

Tensor = torch.Tensor


def plain(operands: Operands, call: ExpertsCall) -> Tensor:
    """`weave::moe_experts` on any device, without looking at what is on it."""
    shape = checked_shape(operands, call)
    x, experts = operands.x, operands.experts
    results = x.new_zeros((shape.tokens, shape.choices, shape.hidden))
    for expert in range(shape.experts):
        inner = call.act(_linear(x, operands.gate_up, operands.gate_up_bias, expert))
        product = _linear(inner, operands.down, operands.down_bias, expert)
        results = torch.where((experts == expert)[..., None], product[:, None], results)
    return combine(results, operands, (experts >= 0) & (experts < shape.experts))


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return torch.mm(rows, weight[expert].T) if bias is None else torch.addmm(bias[expert], rows, weight[expert].T)
