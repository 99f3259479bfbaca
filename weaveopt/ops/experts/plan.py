"""Partition of a call among programs: a function of its shape and the number of SMs, of nothing on the device.

Up to some hundred tokens a call is bound by its weights' bytes. What counts then is how many of them are asked for at a
time, about 128 KiB an SM, by three programs an SM that are all as long; so tiles take few rows of weights, and deep
ones. With more tokens the tensor cores bind, and tiles are as large as registers allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weaveopt.kernel_memory import HOPPER_BYTES
from weaveopt.ops.experts.shapes import ExpertsShape

LEAST_ROWS, MOST_ROWS = 16, 128
"""Smallest and largest number of rows of a tile: the minimum of a GEMM instruction, and the rows that one program's
registers can hold with 256 columns."""
FEW_ROWS = 32
"""Rows of a tile up to which the weights bind, and several programs share an SM."""
TRANSPOSED_ROWS = 64
"""Rows of a tile with more than `FEW_ROWS` rows if the weights are transposed."""
ROOM = 1.25
"""Rows of a tile, relative to an expert's mean: most experts have one tile then."""
RESIDENT = 3
"""Programs that an SM holds at a time, of tiles of few rows: each asks for 48 KiB of weights ahead."""
LEAST_WAVES = 1.33
"""Least waves of the first GEMM's programs; with fewer its tiles are halved, as on average half of the choices may
belong to other ranks."""
MAX_SPLITS = 8
LEAST_DEPTH = 512
"""Least depth of a split of the second GEMM: a shorter one takes longer to begin and to combine than it saves."""
GOOD_ENOUGH = 0.9
"""Share of the best slot occupancy that suffices: the fewest splits that reach it are taken."""
FOREIGN = 2
"""Ratio of all choices to this rank's: splits have to fill the slots evenly both with all choices and with one in so
many."""
TRITON_ROUTING_ROWS = 1024
"""Maximum number of rows for Triton's routing, each program of which reads all rows; native kernels, if built, route
more."""


