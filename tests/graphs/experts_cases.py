"""Calls of `moe_experts`, random and hard, and an expression for them that is not the op's own."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weaveopt.ops.experts.activation import ActivationName
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.expert_ranges import StackedWeight, joined, whole
from weaveopt.ops.experts.shapes import ExpertOperands

Tensor = torch.Tensor

CALLS = (
    ExpertsCall(ActivationName.SILU, gated=True),
    ExpertsCall(ActivationName.GELU, gated=True, interleaved=True),
    ExpertsCall(ActivationName.GELU_TANH, gated=True),
    ExpertsCall(ActivationName.RELU, gated=False),
    ExpertsCall(ActivationName.GELU, gated=False),
    ExpertsCall(ActivationName.CLAMPED_SWISH, gated=True, interleaved=True, alpha=1.702, limit=0.8),
    ExpertsCall(ActivationName.CLAMPED_SWISH, gated=True, alpha=1.3),
    ExpertsCall(ActivationName.SILU, gated=True, limit=0.5),
    ExpertsCall(ActivationName.RELU_SQUARED, gated=False),
)
ROUTINGS = ("uniform", "some_foreign", "all_foreign", "one_expert", "skewed", "repeated")


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call."""

    tokens: int = 5
    choices: int = 2
    experts: int = 4
    hidden: int = 40
    inner: int = 24
    bias: bool = False
    transposed: bool = False
    """The weights are views of [E, H, N1] and [E, I, H]."""
    weights_in_fp32: bool = False


