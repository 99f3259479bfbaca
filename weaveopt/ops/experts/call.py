"""Constants of the calls of a mixture's experts, and their encoding as the op's string argument."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from weaveopt.errors import WeaveError, closest
from weaveopt.fabrics import call_text
from weaveopt.ops.experts.activation import Activation, ActivationName


class ExpertsKernel(StrEnum):
    """Kernels that a GPU runs; CPUs have one implementation only."""

    TRITON = "triton"
    HOPPER = "hopper"
    """Native kernels if they run on the device, else Triton's."""
    ONE = "one_kernel"
    """Both native GEMMs in one kernel (csrc/experts/both.cuh); those of `HOPPER` if only one of the weights is
    transposed."""
    WIDE = "wide"
    """Native kernels for many rows an expert (csrc/experts/wide.cuh); those of `HOPPER` for weights they do not
    support."""


@dataclass(frozen=True)
class ExpertsCall:
    """One site's constants. `encode()` goes into the graph."""

    activation: str
    """A word of `ActivationName`."""
    gated: bool
    """True if the first GEMM computes gate and up, so that the second one's input is `activation(gate) * up`."""
    interleaved: bool = False
    """True if rows of the first weight are gate 0, up 0, gate 1, up 1, ...; else all gates come first, then all ups."""
    alpha: float = 0.0
    """Parameter of `clamped_swish`."""
    limit: float = 0.0
    """Bound of the activation's operands: gate is clamped from above, up to [-limit, limit]; 0: no bound."""
    kernels: str = ExpertsKernel.TRITON
    """A word of `ExpertsKernel`."""
    table: tuple[tuple[int, str], ...] = ()
    """Kernels by token count, ascending: (largest count, kernels); `kernels` run beyond the last row."""

    @property
    def act(self) -> Activation:
        """Activation between the two GEMMs."""
        return Activation(self.activation, self.gated, self.interleaved, self.alpha, self.limit)

    def kernels_at(self, tokens: int) -> str:
        """Whose kernels run for so many tokens."""
        return next((kernels for most, kernels in self.table if tokens <= most), self.kernels)

    def encode(self) -> str:
        return call_text.encode(self)


@cache
def decode(text: str) -> ExpertsCall:
    """The call that `encode()` made `text` from. Raises `WeaveError` if it is none or its fields contradict."""
    call = call_text.decode(ExpertsCall, text, "moe_experts")
    known = tuple(activation.value for activation in ActivationName)
    if call.activation not in known:
        raise WeaveError(f"moe_experts: no activation {call.activation!r}; {closest(call.activation, known)}")
    names = tuple(kernel.value for kernel in ExpertsKernel)
    for kernels in (call.kernels, *(each for _, each in call.table)):
        if kernels not in names:
            raise WeaveError(f"moe_experts: no kernels {kernels!r}; {closest(kernels, names)}")
    if any(most >= above for (most, _), (above, _) in itertools.pairwise(call.table)):
        raise WeaveError(f"moe_experts: token counts of a table ascend, found {call.table}")
    if call.interleaved and not call.gated:
        raise WeaveError("moe_experts: interleaved rows are of gate and up, and the call is not gated")
    if call.activation == ActivationName.CLAMPED_SWISH and not (call.gated and math.isfinite(call.alpha)):
        raise WeaveError(
            f"moe_experts: clamped_swish takes gate and up and a finite alpha, found gated {call.gated} and alpha "
            f"{call.alpha}"
        )
    if not (call.limit == 0 or (call.gated and 0 < call.limit < math.inf)):
        raise WeaveError(
            f"moe_experts: a limit is a finite number above 0, of gate and up, found gated {call.gated} and limit "
            f"{call.limit}"
        )
    return call
