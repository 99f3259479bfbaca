"""Expert weights fetched under computation instead of tokens exchanged: the roofline of the DWDP paper, §3.

A rank holds some experts of a layer and pulls the others, one peer after the other, while it computes the layer
before; it waits only for what the computation did not cover.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from weaveopt.cost_model.machine import Link


def operator_us(flops: float, num_bytes: float, flops_per_s: float, bytes_per_s: float) -> float:
    """`T_op = max(F / P_peak, B / BW_mem)` (§3): arithmetic or memory traffic, whichever takes longer."""
    return max(flops / flops_per_s, num_bytes / bytes_per_s) * 1e6


def num_missing_experts(num_experts: int, ranks: int, num_local: int | None = None) -> int:
    """Experts that a rank fetches for one layer.

    Every rank holds equally many: `ceil(E / n)`, or `num_local` where there is memory for more. The number of ranks
    need not divide the number of experts (§2): some are then held twice.
    """
    held = -(-num_experts // ranks) if num_local is None else num_local
    return max(0, num_experts - held)


def fetch_us(num_experts: int, expert_bytes: float, ranks: int, link: Link) -> float:
    """`T_prefetch`: `num_experts` from `n - 1` peers in turn, `(n - 1) α + E_missing bytes / β`; 0 for none.

    `link` is a copy engine's way to one peer at a time, without contention.
    """
    if num_experts <= 0 or ranks <= 1:
        return 0.0
    return (ranks - 1) * link.latency_us + link.us(num_experts * expert_bytes)


def pull_us(total_us: float, ranks: int) -> float:
    """`τ = T / (N - 1)` (eq. 1): one of the equal, serial pulls that a round consists of."""
    return total_us / (ranks - 1) if ranks > 1 else 0.0


@dataclass(frozen=True)
class Prefetch:
    """One layer whose weights arrive under the computation of the layer before."""

    compute_us: float
    """Attention and experts, slowed by the copies that run under them."""
    fetch_us: float
    """All missing experts, contention included."""

    @property
    def layer_us(self) -> float:
        """`T_DWDP = max(T_compute, T_prefetch)` (§3)."""
        return max(self.compute_us, self.fetch_us)

    @property
    def exposed_us(self) -> float:
        """What a rank waits for weights: 0 where computation covers the fetch."""
        return max(0.0, self.fetch_us - self.compute_us)

    @property
    def coverage(self) -> float:
        """`T_compute / T_prefetch` (Figure 3a): at 1 and above nothing is exposed."""
        return self.compute_us / self.fetch_us if self.fetch_us > 0 else float("inf")

    @property
    def compute_bound(self) -> bool:
        """Whether computation decides; else fetching does."""
        return self.compute_us >= self.fetch_us


def expert_parallel_us(compute_us: float, all_to_all_us: float, waiting_us: float = 0.0) -> float:
    """`T_DEP = T_compute + T_all2all` (§3), and what ranks wait for the busiest (Table 1: synchronization cost)."""
    return compute_us + all_to_all_us + waiting_us


def break_even_tokens(window_us: Callable[[int], float], fetch_us: float, max_tokens: int) -> int | None:
    """The fewest tokens whose window covers the fetch; None if `max_tokens` do not. About 16K at batch 1 (§3).

    `window_us` never falls with tokens. With `T_compute` it tells where the fetch is hidden; with
    `T_compute + T_all2all`, where fetching weights is no slower than exchanging tokens.
    """
    tokens = bisect_left(range(1, max_tokens + 1), True, key=lambda count: window_us(count) >= fetch_us) + 1
    return tokens if tokens <= max_tokens else None
