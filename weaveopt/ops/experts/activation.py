"""Activation between the two GEMMs of an expert: its computation, and the recognition of activations by their values.

    gate, up = z.chunk(2, -1)               # or z[..., 0::2], z[..., 1::2]; or all of z is the gate, and there is no up
    h = silu(gate) * up                     # gelu (erf or tanh), relu, relu squared
    h = (up + 1) * gate * sigmoid(alpha * gate)

with gate = min(gate, limit) and up = clamp(up, -limit, limit) if there is a limit. Torch and models write these in many
forms, so a computation is recognized by running it on numbers (`computing`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class ActivationName(StrEnum):
    """The functions in the module's docstring."""

    SILU = "silu"
    GELU = "gelu"
    """Exact form, by the error function."""
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    CLAMPED_SWISH = "clamped_swish"
    """Clamped swish of gate and up together: `(up + 1) * gate * sigmoid(alpha * gate)`."""


_OF_THE_GATE: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        ActivationName.SILU: F.silu,
        ActivationName.GELU: F.gelu,
        ActivationName.GELU_TANH: partial(F.gelu, approximate="tanh"),
        ActivationName.RELU: F.relu,
        ActivationName.RELU_SQUARED: lambda gate: F.relu(gate).square(),
    }
)


@dataclass(frozen=True)
class Activation:
    """One of the activations in the module's docstring."""

    name: str
    """A word of `ActivationName`."""
    gated: bool = True
    """True if the first GEMM computes gate and up, so that the second one's input is `name(gate) * up`."""
    interleaved: bool = False
    """True if gate and up alternate along a row; otherwise all gates come first."""
    alpha: float = 1.0
    """Parameter of `clamped_swish`."""
    limit: float = 0.0
    """0: nothing is clamped."""

    def __str__(self) -> str:
        inside = "gate" if self.gated else "z"
        limit = f", limit={self.limit:g}" if self.limit else ""
        if self.name == ActivationName.CLAMPED_SWISH:
            return f"{self.name}({inside}, alpha={self.alpha:g}{limit}) * (up + 1)"
        return f"{self.name}({inside}{limit})" + (" * up" if self.gated else "")

    def __call__(self, z: Tensor) -> Tensor:
        """`z` [..., N] as the first GEMM leaves it -> [..., N / 2] if gated, else [..., N]; in z's dtype, every step
        rounded as models do it. Differentiable."""
        if not self.gated:
            return _OF_THE_GATE[self.name](z)
        gate, up = (z[..., ::2], z[..., 1::2]) if self.interleaved else z.chunk(2, -1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.name == ActivationName.CLAMPED_SWISH:
            return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        activated = _OF_THE_GATE[self.name](gate)
        return activated * up if z.requires_grad else activated.mul_(up)


_PROBE_ROWS = 3
_PROBE_SCALES = (4.0, 64.0, 4096.0)
"""Numbers around 0, where activations differ, and large ones, where some are cut off by other means than a clamp."""


def computing(
    run: Callable[[Tensor], Tensor],
    size: int,
    gated: bool,
    limits: Iterable[float] = (),
    alphas: Iterable[float] = (),
    tolerance: float = 1e-6,
) -> Activation | None:
    """The activation that `run` computes on [rows, size] of fp64 numbers; None where none is known.

    `limits` and `alphas` are the numbers that it may contain. Raises what `run` raises.
    """
    tried = sorted({limit for limit in limits if 0 < limit < float("inf")})
    scales = (*_PROBE_SCALES, *(4.0 * limit for limit in tried))
    probes = [_probe(size, scale) for scale in scales]
    results = [run(probe.clone()) for probe in probes]
    for each in _hypotheses(gated, tried, sorted({*alphas})):
        if all(_agree(each(z), found, tolerance) for z, found in zip(probes, results, strict=True)):
            return each
    return None


def _probe(size: int, scale: float) -> Tensor:
    """Values on either side of every limit."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(_PROBE_ROWS, size, generator=random, dtype=torch.float64) * scale


def _agree(ours: Tensor, found: Tensor, tolerance: float) -> bool:
    return ours.shape == found.shape and torch.allclose(ours, found.double(), rtol=tolerance, atol=tolerance)


def _hypotheses(gated: bool, limits: list[float], alphas: list[float]) -> Iterator[Activation]:
    orders = (False, True) if gated else (False,)
    for limit, interleaved, name in itertools.product((*limits, 0.0) if gated else (0.0,), orders, _OF_THE_GATE):
        yield Activation(str(name), gated, interleaved, limit=limit)
    if gated:
        for limit, interleaved, alpha in itertools.product((*limits, 0.0), orders, (*alphas, 1.0)):
            yield Activation(str(ActivationName.CLAMPED_SWISH), gated, interleaved, alpha, limit)
