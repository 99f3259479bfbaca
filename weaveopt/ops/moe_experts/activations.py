"""What stands between an expert's two GEMMs, in plain torch, in the dtype that it is given."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weaveopt.ops.moe_experts.call import Activation, ExpertsCall

Tensor = torch.Tensor


def activate(product: Tensor, call: ExpertsCall) -> Tensor:
    """[..., N1] as the first GEMM leaves it -> [..., I] that the second one reads."""
    if not call.gated:
        return single(product, call)
    if call.interleaved:
        gate, up = product[..., ::2], product[..., 1::2]
    else:
        gate, up = product.chunk(2, -1)
    if call.limit > 0:
        gate, up = gate.clamp(max=call.limit), up.clamp(-call.limit, call.limit)
    if call.activation == Activation.CLAMPED_SWISH:
        return (up + 1) * (gate * torch.sigmoid(gate * call.alpha))
    return single(gate, call).mul_(up)


def single(gate: Tensor, call: ExpertsCall) -> Tensor:
    """The activation alone, in new memory."""
    if call.activation == Activation.SILU:
        return F.silu(gate)
    if call.activation == Activation.RELU:
        return torch.relu(gate)
    if call.activation == Activation.RELU_SQUARED:
        return torch.relu(gate).square_()
    return F.gelu(gate, approximate="tanh" if call.activation == Activation.GELU_TANH else "none")
