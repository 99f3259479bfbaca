"""Variant `pushed` on GPUs: how shards travel and the GEMMs are cut, and the names of the curves that profiles keep.

A curve is the time of the gather and one GEMM by bytes of the gathered rows, at one number of columns `n` of the GEMM:
operation `all_gather_gemm`, variant `pushed columns=256 pairs=1 spare=2 pieces=2 n=4096`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from weaveopt.errors import ProfileError

OP = "all_gather_gemm"
"""The operation of the curves."""
PUSHED = "pushed"
TILE_COLUMNS = (128, 160, 256)
TILE_DTYPES = ("bfloat16", "float16")
MOST_PIECES = 32


@dataclass(frozen=True)
class Cut:
    """How the GEMM is cut that begins before all rows are here, and in how many pieces these come."""

    tile_columns: int
    """Columns of an output tile: 128, 160 or 256. Its rows are 256, of the two CTAs of a cluster."""
    group_pairs: int
    """Pairs of 128-row panels in a wave group: tiles of a group come column by column."""
    spare_ctas: int
    """SMs without a tile, where the kernels behind copies run: an even number, at least 2."""
    num_pieces: int
    """Of a shard at most: each is copied by itself, and a signal follows it."""

    @property
    def is_known(self) -> bool:
        """True if there is such a kernel."""
        columns, pairs, ctas, pieces = self.tile_columns, self.group_pairs, self.spare_ctas, self.num_pieces
        has_tiles = columns in TILE_COLUMNS and pairs >= 1
        return has_tiles and ctas >= 2 and ctas % 2 == 0 and 1 <= pieces <= MOST_PIECES

    def __str__(self) -> str:
        tiles = f"columns={self.tile_columns} pairs={self.group_pairs} spare={self.spare_ctas}"
        return f"{PUSHED} {tiles} pieces={self.num_pieces}"


def widest_of(widths: Sequence[int]) -> int | None:
    """Which of the GEMMs with so many columns begins before all rows are here: the first of the widest."""
    return max(range(len(widths)), key=lambda index: widths[index]) if widths else None


_NAME = re.compile(rf"{PUSHED} columns=(\d+) pairs=(\d+) spare=(\d+) pieces=(\d+)")
_EXPECTED = f"'{PUSHED} columns=C pairs=P spare=S pieces=Q n=N', C one of {TILE_COLUMNS}, S even"


@cache
def parse_cut(text: str) -> Cut | None:
    """The cut that is written so; None where there is no such kernel."""
    found = _NAME.fullmatch(text)
    cut = None if found is None else Cut(*(int(number) for number in found.groups()))
    return cut if cut is not None and cut.is_known else None


def variant_of(cut: Cut, width: int) -> str:
    """The name of the curve at that number of columns."""
    return f"{cut} n={width}"


@cache
def parse_variant(name: str) -> tuple[Cut, int]:
    """(cut, n) of the curve of that name. Raises `ProfileError` where there is no such kernel."""
    text, _, width = name.rpartition(" n=")
    cut = parse_cut(text)
    if cut is None or not width.isdecimal() or int(width) < 1:
        raise ProfileError(f"a curve of {OP}: found variant {name!r}, expected {_EXPECTED}")
    return cut, int(width)
