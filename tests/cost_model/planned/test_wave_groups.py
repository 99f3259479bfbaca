"""Products that send groups of waves: Algorithm 1 of FlashOverlap by hand, and its search against all partitions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from weaveopt.cost_model.curve import interpolate_us
from weaveopt.cost_model.machine import Point
from weaveopt.cost_model.planned.wave_groups import (
    MAX_FIRST_GROUP,
    MAX_LAST_GROUP,
    SendingGemm,
    best_partition,
    perfect_overlap_us,
    pipeline_us,
)


def _partitions(waves: int) -> Iterator[tuple[int, ...]]:
    """All `2^(T - 1)` of them (§3.4)."""
    if waves == 0:
        yield ()
    for first in range(1, waves + 1):
        for rest in _partitions(waves - first):
            yield (first, *rest)


def _exhaustive(*ranks: SendingGemm) -> float:
    waves = max(rank.num_waves for rank in ranks)
    return min(pipeline_us(partition, *ranks) for partition in _partitions(waves))


def _latency_and_bandwidth(latency_us: float, us_per_byte: float) -> Callable[[float], float]:
    return lambda num_bytes: latency_us + num_bytes * us_per_byte


# Five waves of 10 µs on four processors; a wave is 100 bytes and takes 2 + 6 µs to send.
EXAMPLE = SendingGemm(50.0, 20, 4, 0, 500.0, _latency_and_bandwidth(2.0, 0.06))


def test_figure_9_by_hand() -> None:
    """(1, 2, 2): groups computed at 10, 30, 50, sent in 8, 14, 14. (2, 3): computed at 20, 50, sent in 14, 20."""
    assert pipeline_us((1, 2, 2), EXAMPLE) == pytest.approx(64.0)  # max(50, max(30, 10 + 8) + 14) + 14
    assert pipeline_us((2, 3), EXAMPLE) == pytest.approx(70.0)  # max(50, 20 + 14) + 20
    assert pipeline_us((5,), EXAMPLE) == pytest.approx(82.0)  # nothing overlaps


def test_best_of_the_example() -> None:
    """Each wave is sent before the next is done, so the last should be as small as can be: 50 + 8 µs."""
    partition = best_partition(EXAMPLE)
    assert partition[-1] == 1
    assert pipeline_us(partition, EXAMPLE) == pytest.approx(58.0)


def test_slow_link_wants_growing_groups() -> None:
    """§6.5: where communication dominates, "larger group sizes should be adopted toward the timeline's end".

    A wave takes 22 µs to send. (1, 2, 2) arrive at 32, 74, 116; equal groups of one only at 120.
    """
    slow = replace(EXAMPLE, transfer_us=_latency_and_bandwidth(2.0, 0.2))
    partition = best_partition(slow)
    assert list(partition) == sorted(partition) and len(partition) == 3
    assert pipeline_us(partition, slow) == pipeline_us((1, 2, 2), slow) == pytest.approx(116.0)
    assert pipeline_us((1, 1, 1, 1, 1), slow) == pytest.approx(120.0)


@pytest.mark.parametrize(("tiles", "waves"), [(512, 4), (1024, 8)])
def test_waves_of_the_paper(tiles: int, waves: int) -> None:
    """§2.1.1: 512 tiles on 128 SMs are four waves; §4.1.2: 4096 by 8192 are eight, and 128 partitions."""
    rank = SendingGemm(1.0, tiles, 128, 0, 1.0, float)
    assert rank.num_waves == waves
    assert sum(1 for _ in _partitions(waves)) == 2 ** (waves - 1)


def test_communication_makes_more_waves_not_longer_ones() -> None:
    """Algorithm 1, line 3: 1024 tiles on 128 - 20 SMs take ten waves instead of eight; each as long as before."""
    alone = SendingGemm(800.0, 1024, 128, 0, 1.0, float)
    shared = replace(alone, num_sending_units=20)
    assert (alone.num_waves, shared.num_waves) == (8, 10)
    assert alone.wave_us == shared.wave_us == 100.0
    assert shared.computed_us(10) == shared.computed_us(11) == 1000.0


def test_last_wave_holds_what_is_left() -> None:
    rank = SendingGemm(30.0, 10, 4, 0, 1000.0, float)
    assert [rank.group_us(wave, wave + 1) for wave in range(3)] == pytest.approx([400.0, 400.0, 200.0])
    assert rank.group_us(0, 3) == pytest.approx(1000.0)
    assert rank.group_us(3, 4) == 0.0


def _random_rank(generator: random.Random, most_latency: float) -> SendingGemm:
    """2 to 9 waves; communication 0.2 to 3 times as long as the GEMM; latency up to so many waves' transfer."""
    waves = generator.randrange(2, 10)
    tiles = waves * 124 - generator.randrange(124)
    gemm_us = generator.uniform(20, 200) * waves
    transfer_us = generator.uniform(0.2, 3.0) * gemm_us
    latency_us = generator.uniform(0, most_latency) * transfer_us / waves
    transfer = _latency_and_bandwidth(latency_us, transfer_us / 1e6)
    return SendingGemm(gemm_us, tiles, 132, 8, 1e6, transfer)


