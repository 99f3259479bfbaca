"""The op's tensor arguments as its implementations pass them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weaveopt.ops.reduction.call import ReductionCall

Tensor = torch.Tensor
Argument = Tensor | str | None
"""Types of the schema's arguments after the first ones: operands, then the encoded call."""
Results = tuple[Tensor, Tensor]
"""normalized, sum."""
QuantResults = tuple[Tensor, Tensor, Tensor]
"""normalized, sum, row_scale."""


class DeferredGemm(NamedTuple):
    """`partial = a @ b (+ addend)`, not computed yet: [tokens, k] @ [k, hidden]."""

    a: Tensor
    b: Tensor
    addend: Tensor | None

    @property
    def num_tokens(self) -> int:
        return self.a.shape[0]

    def compute(self, out: Tensor | None = None) -> Tensor:
        """The partial result [tokens, hidden], written to `out` where given."""
        if out is None:
            return torch.mm(self.a, self.b) if self.addend is None else torch.addmm(self.addend, self.a, self.b)
        if self.addend is None:
            return torch.mm(self.a, self.b, out=out)
        return torch.addmm(self.addend, self.a, self.b, out=out)


class EpilogueOperands(NamedTuple):
    """Operands of the computation after the reduction; every one is optional. Vectors are [hidden], scales []."""

    reduced_bias: Tensor | None = None
    scale: Tensor | None = None
    residual: Tensor | None = None
    """[..., hidden], of as many rows as the partial result."""
    post_weight: Tensor | None = None
    post_bias: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    quant_scale: Tensor | None = None
    """Value that 1 in e4m3 represents, if call.quant is `static`."""

    @property
    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The parameters of a row's length, in the order in which native code takes them."""
        return self.reduced_bias, self.post_weight, self.post_bias, self.weight, self.bias

    def replicated(self, call: ReductionCall) -> tuple[tuple[str, Tensor | None], ...]:
        """Operands that must be equal on every rank, by name: each rank computes its own rows with its own copy."""
        return (
            ("bias", self.reduced_bias),
            ("scale", self.scale),
            ("weight of the first norm", self.post_weight),
            ("bias of the first norm", self.post_bias),
            ("norm weight", self.weight),
            ("norm bias", self.bias),
            ("scale of the quantization", self.quant_scale),
            ("residual", None if call.residual_sharded else self.residual),
        )


def split(rest: tuple[Argument, ...]) -> tuple[EpilogueOperands, str]:
    """The schema's arguments after the first ones: the operands in their order, then the encoded call."""
    return EpilogueOperands(*rest[:-1]), rest[-1]  # type: ignore[arg-type, return-value]
