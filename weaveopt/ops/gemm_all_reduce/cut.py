"""Variant `tiles`: how its kernel cuts the product, and the names of the curves that profiles keep of it.

A curve is the whole kernel's time by message bytes (`tokens * hidden * 2`), at one depth `k` of the product: operation
`gemm_all_reduce`, variant `tiles norm columns=256 pairs=1 ctas=4 k=4096`. `norm`: normalized rows are handed out, and
the sum stays sharded by tokens; `sum`: the whole sum is, and nothing is normalized.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from weaveopt.errors import ProfileError

OP = "gemm_all_reduce"
"""The operation of the curves."""
TILES = "tiles"
TILE_COLUMNS = (128, 256)
TILE_DTYPES = ("bfloat16", "float16")


class HandsOut(StrEnum):
    """Which rows every rank gets."""

    NORM = "norm"
    """Normalized ones; the sum's stay with their owners."""
    SUM = "sum"
    BOTH = "both"


@dataclass(frozen=True)
class Cut:
    """How the kernel that computes the product cuts it."""

    tile_columns: int
    """Columns of an output tile: 128 or 256. Its rows are 256, of the two CTAs of a cluster."""
    group_pairs: int
    """Pairs of 128-row panels in a wave group: tiles of a group come column by column."""
    finisher_ctas: int
    """CTAs that compute no tiles and finish rows all the time: an even number."""

    @property
    def is_known(self) -> bool:
        """True if there is such a kernel."""
        columns, pairs, ctas = self.tile_columns, self.group_pairs, self.finisher_ctas
        return columns in TILE_COLUMNS and pairs >= 1 and ctas >= 0 and ctas % 2 == 0


@dataclass(frozen=True)
class MeasuredAs:
    """Kernel configuration that a curve was measured with."""

    hands_out: HandsOut
    cut: Cut
    depth: int
    """`k` of the product."""

    @property
    def variant(self) -> str:
        cut = f"columns={self.cut.tile_columns} pairs={self.cut.group_pairs} ctas={self.cut.finisher_ctas}"
        return f"{TILES} {self.hands_out.value} {cut} k={self.depth}"


_NAME = re.compile(rf"{TILES} ({'|'.join(HandsOut)}) columns=(\d+) pairs=(\d+) ctas=(\d+) k=(\d+)")


@cache
def parse_variant(name: str) -> MeasuredAs:
    """Parses a curve's name into the measured configuration. Raises `ProfileError` if there is no such kernel."""
    found = _NAME.fullmatch(name)
    if found is not None:
        columns, pairs, ctas, depth = (int(number) for number in found.groups()[1:])
        measured = MeasuredAs(HandsOut(found[1]), Cut(columns, pairs, ctas), depth)
        if measured.cut.is_known and depth > 0:
            return measured
    expected = f"'{TILES} norm|sum|both columns=N pairs=P ctas=C k=K', N one of {TILE_COLUMNS}, C even"
    raise ProfileError(f"a curve of {OP}: found variant {name!r}, expected {expected}")
