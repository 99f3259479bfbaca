"""The table of timed kernels: exact shapes, other sizes of a kernel that was timed, layouts, and machines with it."""

from __future__ import annotations

from dataclasses import replace
from math import hypot, log, sqrt

import pytest

from weaveopt import cost_model
from weaveopt.cost_model import Attention, Gemm, attention_us, batched_gemm_us, gemm_us, grouped_gemm_us
from weaveopt.cost_model.attention import shape_of
from weaveopt.cost_model.timed import NOTHING_TIMED, KernelShape, KernelTime, TimedKernels
from weaveopt.records.price import Price, PriceSource, error_us_of, source_of
from weaveopt.records.skew import Skew

MACHINE = cost_model.load("h100x2")
K, N = 5120, 13824
BF16 = "bfloat16"


def gemm(m: int, layout: str = "") -> KernelShape:
    return KernelShape("gemm", BF16, m, (K, N), layout)


def with_times(*kernels: KernelTime) -> cost_model.Machine:
    return replace(MACHINE, timed=TimedKernels(kernels))


def test_a_timed_shape_takes_what_was_timed() -> None:
    machine = with_times(KernelTime(gemm(1500), 123.0))
    assert gemm_us(machine, Gemm(1500, K, N), BF16) == 123.0
    assert gemm_us(machine, Gemm(1500, K, N), "float32") == gemm_us(MACHINE, Gemm(1500, K, N), "float32")
    assert gemm_us(machine, Gemm(1500, N, K), BF16) == gemm_us(MACHINE, Gemm(1500, N, K), BF16)


def test_other_sizes_are_the_curve_scaled_to_the_timed_ones() -> None:
    curve = {m: gemm_us(MACHINE, Gemm(m, K, N), BF16) for m in (500, 1000, 1500, 2000, 4000, 16000)}
    machine = with_times(KernelTime(gemm(1000), curve[1000] * 1.2), KernelTime(gemm(4000), curve[4000] * 0.9))
    scaled = {m: gemm_us(machine, Gemm(m, K, N), BF16) / curve[m] for m in curve}
    assert scaled[1000] == pytest.approx(1.2) and scaled[4000] == pytest.approx(0.9)
    assert scaled[2000] == pytest.approx(sqrt(1.2 * 0.9))  # half of the way in the logarithm
    assert scaled[500] == pytest.approx(sqrt(1.2))  # half of the way out
    assert scaled[16000] == pytest.approx(1.0)  # too far to tell
    assert scaled[1500] == pytest.approx(1.2 * (0.9 / 1.2) ** (log(1.5) / log(4.0)))


def test_layouts_are_told_apart_and_a_shape_without_one_takes_any() -> None:
    machine = with_times(KernelTime(gemm(1500, "rc"), 100.0), KernelTime(gemm(1500, "rr"), 110.0))
    assert gemm_us(machine, Gemm(1500, K, N, "rr"), BF16) == 110.0
    assert gemm_us(machine, Gemm(1500, K, N), BF16) == 100.0
    curve = gemm_us(MACHINE, Gemm(1500, K, N), BF16)
    assert gemm_us(machine, Gemm(1500, K, N, "rc bias"), BF16) == pytest.approx(100.0)
    assert curve not in (100.0, 110.0)


def test_all_families_ask_the_table() -> None:
    attention = Attention(1, 20, 4, 1500, 1500, 128, BF16, causal=True, kernel="flash")
    shapes = (
        KernelShape("bmm", BF16, 64, (8, 128, 256)),
        KernelShape("grouped_gemm", BF16, 512, (16, 2048, 1536)),
        shape_of(attention),
    )
    machine = with_times(*(KernelTime(shape, 7.0 + at) for at, shape in enumerate(shapes)))
    assert batched_gemm_us(machine, 8, Gemm(64, 128, 256), BF16) == 7.0
    assert grouped_gemm_us(machine, 16, Gemm(512, 2048, 1536), BF16) == 8.0
    assert attention_us(machine, attention) == 9.0
    skewed = replace(machine, skew=Skew(0.5, 0.125))
    assert grouped_gemm_us(skewed, 16, Gemm(512, 2048, 1536), BF16) != 8.0, "rows were timed as they spread evenly"
    longer = replace(attention, q_len=3000, kv_len=3000)
    assert shape_of(longer) == replace(shape_of(attention), size=3000)
    assert attention_us(machine, longer) != attention_us(MACHINE, longer)
    assert attention_us(machine, replace(attention, kernel="cudnn")) == attention_us(
        MACHINE, replace(attention, kernel="cudnn")
    )


