"""A GEMM that sends finished groups of waves while it goes on: FlashOverlap, §4 and Algorithm 1.

A partition says how many waves each group has, in order: after `(1, 2, 2)` of five waves the first goes out alone.
Small groups start early but use the link badly; large ones use it well but leave a long tail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from weaveopt.cost_model.gemm import num_waves

MAX_FIRST_GROUP = 2
"""S_1 of the paper's search (§4.1.4): a larger first group starts late."""
MAX_LAST_GROUP = 4
"""S_P of the paper's search (§4.1.4): a larger last group is a tail that nothing hides."""


@dataclass(frozen=True)
class SendingGemm:
    """One rank's GEMM, of `num_tiles` equal tiles, and the collective that its output goes through."""

    gemm_us: float
    """Alone, on all `num_units`."""
    num_tiles: int
    num_units: int
    num_sending_units: int
    """Processors that communication takes away from the GEMM."""
    message_bytes: float
    transfer_us: Callable[[float], float]
    """Time of the collective by message size: the interpolated curve of Algorithm 1, line 5."""

    @property
    def tiles_per_wave(self) -> int:
        return self.num_units - self.num_sending_units

    @property
    def num_waves(self) -> int:
        """`T`, on the processors that are left (line 3)."""
        return num_waves(self.num_tiles, self.tiles_per_wave)

    @property
    def wave_us(self) -> float:
        """A wave is as long as before: fewer processors make more waves, not longer ones (§4.1.4)."""
        return self.gemm_us / max(1, num_waves(self.num_tiles, self.num_units))

    def computed_us(self, waves: int) -> float:
        """When the first `waves` are done."""
        return min(waves, self.num_waves) * self.wave_us

    def group_us(self, start: int, end: int) -> float:
        """Time to send the waves from `start` up to `end`; the last of the GEMM may hold fewer tiles."""
        first, last = (min(wave * self.tiles_per_wave, self.num_tiles) for wave in (start, end))
        return self.transfer_us((last - first) / self.num_tiles * self.message_bytes) if last > first else 0.0


def pipeline_us(partition: tuple[int, ...], *ranks: SendingGemm) -> float:
    """When the last group of `partition` has arrived (Algorithm 1, lines 10-22).

    A group leaves when it is computed and the one before it has arrived: `t_m = max(t_p, t_m) + comm(group)`. Of
    several ranks with unequal GEMMs, the latest decides at every group (§4.2.2); one stands for all that are equal.
    """
    waves = max(rank.num_waves for rank in ranks)
    assert sum(partition) == waves, f"groups {partition} of {waves} waves"
    arrived_us, start = 0.0, 0
    for size in partition:
        end = start + size
        arrived_us = max(arrived_us, max(rank.computed_us(end) for rank in ranks))
        arrived_us += max(rank.group_us(start, end) for rank in ranks)
        start = end
    return arrived_us


def best_partition(*ranks: SendingGemm, max_first: int | None = None, max_last: int | None = None) -> tuple[int, ...]:
    """The partition with the least `pipeline_us`; `()` without tiles. Larger groups where the time is the same.

    The paper walks through up to `2^(T - 1)` of them and, as those are many, only through partitions whose first
    group has at most `MAX_FIRST_GROUP` waves and whose last at most `MAX_LAST_GROUP`: give these to search as it
    does. Where a message's latency is worth a wave or more, that leaves the best ones out. Nothing needs leaving
    out: what follows a group depends on nothing but when it arrived, and an earlier arrival is never worse, so the
    best way to each wave is part of the best way on, and `T^2 / 2` steps find the best of all.
    """
    waves = max(rank.num_waves for rank in ranks)
    best: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    for end in range(1, waves + 1):
        computed_us = max(rank.computed_us(end) for rank in ranks)
        found: tuple[float, int, tuple[int, ...]] = (inf, 0, ())
        for start in range(end):
            too_late = start == 0 and max_first is not None and end > max_first
            too_long = end == waves and max_last is not None and end - start > max_last
            if too_late or too_long or best[start][0] == inf:
                continue
            before_us, num_groups, groups = best[start]
            us = max(computed_us, before_us) + max(rank.group_us(start, end) for rank in ranks)
            if (us, num_groups + 1) < found[:2]:
                found = us, num_groups + 1, (*groups, end - start)
        best.append(found)
    return best[waves][2]


def perfect_overlap_us(rank: SendingGemm) -> float:
    """What no partition can beat while communication costs the GEMM nothing (§6.4).

    The GEMM and its last wave's communication, or, where that takes longer, the first wave and all communication.
    """
    whole_us = rank.transfer_us(rank.message_bytes)
    last_us = rank.group_us(rank.num_waves - 1, rank.num_waves)
    return rank.gemm_us + last_us if rank.gemm_us >= whole_us else rank.wave_us + whole_us
