"""`weave::expert_prefetch`: a mixture whose experts are spread over ranks, computed by each rank for its own tokens.

    all_gate_up, all_down = cat(gate_up of all ranks), cat(down of all ranks)           # as views, not copied
    for t, j: e = experts[t, j]
        row[t, j] = act(x[t] @ all_gate_up[e].T + bias[e]) @ all_down[e].T + bias[e]    # in x's dtype
    y[t] = sum over j of weights[t, j] * row[t, j]                                      # in fp32, rounded once

Arguments are those of `weave::expert_exchange`: `x` [tokens, hidden] in bf16, fp16 or fp32, this rank's own tokens, any
number of them, none included; `experts` [tokens, choices] int64, ids over all ranks (an id of no expert contributes
nothing); `weights` [tokens, choices] of any dtype; `gate_up` [num_experts, N, hidden], `down` [num_experts, hidden, N
or N / 2] and their biases are this rank's experts in x's dtype, of any strides, and have to be the tensors that
`weaveopt.fabrics.exported` shared. `call` is an encoded `ExpertPrefetchCall`. The result is [tokens, hidden] in x's
dtype, bitwise the same from call to call and whatever the other ranks do.

The operation is pure and waits for nobody: a rank that is stopped, or was killed, is still read (DWDP, section 2).
Form `in_place`: the kernels of `weave::moe_experts.ranges` take one range of experts for each rank (section 4.2, no
merge copy), and read only experts that were chosen; CPU ranks in shared memory, GPUs over the link, once for each tile
of an expert's rows. Form `ahead`, on GPUs, for more than `in_place_tokens` tokens: copy engines pull all experts that
the rank lacks a layer ahead, into slots, and the kernels take ranges of this GPU's memory (`ahead.py`). A model's first
call waits for what is kept for good; otherwise nothing waits for the device, and a CUDA graph may hold the call.

Raises `ExportError` if a weight was not shared, or its storage is another one since; `WeaveError` for operands that do
not fit together, and in its derivative: peers read the weights at any time, so nobody may train them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weaveopt.fabrics import exported
from weaveopt.fabrics.rows_call import decode
from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.exchange.call import check
from weaveopt.ops.experts.exchange.pulled import no_derivative
from weaveopt.ops.experts.expert_ranges import joined
from weaveopt.ops.experts.op import compute
from weaveopt.ops.experts.prefetch.ahead import Weights, reading
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall, PrefetchForm, experts_call
from weaveopt.ops.experts.shapes import ARGUMENTS, TAGS, ExpertOperands, traced_result

Tensor = torch.Tensor
NAME = "expert_prefetch"


def _run(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    call: str,
) -> Tensor:
    decoded = decode(ExpertPrefetchCall, call)
    group = decoded.group
    check(x, experts, weights, ExpertWeights(gate_up, gate_up_bias, down, down_bias), decoded)
    biases = [None if each is None else exported.whole(group, each) for each in (gate_up_bias, down_bias)]
    with torch._C._AutoDispatchBelowAutograd(), _reading(x, gate_up, down, decoded) as read:
        first, second = read or (joined(exported.places(group, each)) for each in (gate_up, down))
        factors = weights if weights.dtype is x.dtype else weights.float()
        operands = ExpertOperands(x, experts, factors, first, biases[0], second, biases[1])
        return compute(operands, experts_call(decoded))


def _reading(
    x: Tensor, gate_up: Tensor, down: Tensor, call: ExpertPrefetchCall
) -> AbstractContextManager[Weights | None]:
    """Experts that are fetched ahead, as long as kernels that read them are launched; None: they are read in place."""
    if call.form == PrefetchForm.AHEAD and x.is_cuda and len(x) > call.in_place_tokens:
        return reading(gate_up, down, call)
    return nullcontext()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.call = inputs[-1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    raise no_derivative(decode(ExpertPrefetchCall, ctx.call))


_library = torch.library.Library("weave", "FRAGMENT")
_library.define(f"{NAME}({ARGUMENTS}) -> Tensor", tags=TAGS)
for _device in ("CPU", "CUDA"):
    _library.impl(NAME, _run, _device)
torch.library.register_fake(f"weave::{NAME}", traced_result, lib=_library)
torch.library.register_autograd(f"weave::{NAME}", _backward, setup_context=_save, lib=_library)
