"""The experts of one rank on rows that are there, in plain torch.

    h = x @ gate_up[e].T + gate_up_bias[e]
    y = activation(h) @ down[e].T + down_bias[e]

`expert_rows` is the one place that says how they run: an operation for the experts alone takes it over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn import functional

from weaveopt.ops.moe_sharded.call import ExpertExchangeCall, Operands

Tensor = torch.Tensor

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
    }
)


def expert_rows(x: Tensor, experts: Tensor, operands: Operands, call: ExpertExchangeCall) -> Tensor:
    """What expert `experts[r]` makes of `x[r]`: [rows, hidden] in the dtype of `x`, rounded after each GEMM.

    `experts` [rows] are ids of this rank's experts in ascending order. Differentiable, for no rows too.
    """
    counts = torch.bincount(experts, minlength=call.num_experts).tolist()
    parts, begin = [], 0
    for expert, count in enumerate(counts):
        if count:
            parts.append(_one_expert(x[begin : begin + count], expert, operands, call))
            begin += count
    if not parts:
        return _one_expert(x, 0, operands, call)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _one_expert(x: Tensor, expert: int, operands: Operands, call: ExpertExchangeCall) -> Tensor:
    gate_up_bias = None if operands.gate_up_bias is None else operands.gate_up_bias[expert]
    down_bias = None if operands.down_bias is None else operands.down_bias[expert]
    inner = activate(functional.linear(x, operands.gate_up[expert], gate_up_bias), call)
    return functional.linear(inner, operands.down[expert], down_bias)


def activate(h: Tensor, call: ExpertExchangeCall) -> Tensor:
    """[rows, N] -> [rows, intermediate]; every step is rounded to the dtype, as transformers does."""
    if not call.gated:
        return _ACTIVATIONS[call.activation](h)
    gate, up = (h[..., ::2], h[..., 1::2]) if call.interleaved else h.chunk(2, dim=-1)
    if call.activation == "clamped_swish":
        gate, up = gate.clamp(max=call.limit), up.clamp(min=-call.limit, max=call.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * call.alpha))
    return _ACTIVATIONS[call.activation](gate) * up
