"""Shapes and dtypes of the results, for tracing: no memory, no peers."""

from __future__ import annotations

import torch

from weaveopt.mixtures.by_expert import ExpertWeights

Tensor = torch.Tensor


def expert_exchange(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    call: str,
) -> Tensor:
    return x.new_empty(x.shape)


def expert_exchange_backward(
    grad: Tensor,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    call: str,
) -> list[Tensor]:
    operands = ExpertWeights(gate_up, gate_up_bias, down, down_bias)
    return [each.new_empty(each.shape) for each in (x, weights, *operands) if each is not None]