def make_experts(routing: str, sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Ids [T, k] on the CPU; `routing` is one of `ROUTINGS`."""
    whole = (sizes.tokens, sizes.choices)
    most = sizes.experts
    if routing == "uniform":
        return torch.randint(0, most, whole, generator=generator)
    if routing == "some_foreign":
        return torch.randint(-most, 2 * most, whole, generator=generator)
    if routing == "all_foreign":
        return torch.where(torch.rand(whole, generator=generator) < 0.5, -1, most)
    if routing == "one_expert":
        return torch.full(whole, most - 1)
    if routing == "skewed":
        # Half of the choices are of an eighth of the experts.
        few = torch.randint(0, max(1, most // 8), whole, generator=generator)
        return torch.where(
            torch.rand(whole, generator=generator) < 0.5, few, torch.randint(0, most, whole, generator=generator)
        )
    if routing == "repeated":
        return torch.randint(0, most, (sizes.tokens, 1), generator=generator).expand(whole).contiguous()
    raise ValueError(routing)


def make_operands(
    sizes: Sizes, call: ExpertsCall, dtype: torch.dtype, seed: int, routing: str = "uniform", device: str = "cpu"
) -> ExpertOperands:
    """Random operands whose results are about 1 in size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    def weight(rows: int, columns: int) -> Tensor:
        scale = columns**-0.5
        if sizes.transposed:
            return normal(sizes.experts, columns, rows, scale=scale).transpose(1, 2)
        return normal(sizes.experts, rows, columns, scale=scale)

    first = sizes.inner * (2 if call.gated else 1)
    weights = torch.rand((sizes.tokens, sizes.choices), generator=generator) / math.sqrt(sizes.choices)
    return ExpertOperands(
        normal(sizes.tokens, sizes.hidden),
        make_experts(routing, sizes, generator).to(device),
        weights.to(torch.float32 if sizes.weights_in_fp32 else dtype).to(device),
        weight(first, sizes.hidden),
        normal(sizes.experts, first, scale=0.3) if sizes.bias else None,
        weight(sizes.hidden, sizes.inner),
        normal(sizes.experts, sizes.hidden, scale=0.3) if sizes.bias else None,
    )


NUM_RANGES = (1, 2, 3, 8)


def uneven(experts: int, num_ranges: int) -> tuple[int, ...]:
    """Sizes of so many ranges that hold `experts`, some of them empty, where there are more than three."""
    if num_ranges == 1:
        return (experts,)
    sizes = [1, *[0, 1] * (num_ranges // 2)][:num_ranges]
    sizes[-1] += experts - sum(sizes)
    return tuple(sizes)


def in_ranges(operands: ExpertOperands, gate_up: Sequence[int], down: Sequence[int] | None = None) -> ExpertOperands:
    """The same weights in ranges of so many experts, each in memory of its own; `down`: of the second ones, by default
    as of the first."""

    def cut(weight: StackedWeight, sizes: Sequence[int]) -> StackedWeight:
        return joined([each.clone() for each in whole(weight).split(list(sizes))])

    return replace(
        operands, gate_up=cut(operands.gate_up, gate_up), down=cut(operands.down, gate_up if down is None else down)
    )


def expected(operands: ExpertOperands, call: ExpertsCall) -> Tensor:
    """Token by token and choice by choice in fp64, rounded nowhere."""
    x, weights, gate_up, down = (
        t.double().cpu() for t in (operands.x, operands.weights, whole(operands.gate_up), whole(operands.down))
    )
    first_bias, second_bias = (
        None if t is None else t.double().cpu() for t in (operands.gate_up_bias, operands.down_bias)
    )
    y = torch.zeros_like(x)
    for t, chosen in enumerate(operands.experts.tolist()):
        for j, e in enumerate(chosen):
            if not 0 <= e < len(gate_up):
                continue
            product = gate_up[e] @ x[t]
            if first_bias is not None:
                product = product + first_bias[e]
            row = down[e] @ acted(product, call)
            if second_bias is not None:
                row = row + second_bias[e]
            y[t] += weights[t, j] * row
    return y


def acted(product: Tensor, call: ExpertsCall) -> Tensor:
    """The activation by its formula, one column at a time."""

    def alone(g: float) -> float:
        if call.activation == ActivationName.SILU:
            return g / (1 + math.exp(-g))
        if call.activation == ActivationName.RELU:
            return max(g, 0.0)
        if call.activation == ActivationName.RELU_SQUARED:
            return max(g, 0.0) ** 2
        if call.activation == ActivationName.GELU:
            return 0.5 * g * (1 + math.erf(g / math.sqrt(2)))
        return 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))

    values = product.tolist()
    if not call.gated:
        return torch.tensor([alone(g) for g in values], dtype=torch.float64)
    inner = len(values) // 2
    pairs = [(values[2 * i], values[2 * i + 1]) if call.interleaved else (values[i], values[inner + i])
             for i in range(inner)]  # fmt: skip
    if call.limit:
        pairs = [(min(g, call.limit), max(min(u, call.limit), -call.limit)) for g, u in pairs]
    if call.activation != ActivationName.CLAMPED_SWISH:
        return torch.tensor([alone(g) * u for g, u in pairs], dtype=torch.float64)
    return torch.tensor([(u + 1) * g / (1 + math.exp(-call.alpha * g)) for g, u in pairs], dtype=torch.float64)


def random_sizes(choice: random.Random) -> Sizes:
    """Odd ones too: no size need be a multiple of anything."""
    return Sizes(
        tokens=choice.choice([1, 1, 2, 7, 33]), choices=choice.choice([1, 2, 3, 8]),
        experts=choice.choice([1, 3, 8, 17]), hidden=choice.choice([16, 40, 67, 128]),
        inner=choice.choice([8, 24, 35, 64]), bias=choice.random() < 0.5, transposed=choice.random() < 0.5,
        weights_in_fp32=choice.random() < 0.5,
    )  # fmt: skip


def poisoned(operands: ExpertOperands) -> ExpertOperands:
    """Makes weights of experts without a choice, and of remote experts' choices, NaN or infinite."""
    num_experts = operands.gate_up.shape[0]
    chosen = set(operands.experts.flatten().tolist())
    idle = [e for e in range(num_experts) if e not in chosen]
    gate_up, down, weights = whole(operands.gate_up).clone(), whole(operands.down).clone(), operands.weights.clone()
    gate_up[idle], down[idle] = math.nan, math.inf
    remote = (operands.experts < 0) | (operands.experts >= num_experts)
    weights[remote] = math.nan
    return replace(operands, gate_up=gate_up, down=down, weights=weights)
