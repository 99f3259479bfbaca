"""`expert_exchange` over the process group's own collectives, and its derivative.

Four exchanges: how many rows and routes go to each rank, the rows, their local expert ids, and the results. As over
shared memory one row is sent for each (token, destination), and one is returned for each choice. How much each rank
gets is known on the device alone, and the collectives want it on the host: one synchronization a call, so on GPUs a
CUDA graph cannot hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.exchange.local_experts import expert_rows

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional


def through_library(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    operands: ExpertWeights,
    call: ExpertExchangeCall,
    differentiable: bool = False,
) -> Tensor:
    """The op, if asked differentiable in `x`, `weights` and `operands`; all ranks of the group call it together."""
    choices = experts.shape[1]
    ranks = torch.arange(call.world, device=x.device)[:, None, None]
    is_sent = torch.div(experts, call.num_experts, rounding_mode="floor") == ranks  # [world, tokens, choices]
    to, token = is_sent.any(-1).nonzero(as_tuple=True)
    local_ids = torch.where(is_sent[to, token], experts[token] - to[:, None] * call.num_experts, -1)
    counts = torch.stack([is_sent.any(-1).sum(1), is_sent.sum((1, 2))], dim=1)
    sent, received = counts, _exchange(counts, [1] * call.world, [1] * call.world, call.group)
    (rows_out, routes_out), (rows_in, routes_in) = torch.stack([sent, received]).transpose(1, 2).tolist()
    rows = _Exchange.apply(x[token], rows_out, rows_in, call.group)
    ids = _exchange(local_ids, rows_out, rows_in, call.group)
    row, choice = (ids >= 0).nonzero(as_tuple=True)
    found = ids[row, choice]
    order = torch.argsort(found, stable=True)
    results = expert_rows(rows[row[order]], found[order], operands, call, differentiable)
    returned = _Exchange.apply(results[torch.argsort(order)], routes_in, routes_out, call.group)
    _, token, choice = is_sent.nonzero(as_tuple=True)
    by_choice = returned.new_zeros(experts.numel(), call.hidden).index_copy(0, token * choices + choice, returned)
    return combine(by_choice.view(*experts.shape, call.hidden), is_sent.any(0), weights)


def combine(by_choice: Tensor, is_someones: Tensor, weights: Tensor) -> Tensor:
    """The sum over choices of `weights * by_choice` [tokens, choices, hidden], in fp32 and in their order.

    Where `is_someones` is false, `by_choice` is zero and the weight may be anything.
    """
    factors = weights.float().masked_fill(~is_someones, 0.0)
    total = by_choice.new_zeros(by_choice.shape[0], by_choice.shape[2], dtype=torch.float32)
    for choice in range(by_choice.shape[1]):
        total = total + factors[:, choice, None] * by_choice[:, choice].float()
    return total.to(by_choice.dtype)


def derivative(
    grad: Tensor, x: Tensor, experts: Tensor, weights: Tensor, operands: ExpertWeights, call: ExpertExchangeCall
) -> tuple[Tensor, ...]:
    """Derivative of the op by `x`, `weights` and the operands that are there. It runs the forward again; nothing is
    saved.

    Every rank gets the gradients of its own tokens, and for its experts those of the tokens of all ranks.
    """
    given = [each for each in (x, weights, *operands) if each is not None]
    with _autograd(), torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in given]
        x, weights, *rest = leaves
        at = iter(rest)
        gate_up, gate_up_bias, down, down_bias = (None if each is None else next(at) for each in operands)
        assert gate_up is not None and down is not None, "experts without weights"
        again = ExpertWeights(gate_up, gate_up_bias, down, down_bias)
        out = through_library(x, experts, weights, again, call, differentiable=True)
        found = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if each is None else each.contiguous() for each, leaf in zip(found, leaves, strict=True)
    )


def _exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Rows by destination -> rows by source."""
    got: Tensor = _c10d.wait_tensor(_c10d.all_to_all_single(rows.contiguous(), received, sent, group))
    return got


class _Exchange(torch.autograd.Function):
    """`_exchange` with its derivative, which sends gradients in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
        ctx.back = (received, sent, group)
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, *ctx.back), None, None, None


@contextmanager
def _autograd():  # type: ignore[no-untyped-def]
    """Autograd inside of an operator, whose kernels run below it."""
    keys = torch._C.DispatchKey
    with torch._C._PreserveDispatchKeyGuard():
        for key in (keys.AutogradFunctionality, keys.AutogradCPU, keys.AutogradCUDA, keys.ADInplaceOrView):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield
