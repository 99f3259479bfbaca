"""The op on GPUs: whose kernels run."""

from __future__ import annotations

import torch

from weaveopt.expert_kernels import gpu, hopper
from weaveopt.expert_kernels.call import ExpertsCall, Kernels
from weaveopt.expert_kernels.plan import plan
from weaveopt.expert_kernels.shapes import Operands, checked_shape
from weaveopt.ops.moe_experts.plain import plain


def on_gpu(operands: Operands, call: ExpertsCall) -> torch.Tensor:
    """`weave::moe_experts` on a GPU."""
    shape = checked_shape(operands, call)
    if not gpu.has_kernels(operands, shape):
        return plain(operands, call)
    kernels = call.kernels_at(shape.tokens)
    if kernels != Kernels.TRITON and not hopper.unsupported(operands, shape):
        return hopper.launch(operands, call, hopper.plan_of(kernels, operands, shape))
    return gpu.launch(operands, call, plan(shape, gpu.num_sms(operands.x.device), call.gated))
