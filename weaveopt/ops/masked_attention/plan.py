"""How a call is divided among programs: a function of its shape and the number of SMs, of nothing on the device."""

from __future__ import annotations

from dataclasses import dataclass

from weaveopt.ops.masked_attention.shapes import RANGE_ROWS, Shape

MAX_SPLITS = 128
FEW_ROWS = 64
"""Rows of a key head's group that still run in tiles of their own size."""
GOOD_ENOUGH = 0.9
"""More splits are taken only if fewer of them leave more than a tenth of the slots empty, relative to the best."""


@dataclass(frozen=True)
class Plan:
    """One launch."""

    packed: int
    """Query heads of one key head whose rows share a tile."""
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    """Programs that share the keys of a tile; above 1 `combine` follows."""
    early_combine: bool = True
    """`combine` is launched while the splits still run, and waits on the device, where that can do it."""
    inner: bool = False
    """Blocks of keys that every row admits have a loop of their own, without a mask."""
    combine_columns: int = 64
    combine_warps: int = 4

    def num_tiles(self, shape: Shape) -> int:
        return -(-shape.queries * self.packed // self.block_m)

    def num_bundles(self, shape: Shape) -> int:
        """Of query heads, over the batch."""
        return shape.batch * (shape.heads // self.packed)


def plan(shape: Shape, num_sms: int, may_pack: bool = True) -> Plan:
    """The launch for `shape`; `may_pack`: heads of a group see the same ranges of keys."""
    packed = shape.group if may_pack and shape.group <= RANGE_ROWS else 1
    rows = shape.queries * packed
    wide = max(shape.key_size, shape.value_size) > 128
    long_tiles = shape.batch * shape.heads * -(-shape.queries // 128)
    if rows > FEW_ROWS and long_tiles >= num_sms:
        return Plan(1, 128, 64, 8, 2 if wide else 3, inner=True)
    block_m = min(max(16, power_of_two(rows)), FEW_ROWS)
    few = Plan(packed, block_m, 32 if wide else 64, 4, 3)
    tiles = few.num_tiles(shape) * few.num_bundles(shape)
    return Plan(packed, block_m, few.block_n, 4, 3, splits(tiles, -(-shape.keys // few.block_n), 2 * num_sms))


def splits(tiles: int, blocks: int, slots: int) -> int:
    """Into how many parts the keys of each of `tiles` are split, where `slots` programs run at a time."""
    most = max(1, min(MAX_SPLITS, blocks, slots // max(tiles, 1) + 1))

    def filled(count: int) -> float:
        programs = tiles * count
        return programs / (-(-programs // slots) * slots)

    best = max(filled(count) for count in range(1, most + 1))
    return next(count for count in range(1, most + 1) if filled(count) >= GOOD_ENOUGH * best)


def power_of_two(least: int) -> int:
    """The smallest that is not below `least`."""
    return 1 << (least - 1).bit_length()
