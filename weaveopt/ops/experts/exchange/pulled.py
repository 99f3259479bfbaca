"""Library form of a mixture whose ranks are independent: each pulls the experts that it lacks, and computes.

    for e in the experts that the own tokens chose:
        gate_up_e, down_e = own weights, or a copy of the peer's
        rows of e = act(x @ gate_up_e.T + bias) @ down_e.T + bias

Nobody waits: peers' weights are read from memory that they exported (`weaveopt/fabrics/exported.py`). One expert is
copied at a time, so the memory that this takes is one expert's.
"""

from __future__ import annotations

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics import exported
from weaveopt.ops.experts.by_expert import ExpertWeights, linear, ranges_of
from weaveopt.ops.experts.exchange.call import SpreadExpertsCall, check
from weaveopt.ops.experts.exchange.library import combine

Tensor = torch.Tensor


def pulled(x: Tensor, experts: Tensor, weights: Tensor, operands: ExpertWeights, call: SpreadExpertsCall) -> Tensor:
    """[tokens, hidden]. Raises `ExportError` if the weights are not shared, `WeaveError` for other operands."""
    check(x, experts, weights, operands, call)
    total, choices, group = call.world * call.num_experts, experts.shape[1], call.group
    gate_up, down = exported.places(group, operands.gate_up), exported.places(group, operands.down)
    gate_up_bias, down_bias = (
        None if each is None else exported.whole(group, each) for each in (operands.gate_up_bias, operands.down_bias)
    )
    is_known = (experts >= 0) & (experts < total)
    by_expert, order = torch.where(is_known, experts, total).reshape(-1).sort(stable=True)
    counts = torch.bincount(by_expert, minlength=total + 1).tolist()[:-1]
    rows = x[order[: sum(counts)] // choices]
    results = x.new_zeros(experts.numel(), call.hidden)
    for expert, first, end in ranges_of(counts):
        owner, local_id = divmod(expert, call.num_experts)
        first_weight, second_weight = gate_up[owner][local_id], down[owner][local_id]
        if first_weight.data_ptr() != operands.gate_up[local_id].data_ptr():
            first_weight, second_weight = first_weight.clone(), second_weight.clone()
        inner = x.new_empty(end - first, first_weight.shape[0])
        linear(rows[first:end], first_weight, None if gate_up_bias is None else gate_up_bias[expert], inner)
        product = x.new_empty(end - first, call.hidden)
        linear(call.act(inner), second_weight, None if down_bias is None else down_bias[expert], product)
        results[order[first:end]] = product
    return combine(results.view(*experts.shape, call.hidden), is_known, weights)


def no_derivative(call: SpreadExpertsCall) -> WeaveError:
    """Error of a derivative: gradients of an expert are on ranks that nobody waits for."""
    return WeaveError(
        f"site {call.site}: asked for gradients of experts whose ranks are independent, found that their weights are "
        'read by peers at any time: train with ep_implementation="weave" or "all_to_all"'
    )
