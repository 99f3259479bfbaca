"""Weights fetched under computation: the DWDP paper's roofline, its Table 1 and its break-even."""

from __future__ import annotations

import pytest

from weaveopt.cost_model.machine import Link
from weaveopt.cost_model.planned.all_to_all import all_to_all_cost
from weaveopt.cost_model.planned.contention import pull_slowdown
from weaveopt.cost_model.planned.prefetch import (
    Prefetch,
    break_even_tokens,
    expert_parallel_us,
    fetch_us,
    num_missing_experts,
    operator_us,
    pull_us,
)

TABLE_1 = {
    "Attention": (269.67, 320.56),
    "GroupedGEMM": (342.40, 337.42),
    "DenseGEMM": (177.50, 189.28),
    "Others": (241.69, 284.32),
    "Communication": (126.74, 0.00),
    "D2D Copy": (0.00, 34.00),
}
"""DWDP Table 1: µs of DEP4 and DWDP4."""


def test_operator_is_bound_by_arithmetic_or_memory() -> None:
    """§3: 1 TFLOP at 1 PFLOP/s is 1000 µs; 1 GB at 1 TB/s as well."""
    assert operator_us(1e12, 1e8, 1e15, 1e12) == pytest.approx(1000.0)
    assert operator_us(1e11, 1e9, 1e15, 1e12) == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("experts", "ranks", "local", "missing"),
    [(256, 4, None, 192), (256, 3, None, 170), (256, 1, None, 0), (16, 4, 8, 8), (16, 4, 20, 0), (7, 3, None, 4)],
)
def test_missing_experts(experts: int, ranks: int, local: int | None, missing: int) -> None:
    """§2: group sizes that do not divide the experts hold some twice; more local experts, less to fetch."""
    assert num_missing_experts(experts, ranks, local) == missing


def test_fetch_by_hand() -> None:
    link = Link("", 2.0, 1e12)
    assert fetch_us(192, 1e6, 4, link) == pytest.approx(3 * 2.0 + 192.0)
    assert fetch_us(0, 1e6, 4, link) == 0.0
    assert fetch_us(8, 1e6, 1, link) == 0.0


def test_a_round_is_serial_pulls() -> None:
    """Eq. 1: τ = T / (N - 1)."""
    assert pull_us(429.0, 4) == 143.0
    assert pull_us(429.0, 1) == 0.0


def test_table_1_adds_up() -> None:
    """DEP4 waits for its communication and its ranks (1319.85); DWDP4 hides its copies of 429.00 (1165.58)."""
    dep_us, dwdp_us = (sum(row[column] for row in TABLE_1.values()) for column in (0, 1))
    communication_us = TABLE_1["Communication"][0]
    assert expert_parallel_us(dep_us - communication_us, communication_us, 161.85) == pytest.approx(1319.85)
    layer = Prefetch(compute_us=dwdp_us, fetch_us=429.00)
    assert layer.layer_us == pytest.approx(1165.58)
    assert layer.exposed_us == 0.0 and layer.compute_bound
    assert 1 - layer.layer_us / 1319.85 == pytest.approx(0.1169, abs=5e-5)


def test_contention_of_table_1_stays_hidden() -> None:
    """Even in turn at the source, the copies of Table 1 fit under its computation; §5.2: gains are in short windows."""
    slowed_us = 429.00 * pull_slowdown(4)
    assert Prefetch(1165.58, slowed_us).exposed_us == 0.0
    short_us = 429.00
    assert Prefetch(short_us, slowed_us).exposed_us == pytest.approx(429.00 * 2 / 3)


def test_whatever_is_longer_decides() -> None:
    short, long = Prefetch(3.0, 10.0), Prefetch(10.0, 3.0)
    assert (short.layer_us, short.exposed_us, short.compute_bound, short.coverage) == (10.0, 7.0, False, 0.3)
    assert (long.layer_us, long.exposed_us, long.compute_bound) == (10.0, 0.0, True)
    assert Prefetch(10.0, 0.0).coverage == float("inf")


@pytest.mark.parametrize(("fetch_us", "tokens"), [(0.0, 1), (10.0, 1), (10.1, 2), (995.0, 100), (1000.0, 100)])
def test_break_even_is_the_first_that_covers(fetch_us: float, tokens: int) -> None:
    assert break_even_tokens(lambda count: 10.0 * count, fetch_us, 100) == tokens


def test_no_break_even() -> None:
    assert break_even_tokens(lambda count: 10.0 * count, 1000.1, 100) is None
    assert break_even_tokens(lambda count: 0.0, 1.0, 0) is None


# DeepSeek-R1, one layer: hidden 7168; 256 routed experts of 3 x 7168 x 2048, 8 of them and a shared one a token;
# latent attention with 187 M weights and 128 heads of 192 + 128. NVFP4: 4 bits a weight and 8 bits a group of 16.
EXPERT_WEIGHTS = 3 * 7168 * 2048
FETCHED_US = fetch_us(num_missing_experts(256, 4), EXPERT_WEIGHTS * (0.5 + 1 / 16), 4, Link("", 2.0, 900e9))
"""NVLink 5 carries 1800 GB/s both ways (§A.1)."""
FP4_FLOPS, FP8_FLOPS, BF16_FLOPS, HBM_BYTES = 10e15, 5e15, 2.5e15, 8e12
"""GB200, dense, from its datasheet; memory as in §A.1."""


def _compute_us(tokens: int) -> float:
    """One layer's roofline: dense attention weights in bf16, scores in fp8, experts in fp4."""
    experts = operator_us(2 * 9 * EXPERT_WEIGHTS * tokens, 257 * EXPERT_WEIGHTS * 0.5625, FP4_FLOPS, HBM_BYTES)
    projections = operator_us(2 * 187e6 * tokens, 2 * 187e6, BF16_FLOPS, HBM_BYTES)
    scores = operator_us(2 * 128 * (192 + 128) * tokens**2 / 2, 576 * tokens, FP8_FLOPS, HBM_BYTES)
    return experts + projections + scores


def _all_to_all_us(tokens: int) -> float:
    """Each token goes to the three other ranks in fp8 and comes back from them in bf16."""
    return sum(
        all_to_all_cost(4 * tokens * 7168 * width, 4, 1, Link("", 2.0, 900e9), Link("", 2.0, 9e9)).us
        for width in (1, 2)
    )


def test_break_even_near_16k_tokens() -> None:
    """§3: "DWDP begins to outperform DEP at around 16K tokens" (DeepSeek-R1, GB200, batch 1, four ranks).

    From datasheets alone, within half an octave of Figure 3's axis; hidden altogether somewhat later.
    """
    outperforms = break_even_tokens(lambda tokens: _compute_us(tokens) + _all_to_all_us(tokens), FETCHED_US, 65536)
    hidden = break_even_tokens(_compute_us, FETCHED_US, 65536)
    assert outperforms is not None and hidden is not None
    assert 2**13.5 < outperforms < hidden < 2**14.5


def _advantage(tokens: int) -> float:
    """T_DEP / T_DWDP (Figure 3b)."""
    exchanged_us = expert_parallel_us(_compute_us(tokens), _all_to_all_us(tokens))
    return exchanged_us / Prefetch(_compute_us(tokens), FETCHED_US).layer_us


def test_advantage_rises_and_falls() -> None:
    """§3: below 1 for short inputs, above 1 for long ones, "not monotonic": computation dominates in the end."""
    short, middle, long = (_advantage(tokens) for tokens in (1024, 16384, 131072))
    assert short < 1 < long < middle
