"""What is constant over the calls of an `expert_exchange`, and the weights of a rank's experts as one record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics.rows_call import RowsCall

Tensor = torch.Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swish")


@dataclass(frozen=True)
class ExpertExchangeCall(RowsCall):
    """`hidden` are the elements of a token, `max_tokens` the tokens of one rank, not of all together."""

    num_experts: int = 0
    """Of one rank; rank r has `r * num_experts` to `(r + 1) * num_experts - 1`."""
    choices: int = 0
    """Experts of a token; 0 where no memory is planned, and any number comes."""
    activation: str = "silu"
    """One of `ACTIVATIONS`; `clamped_swish` is gpt-oss's, always gated."""
    gated: bool = True
    interleaved: bool = False
    """Whether rows of `gate_up` are gate, up, gate, up, ... instead of all gates, then all ups."""
    alpha: float = 0.0
    limit: float = 0.0
    """Of `clamped_swish`."""
    same_tokens: bool = False
    """Whether all ranks have equally many tokens in every call, so that they compile the same graph."""
    batches: int = 2
    """In how many parts the experts see the rows: 1 waits for all of them, 2 begins with this rank's own."""

    def experts_call(self) -> str:
        """The call of an operation that runs the experts alone, encoded."""
        fields = ("activation", "gated", "interleaved", "alpha", "limit")
        return json.dumps({name: getattr(self, name) for name in fields}, separators=(",", ":"), sort_keys=True)

    def sources(self) -> Iterator[tuple[int, int]]:
        """The parts: from how many ranks behind this one on, up to how many."""
        parts = min(self.batches, self.world)
        if parts <= 1:
            yield 0, self.world
            return
        yield 0, 1
        others = self.world - 1
        for part in range(parts - 1):
            yield 1 + others * part // (parts - 1), 1 + others * (part + 1) // (parts - 1)


class Operands(NamedTuple):
    """Weights of one rank's E experts, of any strides. Transformers' layout: gpt-oss's are views, transposed."""

    gate_up: Tensor
    """[E, N, hidden], where N is twice the intermediate size if gated."""
    gate_up_bias: Tensor | None
    """[E, N]."""
    down: Tensor
    """[E, hidden, intermediate]."""
    down_bias: Tensor | None
    """[E, hidden]."""

    def check(self, x: Tensor, experts: Tensor, weights: Tensor, call: ExpertExchangeCall) -> None:
        """Raises `WeaveError` for shapes and dtypes that do not fit together."""
        count, gates = call.num_experts, self.gate_up.shape[1]
        inner = gates // 2 if call.gated else gates
        shapes = {
            "x": (x, (x.shape[0], call.hidden)),
            "experts": (experts, (x.shape[0], call.choices or experts.shape[-1])),
            "weights": (weights, tuple(experts.shape)),
            "gate_up": (self.gate_up, (count, gates, call.hidden)),
            "gate_up_bias": (self.gate_up_bias, (count, gates)),
            "down": (self.down, (count, call.hidden, inner)),
            "down_bias": (self.down_bias, (count, call.hidden)),
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
