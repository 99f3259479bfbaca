"""Chunks of a GEMM that overlap with their exchanges: by hand, against Algorithm 1 of FlashOverlap, and what bounds
them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.chunks import (
    CHUNK_COUNTS,
    ChunkTimes,
    at_least,
    chunk_counts,
    chunk_tasks,
    divided,
    least_us,
    serial_us,
)
from weaveopt.cost_model.gemm import Gemm, Waves, waves_of
from weaveopt.cost_model.schedule import schedule


def pipelined_us(chunks: Sequence[ChunkTimes], gemm: float, exchange: float, ctas: int = 8) -> float:
    return schedule(chunk_tasks(chunks, ctas), lambda *_: (gemm, exchange)).us


def test_three_chunks_by_hand() -> None:
    """Computed at 10, 20, 30; exchanged from 10 to 16, 20 to 26, 30 to 36."""
    chunks = [ChunkTimes(10.0, 6.0)] * 3
    assert pipelined_us(chunks, 1.0, 1.0) == pytest.approx(36.0)
    assert [task.name for task in chunk_tasks(chunks, 8)] == [
        "gemm",
        "exchange",
        "gemm",
        "exchange",
        "gemm",
        "last chunk",
    ]


def test_on_one_processor_chunks_follow_one_another() -> None:
    chunks = [ChunkTimes(10.0, 6.0), ChunkTimes(7.0, 5.0)]
    assert pipelined_us(chunks, 1.0, 1.0, ctas=0) == serial_us(chunks) == 28.0


def test_contention_by_hand() -> None:
    """The first GEMM alone until 10. Concurrently: 6 of exchange take 12, in which 6 of the GEMM's 10 are done at half
    speed; 4 more follow until 26, and the last exchange until 32."""
    assert pipelined_us([ChunkTimes(10.0, 6.0)] * 2, 2.0, 2.0) == pytest.approx(10.0 + 12.0 + 4.0 + 6.0)


def test_a_slow_exchange_hides_the_gemms_instead() -> None:
    assert pipelined_us([ChunkTimes(10.0, 50.0)] * 3, 1.0, 1.0) == pytest.approx(10.0 + 150.0)


def test_without_contention_it_is_algorithm_1() -> None:
    """Chunks of one wave each are wave groups of one: a group leaves when it is computed and the one before arrived."""
    generator = random.Random(5)
    for _ in range(20):
        waves, wave_us, sent_us = generator.randint(1, 9), generator.uniform(1, 9), generator.uniform(1, 9)
        arrived_us = 0.0
        for wave in range(1, waves + 1):
            arrived_us = max(arrived_us, wave * wave_us) + sent_us
        assert pipelined_us([ChunkTimes(wave_us, sent_us)] * waves, 1.0, 1.0) == pytest.approx(arrived_us)


def test_bounds_hold() -> None:
    generator = random.Random(3)
    for _ in range(50):
        chunks = [
            ChunkTimes(generator.uniform(1, 50), generator.uniform(1, 50)) for _ in range(generator.randint(1, 8))
        ]
        us = pipelined_us(chunks, 1.0, 1.0)
        gemms, exchanges = sum(c.gemm_us for c in chunks), sum(c.exchange_us for c in chunks)
        assert max(gemms + chunks[-1].exchange_us, chunks[0].gemm_us + exchanges) <= us + 1e-9
        assert us <= serial_us(chunks) + 1e-9
        assert pipelined_us(chunks, 1.5, 1.2) >= us - 1e-9


def test_no_pipeline_is_shorter_than_the_least() -> None:
    generator = random.Random(5)
    near = 0
    for _ in range(300):
        count, even = generator.randint(1, 8), generator.random() < 0.5
        gemm_us, sent_us = generator.uniform(1, 50), generator.uniform(1, 50)
        chunks = [
            ChunkTimes(gemm_us, sent_us) if even else ChunkTimes(generator.uniform(0, 50), generator.uniform(0, 50))
            for _ in range(count)
        ]
        factors = generator.uniform(1, 2.5), generator.uniform(1, 2.5)
        least, found = least_us(chunks, *factors), pipelined_us(chunks, *factors)
        assert least <= found * (1 + 1e-9), (chunks, factors)
        near += least >= 0.98 * found
    assert near > 100, "a bound that is far below bounds nothing"
    assert least_us((), 1.0, 1.0) == 0.0


def test_chunks_take_no_less_than_the_whole() -> None:
    chunks = [ChunkTimes(30.0, 5.0), ChunkTimes(10.0, 2.0)]
    assert at_least(chunks, 40.0) == at_least(chunks, 12.0) == chunks
    assert at_least(chunks, 60.0) == [ChunkTimes(45.0, 5.0), ChunkTimes(15.0, 2.0)]
    assert at_least([], 60.0) == []
    assert at_least([ChunkTimes(0.0, 3.0)], 60.0) == [ChunkTimes(0.0, 3.0)]


def test_nothing_takes_no_time() -> None:
    assert serial_us(()) == 0.0 and chunk_tasks((), 8) == ()


@pytest.mark.parametrize(
    ("rows", "count", "multiple", "found"),
    [
        (4096, 4, 128, (1024, 1024, 1024, 1024)),
        (4097, 4, 128, (1152, 1152, 1152, 641)),
        (13, 2, 1, (7, 6)),
        (3, 8, 1, (1, 1, 1)),
        (200, 4, 128, (128, 72)),
        (100, 4, 128, (100,)),
        (0, 4, 128, ()),
    ],
)
def test_rows_are_divided_in_whole_tiles(rows: int, count: int, multiple: int, found: tuple[int, ...]) -> None:
    assert divided(rows, count, multiple) == found
    assert sum(found) == rows


def test_no_chunk_has_less_than_a_wave() -> None:
    assert chunk_counts(64, Waves(1, 64)) == ()
    assert chunk_counts(1024, Waves(2, 128)) == (2,)
    assert chunk_counts(4096, Waves(8, 128)) == (2, 3, 4, 6, 8)
    assert chunk_counts(1, None) == ()
    assert chunk_counts(1000, None) == CHUNK_COUNTS


def test_waves_of_a_gemm() -> None:
    """Tiles of 128 x 256 of 4096 x 8192 are 1024, which 132 SMs take in 8 waves."""
    machine = cost_model.load("h200x4")
    assert waves_of(machine, Gemm(4096, 2048, 8192), "bfloat16") == Waves(8, 128)
    one = waves_of(machine, Gemm(64, 2048, 8192), "bfloat16")
    assert one is not None and one.num_waves == 1
    assert waves_of(cost_model.load("cpu"), Gemm(4096, 2048, 8192), "float32") is None
