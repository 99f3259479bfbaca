"""Reference of the op in plain torch, expert by expert, with every sum in fp32."""

from __future__ import annotations

import torch

from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.expert_ranges import whole
from weaveopt.ops.experts.shapes import ExpertOperands, checked_shape

Tensor = torch.Tensor


def reference(operands: ExpertOperands, call: ExpertsCall) -> Tensor:
    """Result of one call, rounded to x's dtype after each GEMM: after the activation, and after the second
    GEMM's bias."""
    shape = checked_shape(operands, call)
    x, experts = operands.x, operands.experts
    gate_up, down = whole(operands.gate_up), whole(operands.down)
    y = x.new_zeros((shape.tokens, shape.hidden), dtype=torch.float32)
    rows = x.new_zeros((shape.tokens, shape.choices, shape.hidden))
    for expert in range(shape.experts):
        token, choice = torch.where(experts == expert)
        inner = linear(x[token], gate_up[expert], _row(operands.gate_up_bias, expert))
        inner = call.act(inner).to(x.dtype)
        rows[token, choice] = linear(inner, down[expert], _row(operands.down_bias, expert)).to(x.dtype)
    own = (experts >= 0) & (experts < shape.experts)
    for at in range(shape.choices):
        weighted = operands.weights[:, at, None].float() * rows[:, at].float()
        # Not a factor of zero: the weight of a remote expert may be anything, NaN included.
        y = torch.where(own[:, at, None], y + weighted, y)
    return y.to(x.dtype)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`rows @ weight.T + bias`, in fp32."""
    product = rows.float() @ weight.float().T
    return product if bias is None else product + bias.float()


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