@dataclass(frozen=True)
class ExpertTile:
    """One program of a GEMM."""

    columns: int
    """Columns of the result; gated, the first GEMM reads twice as many rows of the weight."""
    depth: int
    """Depth of one step."""
    num_warps: int
    num_stages: int
    swap: bool = False
    """The weights are the left operand."""

    def shared_bytes(self, rows: int, gated: bool) -> int:
        """Shared memory of all stages, with operands of 2 bytes an element."""
        return (rows + self.columns * (2 if gated else 1)) * self.depth * 2 * self.num_stages

    def fitting(self, rows: int, gated: bool, most_bytes: int) -> ExpertTile:
        """The same tile with as many stages, and then as much depth, as fit."""
        tile = self
        while tile.shared_bytes(rows, gated) > most_bytes and tile.depth > LEAST_ROWS:
            fewer = {"num_stages": tile.num_stages - 1} if tile.num_stages > 2 else {"depth": tile.depth // 2}
            tile = replace(tile, **fewer)  # type: ignore[arg-type]
        return tile


class RowTiles:
    """Launch parameters of the kernels that sort rows and add them up."""

    rows: int
    """Rows of a tile, in both GEMMs."""
    combine_columns: int
    early: bool
    """Kernels are launched while the one before still runs, and wait on the device, where that can do it."""

    def max_tiles(self, shape: ExpertsShape) -> int:
        """No routing needs more: a tile for each expert that has rows, and one for each further `rows` rows."""
        active = min(shape.experts, shape.rows)
        return active + (shape.rows - active) // self.rows

    def table_rows(self, shape: ExpertsShape) -> int:
        """Rows, of 4 numbers each, in the routing kernels' table: a header, one for each tile, and a number for each
        tile."""
        tiles = self.max_tiles(shape)
        return 1 + tiles + -(-tiles // 4)


@dataclass(frozen=True)
class ExpertsLaunch(RowTiles):
    """One call of Triton's kernels."""

    rows: int
    gate_up: ExpertTile
    down: ExpertTile
    splits: int = 1
    """Programs that share the depth of a tile of the second GEMM."""
    group: int = 8
    """Tiles that go through a block of weights one after another."""
    combine_columns: int = 1024
    early: bool = True


def plan(shape: ExpertsShape, num_sms: int, gated: bool = True, shared_bytes: int = HOPPER_BYTES) -> ExpertsLaunch:
    """Plan the launch for `shape`. It counts all choices as this rank's: the number of remote ones is on the device
    only. `shared_bytes`: shared memory that a program may have."""
    how = _plan(shape, num_sms)
    # Without a gate, twice the columns are as many rows of the weight.
    how = how if gated else replace(how, gate_up=replace(how.gate_up, columns=2 * how.gate_up.columns))
    gate_up, down = how.gate_up.fitting(how.rows, gated, shared_bytes), how.down.fitting(how.rows, False, shared_bytes)
    return replace(how, gate_up=gate_up, down=down)


def _plan(shape: ExpertsShape, num_sms: int) -> ExpertsLaunch:
    rows = _rows(shape)
    active = min(shape.experts, shape.rows)
    if rows > FEW_ROWS:
        if shape.transposed:
            # Weights as the left operand, which may have either layout in shared memory.
            rows = TRANSPOSED_ROWS
            gate_up, down = ExpertTile(64, 64, 8, 4, swap=True), ExpertTile(128, 64, 8, 4, swap=True)
        elif rows < MOST_ROWS:
            gate_up, down = ExpertTile(64, 64, 4, 4), ExpertTile(128, 64, 4, 4)
        else:
            gate_up, down = ExpertTile(128, 64, 8, 4), ExpertTile(256, 64, 8, 4)
        return ExpertsLaunch(rows, gate_up, down, combine_columns=2048)
    gate_up = ExpertTile(32, 128, 4, 4)
    if active * -(-shape.inner // gate_up.columns) < LEAST_WAVES * RESIDENT * num_sms:
        gate_up = ExpertTile(16, 256, 4, 4)
    down = ExpertTile(64, 128, 4, 4)
    splits = even_splits(active * -(-shape.hidden // down.columns), shape.inner, RESIDENT * num_sms)
    return ExpertsLaunch(rows, gate_up, down, splits, combine_columns=512)


def _rows(shape: ExpertsShape) -> int:
    return min(max(power_of_two(int(ROOM * shape.rows / shape.experts)), LEAST_ROWS), MOST_ROWS)


def even_splits(programs: int, depth: int, slots: int) -> int:
    """The fewest splits whose last wave is nearly whole."""
    counts = range(1, max(1, min(MAX_SPLITS, depth // LEAST_DEPTH)) + 1)
    even = {
        count: min(filled(programs * count, slots), filled(-(-programs // FOREIGN) * count, slots)) for count in counts
    }
    return next(count for count in counts if even[count] >= GOOD_ENOUGH * max(even.values()))


def filled(programs: int, slots: int) -> float:
    """The part of the waves' slots that programs take."""
    return programs / (max(-(-programs // slots), 1) * slots)


def power_of_two(least: int) -> int:
    """The smallest that is not below `least`."""
    return 1 << max(least - 1, 0).bit_length()


FEW_TILES = (
    ExpertTile(32, 128, 4, 4), ExpertTile(32, 128, 4, 5), ExpertTile(16, 256, 4, 4), ExpertTile(16, 128, 4, 6),
    ExpertTile(64, 64, 4, 5), ExpertTile(64, 128, 4, 3), ExpertTile(32, 256, 8, 3), ExpertTile(128, 64, 8, 4),
    ExpertTile(32, 64, 4, 6), ExpertTile(32, 64, 2, 6),
)  # fmt: skip
MANY_TILES = (
    ExpertTile(128, 64, 8, 4), ExpertTile(128, 64, 8, 3), ExpertTile(64, 64, 4, 4), ExpertTile(64, 64, 8, 4),
    ExpertTile(64, 128, 4, 3), ExpertTile(128, 32, 8, 5), ExpertTile(64, 64, 4, 3),
)  # fmt: skip


def candidates(shape: ExpertsShape, num_sms: int) -> tuple[ExpertsLaunch, ...]:
    """Launches that a sweep of gated experts tries: the planned one first, then variations of it, each once."""
    planned = plan(shape, num_sms)
    return tuple(dict.fromkeys((planned, *_changes(planned, shape))))


def _changes(planned: ExpertsLaunch, shape: ExpertsShape) -> Iterator[ExpertsLaunch]:
    """Every tile for each number of rows near the planned one, then one change at a time."""
    for rows in (planned.rows, planned.rows // 2, planned.rows * 2):
        if not LEAST_ROWS <= rows <= MOST_ROWS:
            continue
        base = replace(planned, rows=rows)
        for gate_up in FEW_TILES if rows <= FEW_ROWS else MANY_TILES:
            # The second GEMM's columns are not pairs: as many rows of the weight.
            down = replace(gate_up, columns=2 * gate_up.columns)
            for swap in (False, True) if rows <= 2 * FEW_ROWS else (False,):
                both = replace(base, gate_up=replace(gate_up, swap=swap), down=replace(down, swap=swap))
                if max(gate_up.shared_bytes(rows, True), down.shared_bytes(rows, False)) <= HOPPER_BYTES:
                    yield both
    if planned.rows <= FEW_ROWS:
        for splits in range(1, MAX_SPLITS + 1):
            if splits != planned.splits and shape.inner // splits >= LEAST_DEPTH // 2:
                yield replace(planned, splits=splits)
    for group in (1, 4, 16):
        yield replace(planned, group=group)
    for columns in (256, 512, 1024, 2048):
        yield replace(planned, combine_columns=columns)
    yield replace(planned, early=False)
