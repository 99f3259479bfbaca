"""Constants over the calls of an `all_gather_gemm` site, and its GEMMs as one record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weaveopt.cost_model.tile_config import PUSHED, TileKernelNames
from weaveopt.fabrics.rows_call import RowsCall

Tensor = torch.Tensor


ALL_GATHER = TileKernelNames("all_gather_gemm", (PUSHED,), "n", (128, 160, 256), False, "pushed_gathers")
"""Kernels of variant `pushed`."""


@dataclass(frozen=True)
class AllGatherGemmCall(RowsCall):
    """`hidden` are the columns of a gathered row, `max_tokens` the gathered rows."""

    returns_rows: bool = False
    """True if anything other than the GEMMs reads the gathered rows."""
    cut: str = ""
    """On GPUs, tiles of GEMMs that start before all rows are gathered (`str(TileConfig)`); empty: the library's GEMMs,
    after all rows."""


class Weights(NamedTuple):
    """Right operands of the GEMMs on the gathered rows: [hidden, n], one n for each GEMM."""

    b: Sequence[Tensor]
    addends: Sequence[Tensor | None]
    """[n], [tokens, n] or None, one for each GEMM."""

    def multiply(self, rows: Tensor) -> list[Tensor]:
        return [
            torch.mm(rows, b) if addend is None else torch.addmm(addend, rows, b)
            for b, addend in zip(self.b, self.addends, strict=True)
        ]


def widest_of(widths: Sequence[int]) -> int | None:
    """Index of the first widest of GEMMs with so many columns, which starts before all rows are gathered."""
    return max(range(len(widths)), key=lambda index: widths[index]) if widths else None
