"""How a call is divided among programs: a function of its shape and the number of SMs, of nothing on the device.

Decode is bound by memory: what counts is how many bytes are asked for at a time, about 128 KiB an SM, in a single wave
of programs that are all as long. Two programs of `MIDDLE` on an SM ask for that, or four of `SHORT` or `LONG`.
"""

from __future__ import annotations

from dataclasses import dataclass

from weaveopt.kernel_memory import HOPPER_BYTES
from weaveopt.ops.attention.shapes import RANGE_ROWS, AttentionShape

MAX_SPLITS = 128
FEW_ROWS = 64
"""Rows of a key head's group that still run in tiles of their own size."""
LEAST_ROWS = 16
"""Least rows of a tile: the rows of one matrix instruction."""
LEAST_KEYS = 16
"""Least keys of a block: the depth of one matrix instruction."""
GOOD_ENOUGH = 0.9
"""More splits are taken only if fewer of them leave more than a tenth of the slots empty, relative to the best."""
FINE_WAVES = 8
"""Tiles of prefill for each SM below which halves of them end more evenly; more of them run better whole."""


@dataclass(frozen=True)
class KeyLoop:
    """Keys of a block, and who loads and multiplies them."""

    block_n: int
    num_warps: int
    num_stages: int
    resident: int
    """Programs that an SM holds at a time, for heads of 128 and `LEAST_ROWS` rows: by registers, or shared memory."""
    filling: float
    """Number of programs per SM that keep the memory busy."""
    least_keys: int
    """Least keys of a split: fewer take longer to begin and to combine than they save."""
    inner: bool = False
    """As in `AttentionLaunch`."""


SHORT = KeyLoop(32, 2, 3, 5, 4, 128)
"""Few keys a program: the fewest threads, and registers left for `combine` to begin with."""
MIDDLE = KeyLoop(64, 4, 3, 3, 1.9, 64)
LONG = KeyLoop(32, 4, 3, 4, 4, 1024)
"""As many keys in flight as two of `MIDDLE`, by more threads: what each loses at its ends counts less."""
WHOLE = KeyLoop(64, 4, 4, 1, 1, 1, inner=True)
"""One program an SM that has all its keys, and nothing to combine: it alone keeps enough of them in flight."""
SHORT_KEYS, LONG_KEYS = 256, 2048
"""Keys of a program with four an SM: `SHORT` serves up to the first, `LONG` from the second on."""


