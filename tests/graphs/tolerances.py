"""How far a fused result may be from the reference: one table for all tests, by activation dtype.

The reference sums in fp32 like the kernels, so what differs is the order of sums within a row. That can turn a
rounding to the activation dtype the other way, by one unit in the last place, and what is made of it follows: so the
table goes by the activation dtype even where the result is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """`|got - want| <= absolute + relative * |want|`."""

    relative: float
    absolute: float


KERNEL: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(relative=2e-5, absolute=2e-5),
    torch.float16: Tolerance(relative=2e-3, absolute=4e-3),
    torch.bfloat16: Tolerance(relative=1.6e-2, absolute=3.2e-2),
}
"""A kernel against its reference: two units in the last place, of the value and of values around 4 that cancel."""

LIBRARY: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(relative=2e-5, absolute=2e-5),
    torch.float16: Tolerance(relative=8e-3, absolute=1.6e-2),
    torch.bfloat16: Tolerance(relative=6e-2, absolute=1.2e-1),
}
"""Tolerances for a library's all-reduce, which sums in the activation dtype: one rounding more per rank."""


def assert_close(
    got: torch.Tensor,
    want: torch.Tensor,
    table: dict[torch.dtype, Tolerance],
    what: str = "",
    activations: torch.dtype | None = None,
) -> None:
    """Shape, dtype and values; `what` names the case in the message, `activations` the dtype if not `want`'s."""
    tolerance = table[activations or want.dtype]
    torch.testing.assert_close(
        got, want, rtol=tolerance.relative, atol=tolerance.absolute, msg=lambda text: f"{what}\n{text}"
    )