def test_nothing_timed_is_the_profile() -> None:
    assert replace(MACHINE, timed=TimedKernels()) == MACHINE and MACHINE.timed is NOTHING_TIMED
    machine = with_times(KernelTime(gemm(1500), 123.0))
    assert machine != MACHINE and machine.untimed == MACHINE and hash(machine.untimed) == hash(MACHINE)
    same = with_times(KernelTime(gemm(1500), 123.0))
    assert same == machine and hash(same) == hash(machine)
    assert "timed" not in cost_model.dumps(MACHINE)


def test_an_error_is_that_of_the_spread() -> None:
    assert KernelTime(gemm(1), 5.0, 0.4).relative_error == pytest.approx(0.1)
    assert KernelTime(gemm(1), 5.0, 0.0).relative_error == pytest.approx(0.02)


def noisy(spread: float, us: float = 50.0) -> cost_model.Machine:
    return with_times(KernelTime(gemm(1500), us, spread))


def test_a_time_is_off_by_its_spread() -> None:
    quiet, loud = (gemm_us(noisy(spread), Gemm(1500, K, N), BF16) for spread in (0.01, 0.12))
    assert (error_us_of(quiet), error_us_of(loud)) == (pytest.approx(1.0), pytest.approx(1.5))
    assert source_of(quiet) is source_of(loud) is PriceSource.TIMED


def test_a_time_that_spreads_wider_than_the_profile_may_be_off_does_not_take_its_place() -> None:
    profile = gemm_us(MACHINE, Gemm(1500, K, N), BF16)
    spread = 4.2 * error_us_of(profile) / profile
    assert gemm_us(noisy(0.9 * spread), Gemm(1500, K, N), BF16) == 50.0
    for rows in (1500, 2000):  # nor does it correct other sizes
        plain = gemm_us(MACHINE, Gemm(rows, K, N), BF16)
        found = gemm_us(noisy(2.0 * spread), Gemm(rows, K, N), BF16)
        assert found == plain and error_us_of(found) == error_us_of(plain)


def test_what_is_scaled_to_times_is_off_by_both() -> None:
    plain = gemm_us(MACHINE, Gemm(2000, K, N), BF16)
    scaled = gemm_us(noisy(0.0), Gemm(2000, K, N), BF16)
    share = 1.0 - log(2000 / 1500) / log(4.0)
    assert error_us_of(scaled) / scaled == pytest.approx(hypot(error_us_of(plain) / plain, 0.02 * share))
    assert source_of(scaled) is source_of(plain)


def test_prices_of_a_profile_that_stands_in_are_off_together_by_all_that_they_are() -> None:
    stand_in = replace(MACHINE, stands_in=True)
    long, short = gemm_us(stand_in, Gemm(4000, K, N), BF16), cost_model.memory_us(stand_in, 1 << 24)
    assert isinstance(long, Price) and isinstance(short, Price)
    assert error_us_of(long) == long and error_us_of(long - short) == pytest.approx(long - short)
    timed = replace(stand_in, timed=TimedKernels([KernelTime(gemm(4000), 100.0)]))
    assert error_us_of(gemm_us(timed, Gemm(4000, K, N), BF16)) == pytest.approx(2.0)
    near, far = (gemm_us(timed, Gemm(m, K, N), BF16) for m in (4400, 12000))
    assert error_us_of(near) / near < 0.1 < 0.5 < error_us_of(far) / far
