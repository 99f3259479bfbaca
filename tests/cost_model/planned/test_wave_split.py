"""Splits at wave boundaries: TokenWeave's examples, and every split of small batches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from weaveopt.cost_model.planned.wave_split import Split, TiledGemm, free_split_points, smart_split

ONE_CTA_A_TOKEN = TiledGemm(tile_m=1, tile_n=128, num_columns=128, num_units=132)


def test_300_ctas_on_132_sms() -> None:
    """§4.1.1: three waves whole, four in halves of 150, three again as 132 and 168."""
    assert ONE_CTA_A_TOKEN.num_waves(300, 132) == 3
    assert ONE_CTA_A_TOKEN.added_waves(300, 150) == 1
    assert ONE_CTA_A_TOKEN.added_waves(300, 132) == ONE_CTA_A_TOKEN.added_waves(300, 168) == 0
    assert smart_split((ONE_CTA_A_TOKEN,), 300) == Split(prefix=168, suffix=132, added_us=0.0)


def test_free_points_of_the_example() -> None:
    """132 and 168 are the free splits nearest to one half; each end of the free ranges leaves a full wave."""
    free = free_split_points((ONE_CTA_A_TOKEN,), 300)
    assert free == (*range(36, 133), *range(168, 265))


def test_ten_ctas_on_four_sms() -> None:
    """Figure 8: three waves; five and five take four, six and four take three."""
    gemm = TiledGemm(1, 1, 1, 4)
    assert (gemm.num_waves(10, 4), gemm.added_waves(10, 5), gemm.added_waves(10, 6)) == (3, 1, 0)
    assert smart_split((gemm,), 10) == Split(6, 4, 0.0)


def test_one_wave_has_no_free_split() -> None:
    """§A.2: a batch of one wave is not worth a split."""
    assert free_split_points((ONE_CTA_A_TOKEN,), 132) == ()
    split = smart_split((ONE_CTA_A_TOKEN,), 132)
    assert split == Split(66, 66, 1.0)


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_to_split(tokens: int) -> None:
    assert smart_split((ONE_CTA_A_TOKEN,), tokens) is None
    assert free_split_points((ONE_CTA_A_TOKEN,), tokens) == ()


def test_a_gemm_of_few_rows_takes_a_tile() -> None:
    """NVRAR Table 4: 32 rows or 16 take one tile's time (0.614 and 0.574 ms), for the same waves."""
    gemm = TiledGemm(tile_m=128, tile_n=256, num_columns=8192, num_units=108)
    assert gemm.num_waves(32, 108) == gemm.num_waves(16, 108) == 1
    assert gemm.added_waves(32, 16) == 1


def test_tokens_of_llama_on_h200() -> None:
    """Products of Llama-3.3-70B on four ranks, tiles of 128 by 256: of 1536 tokens, halves cost three waves.

    Two thirds and one third cost one, as §4.1.1 means it: not equally many tokens, but full waves.
    """
    gemms = tuple(TiledGemm(128, 256, columns, 132) for columns in (2560, 8192, 14336, 8192))
    assert sum(each.added_waves(1536, 768) for each in gemms) == 3
    assert smart_split(gemms, 1536) == Split(prefix=1024, suffix=512, added_us=1.0)


def test_longer_waves_weigh_more() -> None:
    """Two GEMMs that cannot both keep their waves: the one whose waves are longer does."""
    first, second = TiledGemm(1, 1, 2, 6), TiledGemm(1, 1, 3, 6)
    assert smart_split((first, replace(second, wave_us=0.01)), 6) == Split(3, 3, 0.01)
    assert smart_split((first, replace(second, wave_us=100.0)), 6) == Split(4, 2, 1.0)


def test_processors_that_communication_takes() -> None:
    """264 CTAs are two waves of 132; with eight SMs away, halves of 132 take two waves of 124 each."""
    whole, shared = (TiledGemm(1, 1, 1, 132, num_reserved_units=away) for away in (0, 8))
    assert whole.added_waves(264, 132) == 0
    assert shared.added_waves(264, 132) == 2
    split = smart_split((shared,), 264)
    assert split == Split(140, 124, 1.0)


def _cheapest(gemms: tuple[TiledGemm, ...], tokens: int) -> tuple[float, int]:
    """(added time, unevenness) of the best of all splits."""
    costs = [
        (sum(each.added_waves(tokens, prefix) * each.wave_us for each in gemms), abs(2 * prefix - tokens))
        for prefix in range(1, tokens)
    ]
    return min(costs)


def test_no_split_is_better_and_more_even() -> None:
    """Against every prefix, not only the points worth a look."""
    generator = random.Random(11)
    for _ in range(150):
        gemms = tuple(
            TiledGemm(
                tile_m=generator.choice([4, 8, 12, 16]),
                tile_n=8,
                num_columns=generator.randrange(1, 100),
                num_units=generator.randrange(5, 20),
                wave_us=float(generator.randrange(1, 6)),
                num_reserved_units=generator.randrange(3),
            )
            for _ in range(generator.randrange(1, 4))
        )
        tokens = generator.randrange(2, 200)
        found = smart_split(gemms, tokens)
        assert found is not None and found.prefix + found.suffix == tokens
        assert found.prefix >= found.suffix  # the first split is the longer one (§A.2)
        assert (found.added_us, abs(found.prefix - found.suffix)) == _cheapest(gemms, tokens)
        for prefix in free_split_points(gemms, tokens):
            assert all(each.added_waves(tokens, prefix) <= 0 for each in gemms)
