"""Reference of a mixture whose experts are spread over ranks, in one process that has all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.exchange.call import SpreadExpertsCall
from weaveopt.ops.experts.exchange.library import combine
from weaveopt.ops.experts.exchange.local_experts import expert_rows

Tensor = torch.Tensor


def reference(
    x: Sequence[Tensor],
    experts: Sequence[Tensor],
    weights: Sequence[Tensor],
    operands: Sequence[ExpertWeights],
    call: SpreadExpertsCall,
) -> list[Tensor]:
    """Result [tokens, hidden] of every rank, from all ranks' arguments."""
    return [reference_of_rank(*mine, operands, call) for mine in zip(x, experts, weights, strict=True)]


def reference_of_rank(
    x: Tensor, experts: Tensor, weights: Tensor, operands: Sequence[ExpertWeights], call: SpreadExpertsCall
) -> Tensor:
    """Result [tokens, hidden] for one rank's tokens; `operands` are the experts of every rank."""
    by_choice = x.new_zeros(*experts.shape, call.hidden)
    for expert in range(call.world * call.num_experts):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        if token.numel():
            rank, local_id = divmod(expert, call.num_experts)
            ids = torch.full_like(token, local_id)
            by_choice[token, choice] = expert_rows(x[token], ids, operands[rank], call)
    is_someones = (experts >= 0) & (experts < call.world * call.num_experts)
    return combine(by_choice, is_someones, weights)
