"""Ranks that pull experts through each other's links, on a clock: DWDP, sections 4.1 to 4.3.

Every rank computes layer after layer and pulls the experts of the next layer meanwhile, from each peer its part, by a
copy engine that keeps some requests in flight. A source's link is shared by the requests that read from it at once, a
destination's by those in flight; rates change only when a request begins or ends, so the clock goes from event to
event.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from weaveopt.cost_model.imbalance import busiest_over_mean


def contention(ranks: int) -> tuple[float, ...]:
    """Probability that 1, 2, ... pulls read from one source at once, where each rank pulls from a random peer (equation
    2): `1 + Binomial(ranks - 2, 1 / (ranks - 1))`."""
    others, chance = ranks - 2, 1.0 / (ranks - 1)
    return tuple(math.comb(others, x) * chance**x * (1.0 - chance) ** (others - x) for x in range(others + 1))


@dataclass(frozen=True)
class Pulls:
    """How ranks pull, in units of the link of one rank."""

    ranks: int
    fetch_us: float
    """All that a rank lacks of one layer, with nobody else on the links."""
    slices: int = 1
    """Requests into which the part of each peer is cut; they go round robin over the peers (section 4.3)."""
    in_flight: int = 1
    """Requests that a copy engine works on at once."""
    source: float = 1.0
    """Rate of a source's link, relative to that of one pull."""
    jitter: float = 0.0
    """Standard deviation of a layer's computation, relative to it: ranks drift apart."""


@dataclass
class _Request:
    source: int
    left_us: float


class _PullingRank:
    """One rank: its computation of the layer it is at, and the pulls for the next one."""

    def __init__(self, index: int, pulls: Pulls, rng: random.Random) -> None:
        self.index, self._pulls, self._rng = index, pulls, rng
        self.compute_left_us = 0.0
        self.queue: list[_Request] = []
        self.active: list[_Request] = []
        self.layers = 0
        self.exposed_us = 0.0

    def begin(self, window_us: float) -> None:
        """Next layer: its computation, and the pull of the one after it."""
        pulls = self._pulls
        self.compute_left_us = max(window_us * (1.0 + self._rng.gauss(0.0, pulls.jitter)), 0.0)
        part_us = pulls.fetch_us / ((pulls.ranks - 1) * pulls.slices)
        peers = [peer for peer in range(pulls.ranks) if peer != self.index]
        if pulls.slices == 1:
            self._rng.shuffle(peers)  # ranks are out of step: which source comes next is random
        else:
            peers = peers[self.index :] + peers[: self.index]
        self.queue = [_Request(peer, part_us) for _ in range(pulls.slices) for peer in peers]
        self.refill()

    def refill(self) -> None:
        while self.queue and len(self.active) < self._pulls.in_flight:
            self.active.append(self.queue.pop(0))

    @property
    def is_done(self) -> bool:
        return self.compute_left_us <= 0.0 and not self.active


def exposed_share(pulls: Pulls, window_us: float, layers: int = 60, seed: int = 0) -> float:
    """Fraction of the time in which a rank computes nothing, as its experts are not there yet; mean of the ranks.

    `window_us` is what a rank computes in a layer. Ranks begin at random phases.
    """
    rng = random.Random(seed)
    ranks = [_PullingRank(index, pulls, rng) for index in range(pulls.ranks)]
    for rank in ranks:
        rank.begin(window_us * (1.0 + rng.random()))
    now_us = 0.0
    while min(rank.layers for rank in ranks) < layers:
        rates = _rates(ranks, pulls)
        step_us = min(
            (left for rank in ranks for left in _lefts(rank, rates)),
            default=0.0,
        )
        now_us += step_us
        for rank in ranks:
            _advance(rank, step_us, rates, window_us)
    return sum(rank.exposed_us for rank in ranks) / (now_us * pulls.ranks)


def _rates(ranks: list[_PullingRank], pulls: Pulls) -> dict[int, float]:
    """Rate of each active request, by identity: its share of its source's link, and of its rank's own."""
    readers: dict[int, int] = {}
    for rank in ranks:
        for request in rank.active:
            readers[request.source] = readers.get(request.source, 0) + 1
    return {
        id(request): rate
        for rank in ranks
        for request, rate in zip(
            rank.active, _own_shares([pulls.source / readers[r.source] for r in rank.active]), strict=True
        )
    }


def _own_shares(offered: list[float]) -> list[float]:
    """Split one link among requests that their sources offer these rates; what one cannot use the others get."""
    shares, left = [0.0] * len(offered), 1.0
    order = sorted(range(len(offered)), key=offered.__getitem__)
    for done, index in enumerate(order):
        shares[index] = min(offered[index], left / (len(order) - done))
        left -= shares[index]
    return shares


def _lefts(rank: _PullingRank, rates: dict[int, float]) -> list[float]:
    lefts = [request.left_us / rates[id(request)] for request in rank.active]
    return [*lefts, rank.compute_left_us] if rank.compute_left_us > 0.0 else lefts


_SMALL_US = 1e-9


def _advance(rank: _PullingRank, step_us: float, rates: dict[int, float], window_us: float) -> None:
    if rank.compute_left_us <= 0.0:
        rank.exposed_us += step_us
    rank.compute_left_us -= step_us
    if rank.compute_left_us < _SMALL_US:
        rank.compute_left_us = 0.0
    for request in rank.active:
        request.left_us -= step_us * rates[id(request)]
    rank.active = [request for request in rank.active if request.left_us > _SMALL_US]
    rank.refill()
    if rank.is_done:
        rank.layers += 1
        rank.begin(window_us)


@dataclass(frozen=True)
class LayerTimes:
    """Times of one iteration, in microseconds, in the categories of the paper's first table."""

    attention: float
    grouped_gemm: float
    dense_gemm: float
    others: float
    communication: float = 0.0
    copies: float = 0.0
    """Merge of weights that are stored apart."""

    @property
    def own_tokens(self) -> float:
        """Work on a rank's own tokens; experts have those of all ranks."""
        return self.attention + self.dense_gemm + self.others

    @property
    def computed(self) -> float:
        return self.own_tokens + self.grouped_gemm + self.copies


def synchronized_us(times: LayerTimes, ranks: int, variation: float) -> float:
    """An iteration of ranks that exchange tokens: all wait for the one with most of them."""
    waiting = (busiest_over_mean(variation, ranks) - 1.0) * times.own_tokens
    return times.computed + times.communication + waiting


def independent_us(times: LayerTimes, pulls: Pulls, layers: int = 60, seed: int = 0) -> float:
    """An iteration of ranks that pull weights: `times` are those while pulls run, what is exposed comes on top."""
    return times.computed / (1.0 - exposed_share(pulls, times.computed, layers, seed))
