"""How far a fused result may be from the reference: one table for all tests, by dtype of the result.

The reference sums in fp32 like the kernels, so what differs is the order of sums within a row, at most one
rounding to the result's dtype.
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
    torch.float16: Tolerance(relative=2e-3, absolute=1e-3),
    torch.bfloat16: Tolerance(relative=1.6e-2, absolute=8e-3),
}
"""A kernel against its reference: two units in the last place of the dtype."""

LIBRARY: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(relative=2e-5, absolute=2e-5),
    torch.float16: Tolerance(relative=8e-3, absolute=8e-3),
    torch.bfloat16: Tolerance(relative=6e-2, absolute=6e-2),
}
"""Where a library's all-reduce sums in the activation dtype: one rounding more per rank."""


def assert_close(got: torch.Tensor, want: torch.Tensor, table: dict[torch.dtype, Tolerance], what: str = "") -> None:
    """Shape, dtype and values; `what` names the case in the message."""
    tolerance = table[want.dtype]
    torch.testing.assert_close(
        got, want, rtol=tolerance.relative, atol=tolerance.absolute, msg=lambda text: f"{what}\n{text}"
    )
