"""A GEMM whose rows are exchanged in chunks: the exchange of one chunk overlaps with the GEMM of the next.

Algorithm 1 of FlashOverlap (section 4) for chunks that are GEMMs of their own: a chunk leaves when it is computed and
the one before it has arrived. Computation and exchange slow each other down while both run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from weaveopt.cost_model.gemm import Waves
from weaveopt.cost_model.machine import ContentionRow, Machine
from weaveopt.cost_model.schedule import Stream, Task, schedule_streams

CHUNK_COUNTS = (2, 3, 4, 6, 8, 12, 16)
"""Numbers of chunks that are compared. The best pipeline is flat around its best number."""

ROUNDING = 1e-9
"""Relative difference that sums of the same times in another order may have."""


@dataclass(frozen=True)
class ChunkTimes:
    """Times of one chunk, each without the other."""

    gemm_us: float
    exchange_us: float


@dataclass(frozen=True)
class Pipeline:
    """Time of all chunks, by parts that add up to `us`."""

    us: float
    gemm_us: float
    """All GEMMs, each alone."""
    exchange_us: float
    """All exchanges but the last one's, each alone."""
    last_us: float
    """The last exchange: no GEMM is left that could hide it."""

    @property
    def overlapped_us(self) -> float:
        """Change of the total because parts run concurrently; below 0 where it hides work."""
        return self.us - self.gemm_us - self.exchange_us - self.last_us


def divided(rows: int, num_chunks: int, multiple: int = 1) -> tuple[int, ...]:
    """`rows` in at most `num_chunks` chunks of equally many rows, a multiple of `multiple`; the last has the rest.

    Fewer than `num_chunks` where so many would be smaller than `multiple`; `()` without rows.
    """
    each = -(-rows // (num_chunks * multiple)) * multiple
    return tuple(min(each, rows - first) for first in range(0, rows, each)) if rows > 0 else ()


def chunk_counts(rows: int, waves: Waves | None) -> tuple[int, ...]:
    """Numbers of chunks that are worth a look: none has less than a wave of the GEMM's tiles.

    Empty for a GEMM of one wave: chunks of it take a wave each, so they add what they could hide. `waves` None: the
    machine has no waves, and any row may begin a chunk.
    """
    most = rows if waves is None else waves.num_waves
    return tuple(count for count in CHUNK_COUNTS if count <= most)


def at_least(chunks: Sequence[ChunkTimes], whole_us: float) -> list[ChunkTimes]:
    """The chunks, whose GEMMs take together no less than the whole GEMM, each its share.

    The price of each size errs by itself. A library that had a faster way in parts would take it for the whole, so less
    is the prices' error.
    """
    together_us = sum(each.gemm_us for each in chunks)
    if not 0 < together_us < whole_us:
        return list(chunks)
    factor = whole_us / together_us
    return [replace(each, gemm_us=each.gemm_us * factor) for each in chunks]


def least_us(chunks: Sequence[ChunkTimes], gemm_factor: float, exchange_factor: float) -> float:
    """Lower bound of the time of all pipelines of the chunks, see `pipelined`.

    A microsecond in which both run does 1/gemm_factor + 1/exchange_factor of work, one in which one runs does 1. The
    first GEMM and the last exchange overlap with nothing; both run no longer than what is left of either takes.
    """
    if not chunks:
        return 0.0
    gemm_us, exchange_us = sum(each.gemm_us for each in chunks), sum(each.exchange_us for each in chunks)
    hideable = (gemm_us - chunks[0].gemm_us) * gemm_factor, (exchange_us - chunks[-1].exchange_us) * exchange_factor
    won = max(1 / gemm_factor + 1 / exchange_factor - 1, 0.0)
    return gemm_us + exchange_us - won * min(hideable)


def one_by_one(chunks: Sequence[ChunkTimes]) -> Pipeline:
    """Pipeline without any overlap."""
    gemm_us, exchange_us = sum(each.gemm_us for each in chunks), sum(each.exchange_us for each in chunks)
    last_us = chunks[-1].exchange_us if chunks else 0.0
    return Pipeline(gemm_us + exchange_us, gemm_us, exchange_us - last_us, last_us)


def pipelined(chunks: Sequence[ChunkTimes], gemm_factor: float, exchange_factor: float) -> Pipeline:
    """Pipeline in which the exchange of a chunk overlaps with the GEMMs of later ones; each is slower by its factor
    while both run."""
    tasks: list[Task] = []
    for each in chunks:
        tasks.append(Task(each.gemm_us))
        tasks.append(Task(each.exchange_us, Stream.COMMUNICATION, (len(tasks) - 1,)))
    alone = one_by_one(chunks)
    us = schedule_streams(tasks, gemm_factor, exchange_factor).us
    return Pipeline(us, alone.gemm_us, alone.exchange_us, alone.last_us)


def beside_gemm(machine: Machine, num_ctas: int) -> ContentionRow | None:
    """Contention of a GEMM and an exchange by `num_ctas` CTAs, from the nearest number measured, by ratio.

    None if unknown: nothing was measured, or only with fewer CTAs, whose GEMM had more of the device; 0 CTAs stand for
    as many as fit, which leave it none.
    """
    rows = () if machine.contention is None else machine.contention.rows
    if not 0 < num_ctas <= max((row.ctas for row in rows), default=0):
        return None
    return min(rows, key=lambda row: (abs(log(row.ctas / num_ctas)), -row.ctas))
