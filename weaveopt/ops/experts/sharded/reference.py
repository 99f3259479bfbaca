"""Reference of `expert_exchange` in one process that has all ranks' tokens and experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.sharded.call import ExpertExchangeCall
from weaveopt.ops.experts.sharded.library import combine
from weaveopt.ops.experts.sharded.local_experts import expert_rows

Tensor = torch.Tensor


def reference(
    x: Sequence[Tensor],
    experts: Sequence[Tensor],
    weights: Sequence[Tensor],
    operands: Sequence[ExpertWeights],
    call: ExpertExchangeCall,
) -> list[Tensor]:
    """Result [tokens, hidden] of every rank, from all ranks' arguments."""
    return [_of_rank(*mine, operands, call) for mine in zip(x, experts, weights, strict=True)]


def _of_rank(
    x: Tensor, experts: Tensor, weights: Tensor, operands: Sequence[ExpertWeights], call: ExpertExchangeCall
) -> Tensor:
    by_choice = x.new_zeros(*experts.shape, call.hidden)
    for expert in range(call.world * call.num_experts):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        if token.numel():
            rank, local_id = divmod(expert, call.num_experts)
            ids = torch.full_like(token, local_id)
            by_choice[token, choice] = expert_rows(x[token], ids, operands[rank], call)
    is_someones = (experts >= 0) & (experts < call.world * call.num_experts)
    return combine(by_choice, is_someones, weights)
