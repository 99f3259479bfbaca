"""Arguments of the operations on a mixture's experts, and operands and sizes of a call, with the limits on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weaveopt.errors import WeaveError
from weaveopt.ops.experts.by_expert import StackedWeights
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.expert_ranges import StackedWeight

Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ARGUMENTS = (
    "Tensor x, Tensor experts, Tensor weights, {weight} gate_up, Tensor? gate_up_bias, {weight} down, "
    "Tensor? down_bias, str call"
)
ARGUMENTS = _ARGUMENTS.format(weight="Tensor")
"""Arguments of every operation on a mixture's experts, in torch's schema language."""
RANGED_ARGUMENTS = _ARGUMENTS.format(weight="Tensor[]")
"""The same with weights in ranges of experts."""
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
"""Any strides are taken, so Inductor need not copy inputs into the ones that were traced."""


def traced_result(x: Tensor, *_: object) -> Tensor:
    """The result of these operations as it is traced: [tokens, hidden], contiguous."""
    return x.new_empty(x.shape)


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes of one call."""

    tokens: int
    choices: int
    """Experts that each token goes to, of all ranks."""
    experts: int
    """Number of experts on this rank."""
    hidden: int
    inner: int
    """Columns between the two GEMMs."""
    transposed: bool = False
    """True if an expert's first weight is stored as [H, N1], so that its rows are adjacent in memory."""

    @property
    def rows(self) -> int:
        """Pairs of a token and one of its choices."""
        return self.tokens * self.choices


@dataclass(frozen=True)
class ExpertOperands:
    """The tensors of one call."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    gate_up: StackedWeight
    gate_up_bias: Tensor | None
    down: StackedWeight
    down_bias: Tensor | None

    @property
    def of_experts(self) -> StackedWeights:
        return StackedWeights(self.gate_up, self.gate_up_bias, self.down, self.down_bias)


def checked_shape(operands: ExpertOperands, call: ExpertsCall) -> ExpertsShape:
    """The call's sizes. Raises `WeaveError` where operands contradict one another."""
    x, experts, weights = operands.x, operands.experts, operands.weights
    gate_up, down = operands.gate_up, operands.down
    dims = [tensor.dim() for tensor in (x, experts, weights, gate_up, down)]
    if dims != [2, 2, 2, 3, 3]:
        raise WeaveError(
            f"moe_experts takes x, experts and weights of 2 dimensions, gate_up and down of 3, found {dims}"
        )
    tokens, hidden = x.shape
    choices, num_experts, inner = experts.shape[1], gate_up.shape[0], down.shape[2]
    rows = 2 * inner if call.gated else inner
    if experts.shape != (tokens, choices) or weights.shape != (tokens, choices):
        raise WeaveError(
            f"moe_experts: x {list(x.shape)}, experts {list(experts.shape)} and weights {list(weights.shape)} do not "
            "belong together: [T, H], [T, k] and [T, k] do"
        )
    if gate_up.shape != (num_experts, rows, hidden) or down.shape != (num_experts, hidden, inner):
        raise WeaveError(
            f"moe_experts: x {list(x.shape)}, gate_up {list(gate_up.shape)} and down {list(down.shape)} do not belong "
            f"together: [T, H], [E, {'2 * I' if call.gated else 'I'}, H] and [E, H, I] do"
        )
    if min(choices, num_experts, hidden, inner) < 1:
        raise WeaveError(f"moe_experts: {choices} choices, {num_experts} experts, {hidden} x {inner}: none may be 0")
    for name, bias, size in (("gate_up", operands.gate_up_bias, rows), ("down", operands.down_bias, hidden)):
        if bias is not None and (bias.shape != (num_experts, size) or bias.dtype != x.dtype):
            raise WeaveError(
                f"moe_experts: {name}_bias is {list(bias.shape)} {bias.dtype}, not [{num_experts}, {size}] {x.dtype}"
            )
    if x.dtype not in DTYPES or not x.dtype == gate_up.dtype == down.dtype:
        raise WeaveError(
            f"moe_experts takes bf16, fp16 and fp32, all of one, found x {x.dtype}, gate_up {gate_up.dtype} and down "
            f"{down.dtype}"
        )
    if experts.dtype is not torch.int64 or weights.dtype not in (x.dtype, torch.float32):
        raise WeaveError(
            f"moe_experts takes experts in torch.int64 and weights in {x.dtype} or torch.float32, found "
            f"{experts.dtype} and {weights.dtype}"
        )
    transposed = operands.gate_up.stride(1) == 1 != operands.gate_up.stride(2)
    return ExpertsShape(tokens, choices, num_experts, hidden, inner, transposed)
