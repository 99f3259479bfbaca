"""`weave::moe_experts`: the experts of a mixture.

    def moe_experts(x, experts, weights, gate_up, gate_up_bias, down, down_bias, call):
        y = zeros(T, H, dtype=float32)
        for t in range(T):
            for j in range(k):                                # in this order
                e = experts[t, j]
                if 0 <= e < E:                                # others are another rank's
                    inner = act(x[t] @ gate_up[e].T + gate_up_bias[e]).to(x.dtype)
                    row = (inner @ down[e].T + down_bias[e]).to(x.dtype)
                    y[t] += weights[t, j].float() * row.float()
        return y.to(x.dtype)

Shapes: `x` [T, H] bf16, fp16 or fp32; `experts` [T, k] int64; `weights` [T, k] in x's dtype or fp32; `gate_up`
[E, N1, H] and `down` [E, H, I] in x's dtype, with any strides; `gate_up_bias` [E, N1] and `down_bias` [E, H] in x's
dtype, or None; the result [T, H], contiguous. N1 is 2 * I where the call is gated, else I. `call` is an encoded
`ExpertsCall`: the activation, and where gate and up are. Sums are in fp32.

Weights may be stored in ranges of consecutive experts: the overload `weave::moe_experts.ranges` takes a list of up to 8
tensors [any, N1, H] of the same strides in place of `gate_up`, and another one in place of `down`. It computes the same
as with `torch.cat` of each list, without the copy; empty ranges count for nothing, and with one range the kernels are
those of one tensor. (`ExpertsKernel.ONE` runs the kernels of `ExpertsKernel.HOPPER` then.) Biases are one tensor. Name
the overload in the call: torch finds it for lists by a failed try of the other one, which prints the arguments, and a
CUDA graph captures no print.

A choice outside of 0 to E - 1 contributes nothing, whatever its weight. Experts without rows are not read.

Results are the same from call to call, bit by bit. On CPUs the library's GEMMs run, two for each expert that has tokens
(`library.py`). On GPUs Triton kernels run for bf16 and fp16: one or two sort rows by expert, two are the GEMMs, one
adds up. A call that names `ExpertsKernel.HOPPER`, `ExpertsKernel.ONE` or `ExpertsKernel.WIDE`, or whose table does for
such a token count, runs native GEMMs instead, where the GPU, the build and the weights' layout allow it (`hopper.py`).
Nothing waits for the device and sizes come from shapes alone, so calls can be captured in CUDA graphs, and what is
routed where may change between replays. fp32, and GPUs without Triton, get the plain expression, graph-safe but with E
/ k times the arithmetic (`library.plain`).

Raises `WeaveError` where shapes or dtypes contradict one another, or `call` is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weaveopt.ops.experts import gpu, hopper
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel, decode
from weaveopt.ops.experts.expert_ranges import joined
from weaveopt.ops.experts.library import on_cpu, plain
from weaveopt.ops.experts.shapes import ARGUMENTS, RANGED_ARGUMENTS, TAGS, ExpertOperands, checked_shape, traced_result

Tensor = torch.Tensor


Weight = Tensor | Sequence[Tensor]
"""In one tensor, or in ranges of experts: the overload's."""


def _operands(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Weight, gate_up_bias: Tensor | None, down: Weight,
    down_bias: Tensor | None,
) -> ExpertOperands:  # fmt: skip
    first, second = (each if isinstance(each, Tensor) else joined(each) for each in (gate_up, down))
    return ExpertOperands(x, experts, weights, first, gate_up_bias, second, down_bias)


def _run(x: Tensor, *rest: Any) -> Tensor:
    *tensors, call = rest
    with torch._C._AutoDispatchBelowAutograd():
        return compute(_operands(x, *tensors), decode(call))


def _fake(x: Tensor, *rest: Any) -> Tensor:
    *tensors, call = rest
    checked_shape(_operands(x, *tensors), decode(call))
    return traced_result(x)


def compute(operands: ExpertOperands, call: ExpertsCall) -> Tensor:
    """`weave::moe_experts` on the device of the operands."""
    return _on_gpu(operands, call) if operands.x.is_cuda else on_cpu(operands, call)


def _on_gpu(operands: ExpertOperands, call: ExpertsCall) -> Tensor:
    """`weave::moe_experts` on a GPU, by the kernels that the call names for its tokens."""
    shape = checked_shape(operands, call)
    if not gpu.has_kernels(operands, shape):
        return plain(operands, call)
    kernels = call.kernels_at(shape.tokens)
    if kernels != ExpertsKernel.TRITON and not hopper.unsupported(operands, shape):
        return hopper.launch(operands, call, hopper.plan_of(kernels, operands, shape))
    return gpu.launch(operands, call, gpu.planned(shape, operands.x.device, call.gated))


_library = torch.library.Library("weave", "FRAGMENT")
for _name, _arguments in (("moe_experts", ARGUMENTS), ("moe_experts.ranges", RANGED_ARGUMENTS)):
    _library.define(f"{_name}({_arguments}) -> Tensor", tags=TAGS)
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    torch.library.register_fake(f"weave::{_name}", _fake, lib=_library)
