"""Calls of mixtures whose experts are spread over ranks: their constants and the check of their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.rows_call import RowsCall
from weaveopt.ops.experts.activation import Activation
from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.call import ExpertsKernel

Tensor = torch.Tensor


@dataclass(frozen=True)
class SpreadExpertsCall(RowsCall):
    """`hidden` are the elements of a token, `max_tokens` the tokens of one rank, not of all together."""

    num_experts: int = 0
    """Experts of one rank; rank r has `r * num_experts` to `(r + 1) * num_experts - 1`."""
    choices: int = 0
    """Experts of a token; 0 where no memory is planned, and any number comes."""
    activation: str = "silu"
    """A word of `ActivationName`."""
    gated: bool = True
    interleaved: bool = False
    """True if rows of `gate_up` are gate, up, gate, up, ... instead of all gates, then all ups."""
    alpha: float = 1.0
    limit: float = 0.0
    """As in `Activation`."""
    same_tokens: bool = False
    """True if all ranks have equally many tokens in every call, so that they compile the same graph. Otherwise they
    agree on a call, and reserve its memory, when they make it first."""
    independent: bool = False
    """True if ranks promise no common calls: no rank may wait for another one, so tokens stay where they are."""

    @property
    def act(self) -> Activation:
        """Activation between the two GEMMs."""
        return Activation(self.activation, self.gated, self.interleaved, self.alpha, self.limit)


@dataclass(frozen=True)
class ExpertExchangeCall(SpreadExpertsCall):
    """The call of `weave::expert_exchange`."""

    arena_bytes: int = 0
    """Least bytes of the arena, if it is reserved in the first call."""
    batches: int = 2
    """In how many parts the experts see the rows: 1 waits for all of them, 2 begins with this rank's own."""

    kernels: str = ExpertsKernel.TRITON
    """The experts' kernels on GPUs, a word of `ExpertsKernel`."""
    few_tokens: int = 0
    """Largest token count of a rank for which Triton's kernels run, whatever `kernels` are."""

    def kernels_at(self, tokens: int) -> str:
        """Whose kernels run for so many tokens of a rank."""
        return ExpertsKernel.TRITON.value if tokens <= self.few_tokens else self.kernels

    def sources(self) -> Iterator[tuple[int, int]]:
        """The parts: each a range of source ranks, counted from this one."""
        parts = min(self.batches, self.world)
        if parts <= 1:
            yield 0, self.world
            return
        yield 0, 1
        others = self.world - 1
        for part in range(parts - 1):
            yield 1 + others * part // (parts - 1), 1 + others * (part + 1) // (parts - 1)


def check(x: Tensor, experts: Tensor, weights: Tensor, operands: ExpertWeights, call: SpreadExpertsCall) -> None:
    """Raises `WeaveError` for shapes and dtypes that do not fit together."""
    count, gates = call.num_experts, operands.gate_up.shape[1]
    inner = gates // 2 if call.gated else gates
    shapes = {
        "x": (x, (x.shape[0], call.hidden)),
        "experts": (experts, (x.shape[0], call.choices or experts.shape[-1])),
        "weights": (weights, tuple(experts.shape)),
        "gate_up": (operands.gate_up, (count, gates, call.hidden)),
        "gate_up_bias": (operands.gate_up_bias, (count, gates)),
        "down": (operands.down, (count, call.hidden, inner)),
        "down_bias": (operands.down_bias, (count, call.hidden)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise WeaveError(f"site {call.site}: {name} is {tuple(tensor.shape)}, expected {shape}")
    if experts.dtype is not torch.int64:
        raise WeaveError(f"site {call.site}: experts are {experts.dtype}, expected torch.int64")
    wanted = getattr(torch, call.dtype)
    for name in ("x", "gate_up", "gate_up_bias", "down", "down_bias"):
        tensor = shapes[name][0]
        if tensor is not None and tensor.dtype is not wanted:
            raise WeaveError(f"site {call.site}: {name} is {tensor.dtype}, expected {wanted}")


class RowTraffic(NamedTuple):
    """Rows between this rank and others since the site was bound."""

    dispatched: int
    """Rows of this rank's tokens, pushed to others."""
    returned: int
    """Results: on CPU ranks those that this one's experts sent back, on GPUs those that this one received. The sum over
    all ranks is the same."""
