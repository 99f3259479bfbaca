"""Tokens split in two without a wave more: the arithmetic of TokenWeave, §4.1.1 and §A.2.

A GEMM's tiles run in waves of as many as there are processors, and a wave that is not full takes as long as one
that is. Two halves of a batch may so take a wave more than the batch; a split at the end of a full wave does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weaveopt.cost_model.gemm import num_waves


@dataclass(frozen=True)
class TiledGemm:
    """A GEMM `[tokens, k] @ [k, num_columns]` in tiles of `[tile_m, tile_n]` on `num_units` processors."""

    tile_m: int
    tile_n: int
    num_columns: int
    num_units: int
    wave_us: float = 1.0
    """Time of one wave; 1 counts waves."""
    num_reserved_units: int = 0
    """Processors that communication takes from the GEMMs of a split, and from no whole one (2 to 8: §4.3)."""

    def num_waves(self, tokens: int, num_units: int) -> int:
        """Waves of that many tokens on that many processors."""
        return num_waves(num_waves(tokens, self.tile_m) * num_waves(self.num_columns, self.tile_n), num_units)

    def added_waves(self, tokens: int, prefix: int) -> int:
        """Waves that two GEMMs, of `prefix` tokens and of the rest, take beyond the whole one's."""
        left = self.num_units - self.num_reserved_units
        split = self.num_waves(prefix, left) + self.num_waves(tokens - prefix, left)
        return split - self.num_waves(tokens, self.num_units)


@dataclass(frozen=True)
class Split:
    """The first `prefix` tokens, and the `suffix` that attends to them; `added_us` is what the GEMMs lose."""

    prefix: int
    suffix: int
    added_us: float


def added_us(gemms: Sequence[TiledGemm], tokens: int, prefix: int) -> float:
    """What splitting costs all GEMMs together: their added waves, each as long as its own wave."""
    return sum(gemm.added_waves(tokens, prefix) * gemm.wave_us for gemm in gemms)


def split_points(gemms: Sequence[TiledGemm], tokens: int) -> tuple[int, ...]:
    """Prefix lengths, growing, that are worth a look: one half, and every multiple of a tile's rows.

    Between two neighbours every GEMM takes at least the waves that it takes at either, so no other length is both
    cheaper and nearer to one half.
    """
    points = {tokens // 2, tokens - tokens // 2}
    for rows in {gemm.tile_m for gemm in gemms}:
        # A suffix of whole tiles counts as much as a prefix of them.
        for boundary in range(rows, tokens, rows):
            points.update((boundary, tokens - boundary))
    return tuple(sorted(point for point in points if 0 < point < tokens))


def free_split_points(gemms: Sequence[TiledGemm], tokens: int) -> tuple[int, ...]:
    """Those of `split_points` that add no wave to any GEMM: empty where the whole batch is one wave."""
    return tuple(
        prefix for prefix in split_points(gemms, tokens) if all(gemm.added_waves(tokens, prefix) <= 0 for gemm in gemms)
    )


def smart_split(gemms: Sequence[TiledGemm], tokens: int) -> Split | None:
    """The split whose GEMMs lose least, of several the most even, of two the one with the longer prefix.

    300 CTAs on 132 SMs split in 168 and 132 and keep their three waves (§4.1.1). None where there is nothing to
    split.
    """
    points = split_points(gemms, tokens)
    if not points:
        return None
    costs = {prefix: added_us(gemms, tokens, prefix) for prefix in points}
    prefix = min(points, key=lambda point: (costs[point], abs(2 * point - tokens), -point))
    return Split(prefix, tokens - prefix, costs[prefix])
