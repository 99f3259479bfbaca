"""Variant `tiles` on GPUs: how its kernel cuts the GEMM, and the names of the curves that profiles keep of it.

A curve is the whole kernel's time by message bytes (`tokens * hidden * 2`), at one depth `k` of the GEMM: operation
`gemm_reduce_scatter`, variant `tiles columns=256 pairs=1 ctas=4 own_last=1 k=4096`. Where it adds a residual and
normalizes this rank's rows too (`tiles norm`), the operation is `gemm_reduce_scatter_norm`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from weaveopt.errors import ProfileError

OP = "gemm_reduce_scatter"
"""The operation of the curves."""
NORM_OP = "gemm_reduce_scatter_norm"
"""That of the kernel with addition and norm."""
TILES = "tiles"
TILES_NORM = "tiles norm"
TILE_COLUMNS = (128, 256)
TILE_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Cut:
    """How the kernel that computes the GEMM cuts it."""

    tile_columns: int
    """Columns of an output tile: 128 or 256. Its rows are 256, of the two CTAs of a cluster."""
    group_pairs: int
    """Pairs of 128-row panels in a wave group: tiles of a group come column by column."""
    finisher_ctas: int
    """CTAs that compute no tiles and sum rows all the time: an even number."""
    own_last: bool
    """Whether a rank computes the rows of the others first, each one's whole, and its own last: then nothing travels at
    the end, and all rows are summed there. Else rows of all owners in turn: sums are made all the time, and what is
    left at the end has to travel still."""

    @property
    def is_known(self) -> bool:
        """True if there is such a kernel."""
        columns, pairs, ctas = self.tile_columns, self.group_pairs, self.finisher_ctas
        return columns in TILE_COLUMNS and pairs >= 1 and ctas >= 0 and ctas % 2 == 0

    def __str__(self) -> str:
        numbers = f"columns={self.tile_columns} pairs={self.group_pairs} ctas={self.finisher_ctas}"
        return f"{TILES} {numbers} own_last={int(self.own_last)}"


_NAME = re.compile(rf"{TILES} columns=(\d+) pairs=(\d+) ctas=(\d+) own_last=([01])")
_EXPECTED = f"'{TILES} columns=N pairs=P ctas=C own_last=0|1 k=K', N one of {TILE_COLUMNS}, C even"


@cache
def parse_cut(text: str) -> Cut | None:
    """The cut that is written so; None where there is no such kernel."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    cut = Cut(int(found[1]), int(found[2]), int(found[3]), found[4] == "1")
    return cut if cut.is_known else None


def variant_of(cut: Cut, depth: int) -> str:
    """The name of the curve at that depth."""
    return f"{cut} k={depth}"


@cache
def parse_variant(name: str) -> tuple[Cut, int]:
    """(cut, depth) of the curve of that name. Raises `ProfileError` where there is no such kernel."""
    text, _, depth = name.rpartition(" k=")
    cut = parse_cut(text)
    if cut is None or not depth.isdecimal() or int(depth) < 1:
        raise ProfileError(f"a curve of {OP}: found variant {name!r}, expected {_EXPECTED}")
    return cut, int(depth)