@pytest.mark.parametrize("seed", range(40))
def test_search_is_exhaustive(seed: int) -> None:
    """The search finds a partition as good as the best of all, at any latency."""
    generator = random.Random(seed)
    rank = _random_rank(generator, most_latency=4.0)
    found = pipeline_us(best_partition(rank), rank)
    assert found == pytest.approx(_exhaustive(rank), rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_pruned_search_is_within_a_percent(seed: int) -> None:
    """§6.5: "the searched partitions achieve > 99% performance of the optimal ones", where latency is small."""
    rank = _random_rank(random.Random(seed), most_latency=0.1)
    pruned = best_partition(rank, max_first=MAX_FIRST_GROUP, max_last=MAX_LAST_GROUP)
    assert pruned[0] <= MAX_FIRST_GROUP and pruned[-1] <= MAX_LAST_GROUP
    assert pipeline_us(pruned, rank) <= 1.01 * _exhaustive(rank)


@pytest.mark.parametrize("seed", range(20))
def test_pruned_search_is_the_best_of_what_is_left(seed: int) -> None:
    rank = _random_rank(random.Random(seed), most_latency=4.0)
    left = [p for p in _partitions(rank.num_waves) if p[0] <= MAX_FIRST_GROUP and p[-1] <= MAX_LAST_GROUP]
    pruned = best_partition(rank, max_first=MAX_FIRST_GROUP, max_last=MAX_LAST_GROUP)
    assert pruned in left
    best = min(pipeline_us(partition, rank) for partition in left)
    assert pipeline_us(pruned, rank) == pytest.approx(best, rel=1e-12)


def test_pruning_costs_where_latency_is_large() -> None:
    """Eight waves of 10 µs whose messages have a latency of 75: one group is best, and pruning forbids it."""
    rank = SendingGemm(80.0, 8, 1, 0, 8.0, _latency_and_bandwidth(75.0, 1.0))
    assert best_partition(rank) == (8,)
    pruned = best_partition(rank, max_first=MAX_FIRST_GROUP, max_last=MAX_LAST_GROUP)
    assert pipeline_us(pruned, rank) > 1.3 * pipeline_us((8,), rank)


def test_a_measured_curve() -> None:
    """Algorithm 1, line 5: sampled sizes, interpolated; small messages use the link badly (Figure 8)."""
    curve = (Point(1 << 16, 20.0), Point(1 << 20, 30.0), Point(1 << 24, 200.0))
    rank = SendingGemm(600.0, 1000, 132, 8, float(1 << 26), partial(interpolate_us, curve))
    partition = best_partition(rank)
    found = pipeline_us(partition, rank)
    assert found == pytest.approx(_exhaustive(rank))
    sequence_us = rank.computed_us(rank.num_waves) + rank.group_us(0, rank.num_waves)
    assert found < sequence_us == pytest.approx(pipeline_us((rank.num_waves,), rank))


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_beats_perfect_overlap(seed: int) -> None:
    """§6.4: FlashOverlap reaches 69 to 98 % of it; a latency-free link and no processor taken away come closest."""
    rank = replace(_random_rank(random.Random(seed), most_latency=1.0), num_sending_units=0)
    bound_us = perfect_overlap_us(rank)
    assert bound_us <= _exhaustive(rank) * (1 + 1e-12)


def test_perfect_overlap_by_hand() -> None:
    """The GEMM and its last wave (50 + 8); or the first wave and all communication (10 + 2 + 100)."""
    assert perfect_overlap_us(EXAMPLE) == pytest.approx(58.0)
    slow = replace(EXAMPLE, transfer_us=_latency_and_bandwidth(2.0, 0.2))
    assert perfect_overlap_us(slow) == pytest.approx(112.0)


def test_the_latest_rank_decides() -> None:
    """§4.2.2: of unequal ranks the maximum at every group, so never faster than the slowest alone."""
    busy = replace(EXAMPLE, message_bytes=900.0)
    slow = replace(EXAMPLE, gemm_us=70.0)
    for partition in _partitions(5):
        together = pipeline_us(partition, EXAMPLE, busy, slow)
        assert together >= max(pipeline_us(partition, rank) for rank in (EXAMPLE, busy, slow))
    best = best_partition(EXAMPLE, busy, slow)
    assert pipeline_us(best, EXAMPLE, busy, slow) == pytest.approx(_exhaustive(EXAMPLE, busy, slow))


def test_ranks_with_fewer_waves_are_done_early() -> None:
    short = replace(EXAMPLE, gemm_us=20.0, num_tiles=7, message_bytes=175.0)
    assert short.num_waves == 2
    for partition in _partitions(5):
        assert pipeline_us(partition, EXAMPLE, short) == pipeline_us(partition, EXAMPLE)


def test_no_tiles() -> None:
    """An expert without tokens: no wave, no group, no time."""
    nothing = replace(EXAMPLE, gemm_us=0.0, num_tiles=0, message_bytes=0.0)
    assert best_partition(nothing) == ()
    assert pipeline_us((), nothing) == 0.0


def test_a_partition_covers_every_wave() -> None:
    with pytest.raises(AssertionError, match="of 5 waves"):
        pipeline_us((2, 2), EXAMPLE)


def test_many_waves_are_no_trouble() -> None:
    """A hundred waves have 2^99 partitions."""
    rank = SendingGemm(1000.0, 13200, 132, 0, 1e8, _latency_and_bandwidth(5.0, 1e-5))
    partition = best_partition(rank)
    assert sum(partition) == 100
    assert pipeline_us(partition, rank) <= pipeline_us((1,) * 100, rank)
