"""Launches of the GPU kernels of a reduction, as records: what runs, on which rows, with which tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from weaveopt.fabrics.peer_rows import VECTOR_BYTES as VECTOR_BYTES

if TYPE_CHECKING:
    from weaveopt import _native

Tensor = torch.Tensor
Returned = tuple[Tensor, Tensor, Tensor | None]
"""normalized, sum, and row_scale where there is one."""

NO_KERNEL = -1
"""Kernel of a launch that needs the GEMM's operands."""


@dataclass(frozen=True)
class ReductionLaunch:
    """A row of the run-time table as it is launched."""

    max_tokens: int
    kernel: int
    """A `_native.GpuKernel` as a number, between hosts a `_native.HostTransfer`; or `NO_KERNEL`."""
    num_ctas: int
    in_place: bool
    """The kernel reads the partial result from the arena."""
    aliases_arena: bool
    """Normalized rows may be the buffer that peers write to."""
    unsupported: str
    """Why the device cannot run it; then the library does."""


class Piece(NamedTuple):
    """Tokens that one kernel takes."""

    launch: ReductionLaunch
    first: int
    num_tokens: int


class Tiled(NamedTuple):
    """A GEMM `a [tokens, k] @ weight[hidden, k].t()` that the reducing kernel computes, and how it is cut."""

    a: Tensor
    weight: Tensor
    tiles: _native.TileConfig


class Prepared(NamedTuple):
    """A call whose kernels are to be launched: its tensors, and its parameters as native code takes them."""

    rows: Tensor
    """The partial result."""
    residual: Tensor | None
    results: Returned
    parameters: _native.ReductionParameters
    kept: tuple[Tensor, ...]