@dataclass(frozen=True)
class AttentionLaunch:
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
    combine_warps: int = 1

    def num_tiles(self, shape: AttentionShape) -> int:
        return -(-shape.queries * self.packed // self.block_m)

    def num_bundles(self, shape: AttentionShape) -> int:
        """Number of bundles of query heads, over the batch."""
        return shape.batch * (shape.heads // self.packed)


def plan(shape: AttentionShape, num_sms: int, may_pack: bool = True, masked: bool = True) -> AttentionLaunch:
    """The launch for `shape`; `may_pack`: heads of a group see the same ranges of keys; `masked`: there is a mask."""
    packed = shape.group if may_pack and shape.group <= RANGE_ROWS else 1
    rows = shape.queries * packed
    wide = max(shape.key_size, shape.value_size) > 128
    long_tiles = shape.batch * shape.heads * -(-shape.queries // 128)
    if rows > FEW_ROWS and long_tiles >= num_sms:
        # Under the diagonal, tiles are of all lengths. A mask would be read once more for each half.
        if not (masked or wide) and long_tiles < FINE_WAVES * num_sms:
            return AttentionLaunch(1, 64, 64, 4, 3, inner=True)
        return AttentionLaunch(1, 128, 64, 8, 2 if wide else 3, inner=True)
    block_m = min(max(LEAST_ROWS, power_of_two(rows)), FEW_ROWS)
    tiles = shape.batch * (shape.heads // packed) * -(-rows // block_m)
    loop, count = MIDDLE, one_wave(tiles, shape.keys, MIDDLE, num_sms)
    # Other sizes are padded: the same memory for fewer bytes, and registers for what is masked.
    padded = any(power_of_two(size) != size for size in (shape.key_size, shape.value_size))
    if block_m == LEAST_ROWS and not (wide or padded):
        loop, count = divided(tiles, shape.keys, num_sms)
    block_n = loop.block_n // 2 if wide else loop.block_n
    return AttentionLaunch(
        packed, block_m, block_n, loop.num_warps, loop.num_stages, count,
        inner=loop.inner, combine_columns=columns_to_combine(count),
    )  # fmt: skip


def divided(tiles: int, keys: int, num_sms: int) -> tuple[KeyLoop, int]:
    """The loop for decode, and into how many parts the keys of each of `tiles` are split."""
    each = tiles * keys // (4 * num_sms)
    short, long = (min(MAX_SPLITS, 4 * num_sms // max(tiles, 1), keys // loop.least_keys) for loop in (SHORT, LONG))
    if tiles <= num_sms and filled(tiles, num_sms) >= GOOD_ENOUGH and each < LONG_KEYS:
        return WHOLE, 1
    if each <= SHORT_KEYS and tiles <= num_sms < tiles * short:
        return SHORT, short
    if tiles > MIDDLE.resident * num_sms:
        return LONG, even_waves(tiles, keys, LONG, num_sms)
    if each >= LONG_KEYS and filled(tiles * long, 4 * num_sms) >= GOOD_ENOUGH:
        return LONG, long
    return MIDDLE, one_wave(tiles, keys, MIDDLE, num_sms)


def one_wave(tiles: int, keys: int, loop: KeyLoop, num_sms: int) -> int:
    """The fewest parts that keep the memory busy, but not so many that programs wait for others."""
    tiles = max(tiles, 1)
    if tiles > loop.resident * num_sms:
        return even_waves(tiles, keys, loop, num_sms)
    busy = -(-int(loop.filling * num_sms) // tiles)
    most = min(MAX_SPLITS, loop.resident * num_sms // tiles, keys // loop.least_keys)
    count = max(1, min(busy, most))
    # Where one more would spare each of them a block that is nearly empty, it is taken.
    spared = keys // count // loop.block_n * loop.block_n
    return -(-keys // spared) if spared and -(-keys // spared) <= most else count


def even_waves(tiles: int, keys: int, loop: KeyLoop, num_sms: int) -> int:
    """The fewest parts whose last wave is nearly whole, where tiles alone are more than run at a time."""
    slots = loop.resident * num_sms
    counts = range(1, max(1, min(4, keys // LONG.least_keys)) + 1)
    best = max(filled(tiles * count, slots) for count in counts)
    return next(count for count in counts if filled(tiles * count, slots) >= GOOD_ENOUGH * best)


def fitting(
    block_m: int, block_n: int, num_stages: int, sizes: tuple[int, int], most_bytes: int
) -> tuple[int, int] | None:
    """Keys of a block and stages that fit into `most_bytes` of shared memory, for `sizes` of keys and values; None if
    nothing does.

    Plans are Hopper's. GPUs with less memory keep all blocks of keys and values but one in it, the queries, and the
    weights of a block of keys: fewer stages first, then fewer keys.
    """
    if most_bytes >= HOPPER_BYTES:
        return block_n, num_stages
    key_size, value_size = (power_of_two(max(size, 16)) for size in sizes)

    def needed(keys: int, stages: int) -> int:
        return 2 * ((stages - 1) * keys * (key_size + value_size) + block_m * (key_size + keys))

    while needed(block_n, num_stages) > most_bytes:
        if num_stages > 2:
            num_stages -= 1
        elif block_n > LEAST_KEYS:
            block_n //= 2
        else:
            return None
    return block_n, num_stages


def filled(programs: int, slots: int) -> float:
    """The part of the waves' slots that programs take."""
    return programs / (max(-(-programs // slots), 1) * slots)


def columns_to_combine(num_splits: int) -> int:
    """Columns of a program of `combine`: fewer for more splits, so that its warp loads all of them at once."""
    return 128 if num_splits <= 4 else 64 if num_splits <= 16 else 32


def power_of_two(least: int) -> int:
    """The smallest that is not below `least`."""
    return 1 << (least - 1).bit_length()
