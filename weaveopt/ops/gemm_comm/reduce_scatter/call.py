"""Constants over the calls of a site of both operators, and their tensor arguments as one record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weaveopt.cost_model.tile_config import TILES, TileKernelNames
from weaveopt.errors import WeaveError
from weaveopt.fabrics.rows_call import RowsCall
from weaveopt.wording import counted

Tensor = torch.Tensor


REDUCE_SCATTER = TileKernelNames("gemm_reduce_scatter", (TILES,), "k", (128, 256), True, "scattered_tiles")
REDUCE_SCATTER_NORM = TileKernelNames("gemm_reduce_scatter_norm", (TILES,), "k", (128, 256), True, "normed_tiles")
"""Kernels of the variants `tiles` and `tiles norm`."""


@dataclass(frozen=True)
class GemmReduceScatterCall(RowsCall):
    """`hidden` are the columns of the GEMMs, `max_tokens` their rows."""

    scale: float = 1.0
    """Factor of the sum over ranks, applied before it is rounded."""
    columns: bool = False
    """True if each rank gets its columns of all rows; false if it gets its rows."""
    cut: str = ""
    """On GPUs, tiles of the kernel that computes the GEMM and sends them (`str(TileConfig)`); empty: GEMMs of the
    library, whose results are summed after them."""
    replicated: str = ""
    """Names of values that have to be the same on all ranks, with blanks between them: every rank makes its own rows
    of what all of them read. The first call compares them."""


@dataclass(frozen=True)
class GemmReduceScatterNormCall(RowsCall):
    """Constants of `gemm_reduce_scatter_norm`: the sum over ranks is of one GEMM, and each rank gets its rows."""

    cut: str = ""
    """As in `GemmReduceScatterCall`; empty: the norm is computed after the reduce-scatter."""
    replicated: str = ""
    """As in `GemmReduceScatterCall`."""
    eps: float = 0.0
    weight_offset: float = 0.0
    """Number added to the norm's weight."""
    cast_before_weight: bool = False
    """True if rows are rounded before the weight is applied too, not only afterwards."""
    full_size_sum: bool = False
    """True if the sum is returned full-size with only this rank's rows valid."""

    def local_rows(self, num_rows: int, rank: int) -> slice:
        """This rank's `num_rows` rows in the sum as it is returned."""
        first = rank * num_rows if self.full_size_sum else 0
        return slice(first, first + num_rows)

    def sum_rows(self, num_rows: int) -> int:
        """Number of rows of the sum as it is returned."""
        return num_rows * self.world if self.full_size_sum else num_rows

    @property
    def scatter(self) -> GemmReduceScatterCall:
        """The first half alone."""
        return GemmReduceScatterCall(
            self.site, self.group, self.fabric, self.world, self.hidden, self.dtype, self.max_tokens, self.timeout_s,
            self.channel, cut=self.cut,
        )  # fmt: skip


class ShardLayout(NamedTuple):
    """A partial result is [outer, world, inner, row], and a rank's part [outer, inner, row] of its own number."""

    outer: int
    inner: int
    row: int

    def shape(self, call: GemmReduceScatterCall) -> tuple[int, int]:
        """Shape of the result: rows of all columns, or all rows of some columns."""
        return (self.outer, self.row) if call.columns else (self.outer * self.inner, self.row)


def part_of(call: GemmReduceScatterCall, tokens: int, outer: int) -> ShardLayout:
    """This rank's part of a partial result of `tokens` rows. Raises `WeaveError` if it does not divide by the ranks."""
    if not call.columns:
        return ShardLayout(outer, call.rows_of_rank(tokens, outer), call.hidden)
    if call.hidden % call.world:
        raise WeaveError(
            f"site {call.site}: {counted(call.hidden, 'column')} do not divide by {counted(call.world, 'rank')}"
        )
    return ShardLayout(tokens, 1, call.hidden // call.world)


class Products(NamedTuple):
    """`partial = sum of a @ b, + addends`, not computed yet: [tokens, k] @ [k, hidden], one k for each pair."""

    a: Sequence[Tensor]
    b: Sequence[Tensor]
    addends: Sequence[Tensor] = ()
    """[hidden], or [tokens, hidden]."""

    @property
    def num_tokens(self) -> int:
        return self.a[0].shape[0]

    def compute(self, out: Tensor | None = None) -> Tensor:
        """The partial result [tokens, hidden], written to `out` where given; rounded after each GEMM."""
        first = self.addends[0] if self.addends else None
        if first is None:
            total = torch.mm(self.a[0], self.b[0], out=out)
        else:
            total = torch.addmm(first, self.a[0], self.b[0], out=out)
        for a, b in zip(self.a[1:], self.b[1:], strict=True):
            torch.addmm(total, a, b, out=total)
        for addend in self.addends[1:]:
            total.add_(addend)
        return total
