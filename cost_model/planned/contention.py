"""Many ranks pull from one source at the same time: the random model of the DWDP paper, §4.3.

Of `N` ranks, each with one pull under way, a tagged rank finds `X ~ Binomial(N - 2, 1 / (N - 1))` others at the
source that it chose (eq. 2); the contention is `C = X + 1`.
"""

from __future__ import annotations

from math import comb


def contention_probabilities(ranks: int) -> tuple[float, ...]:
    """`Pr[C = c]` for `c = 1 … N - 1` (Table 2); empty for a single rank, which pulls nothing."""
    if ranks <= 1:
        return ()
    chosen = 1.0 / (ranks - 1)
    others = ranks - 2
    return tuple(comb(others, x) * chosen**x * (1.0 - chosen) ** (others - x) for x in range(ranks - 1))


def contention_at_least(ranks: int, degree: int) -> float:
    """`Pr[C >= degree]`."""
    # The far tail first: its terms span fifteen decades.
    return sum(reversed(contention_probabilities(ranks)[max(0, degree - 1) :]))


def pull_slowdown(ranks: int, num_in_flight: int = 1) -> float:
    """Expected slowdown of a rank's pulls; 1 is none.

    One whole pull at a time (`num_in_flight=1`): a source serves equal pulls in turn, `C τ` each (§4.3.1), so
    `E[C] = 1 + (N - 2) / (N - 1)`, which stays below 2.

    In slices with `k` in flight (§4.3.2): the least contended one keeps the port busy, and with two of them data
    slow down only where both meet a contention of at least 3: `E[max(1, min(C_1 … C_k) / k)]`.
    """
    if ranks <= 1:
        return 1.0
    beyond = sum(contention_at_least(ranks, degree) ** num_in_flight for degree in range(num_in_flight + 1, ranks))
    return 1.0 + beyond / num_in_flight


def slowed_slices(ranks: int, num_in_flight: int = 2) -> float:
    """Probability that slicing does not hide the contention: `Pr[C > k]^k`, all `k` in flight being that contended."""
    return contention_at_least(ranks, num_in_flight + 1) ** num_in_flight
