"""Rows sorted by expert: what routing kernels leave, made of a stable sort; the cases that they are tried with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weaveopt.ops.experts.plan import RowTiles
from weaveopt.ops.experts.shapes import ExpertsShape

Tensor = torch.Tensor

ROWS = (1, 31, 1024, 1025, 5000, 40000)
EXPERTS = (1, 7, 64, 65, 128, 200, 256, 257, 1023)
TILE_ROWS = (16, 32, 128, 256)
POISON = -(1 << 20)
"""In `order` and `table` before a call."""


@dataclass(frozen=True)
class RowsOf(RowTiles):
    """Tiles of so many rows."""

    rows: int


def plain(experts: Tensor, num_experts: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """`order` [own rows] and `table` [tiles, 4] in int32: see `routing_kernels`."""
    chosen = experts.flatten().cpu()
    own = (chosen >= 0) & (chosen < num_experts)
    order = torch.sort(torch.where(own, chosen, num_experts), stable=True).indices[: int(own.sum())]
    counts = torch.bincount(chosen[own], minlength=num_experts)
    ends = counts.cumsum(0)
    tiles = -(-counts // tile_rows)
    expert = torch.repeat_interleave(torch.arange(num_experts), tiles)
    within = torch.arange(len(expert)) - (tiles.cumsum(0) - tiles)[expert]
    first = (ends - counts)[expert] + within * tile_rows
    return order.int(), torch.stack([expert, first, ends[expert], (ends - counts)[expert]], 1).int()


def empty_table(num_rows: int, num_experts: int, tile_rows: int, device: str = "cpu") -> Tensor:
    """As large as any routing needs, and a row more; `POISON`."""
    rows = RowsOf(tile_rows).table_rows(ExpertsShape(num_rows, 1, num_experts, 16, 16)) + 1
    return torch.full((rows, 4), POISON, dtype=torch.int32, device=device)


def assert_sorted(order: Tensor, table: Tensor, experts: Tensor, num_experts: int, tile_rows: int) -> None:
    """`order` and `table` as kernels left them, `POISON` where nothing was written."""
    want_order, want_tiles = plain(experts, num_experts, tile_rows)
    order, table = order.cpu(), table.cpu()
    num_tiles = int(table[0, 0])
    assert num_tiles == len(want_tiles), f"{num_tiles} tiles, not {len(want_tiles)}"
    assert table[0, 1] == 0, "what a GEMM counts in does not begin with 0"
    tiles = table[1 : 1 + num_tiles]
    assert torch.equal(tiles, want_tiles), f"{tiles.tolist()}, not {want_tiles.tolist()}"
    assert torch.equal(order[: len(want_order)], want_order)
    assert (order[len(want_order) :] == POISON).all(), "positions behind the last expert's were written"
    behind = table[1 + num_tiles :].flatten()
    assert len(behind) >= num_tiles and (behind[:num_tiles] == 0).all(), "counts of tiles do not begin with 0"
    assert (behind[num_tiles:] == POISON).all(), "tiles that there are not were written"


def cases(num_rows: int, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Experts of rows, int64, by what they are like."""
    generator = torch.Generator().manual_seed(num_rows * 1024 + num_experts)

    def random(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator)

    yield "random", random(0, num_experts)
    yield "some foreign", random(-num_experts - 1, 2 * num_experts + 1)
    yield "one expert", torch.full((num_rows,), num_experts - 1)
    yield "skewed", torch.minimum(random(0, num_experts), random(0, num_experts)) // 2
    yield "descending", torch.arange(num_rows - 1, -1, -1) % num_experts
    yield "all beyond", torch.full((num_rows,), num_experts)
    yield "all negative", random(-5, 0)
    yield "far beyond", random(0, num_experts) + (torch.arange(num_rows) % 3 - 1 << 32)
