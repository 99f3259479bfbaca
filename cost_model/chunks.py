"""A GEMM whose rows are exchanged in chunks: the exchange of one chunk overlaps with the GEMM of the next.

Algorithm 1 of FlashOverlap (section 4) for chunks that are GEMMs of their own: a chunk leaves when it is computed and
the one before it has arrived. Computation and exchange slow each other down while both run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weaveopt.cost_model.gemm import Waves
from weaveopt.records.task import Stream, Task

CHUNK_COUNTS = (2, 3, 4, 6, 8, 12, 16)
"""Numbers of chunks that are compared. The best pipeline is flat around its best number."""

ROUNDING = 1e-9
"""Relative difference that sums of the same times in another order may have."""


@dataclass(frozen=True)
class ChunkTimes:
    """Times of one chunk, each without the other."""

    gemm_us: float
    exchange_us: float


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
    """Lower bound of the makespan of `chunk_tasks` that overlap.

    A microsecond in which both run does 1/gemm_factor + 1/exchange_factor of work, one in which one runs does 1. The
    first GEMM and the last exchange overlap with nothing; both run no longer than what is left of either takes.
    """
    if not chunks:
        return 0.0
    gemm_us, exchange_us = sum(each.gemm_us for each in chunks), sum(each.exchange_us for each in chunks)
    hideable = (gemm_us - chunks[0].gemm_us) * gemm_factor, (exchange_us - chunks[-1].exchange_us) * exchange_factor
    won = max(1 / gemm_factor + 1 / exchange_factor - 1, 0.0)
    return gemm_us + exchange_us - won * min(hideable)


def serial_us(chunks: Sequence[ChunkTimes]) -> float:
    """Time of all chunks without any overlap."""
    return sum(each.gemm_us for each in chunks) + sum(each.exchange_us for each in chunks)


def chunk_tasks(chunks: Sequence[ChunkTimes], ctas: int) -> tuple[Task, ...]:
    """The tasks of all chunks: GEMMs, and exchanges by `ctas` CTAs each of which waits for its chunk's GEMM.

    Exchanges run on the communication stream, concurrently with the GEMMs of later chunks; on the compute stream, in
    turn with them, where `ctas` is 0 (CPU ranks: one processor does both).
    """
    stream = Stream.COMMUNICATION if ctas else Stream.COMPUTE
    tasks: list[Task] = []
    for index, each in enumerate(chunks):
        tasks.append(Task(each.gemm_us, name="gemm"))
        name = "last chunk" if index == len(chunks) - 1 else "exchange"
        tasks.append(Task(each.exchange_us, stream, (len(tasks) - 1,), name, ctas))
    return tuple(tasks)
