"""The α–β model of collectives over one kind of link: dependent steps, and bytes on the wire.

`M` message bytes, `n` ranks, `α` latency of a step, `β` bytes per second and direction. Its steps say what an
algorithm does whatever the message and the link; with both they have a cost. On one rank, and for no bytes, it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from weaveopt.cost_model.machine import Link


@dataclass(frozen=True)
class Cost:
    """Time of a collective: what its steps take even when empty, and what its bytes take besides."""

    latency_us: float
    transfer_us: float

    @property
    def us(self) -> float:
        return self.latency_us + self.transfer_us

    def __add__(self, later: Cost) -> Cost:
        """One after the other."""
        return Cost(self.latency_us + later.latency_us, self.transfer_us + later.transfer_us)


NOTHING = Cost(0.0, 0.0)


@dataclass(frozen=True)
class Steps:
    """Cost of an algorithm: `num_steps` messages that wait for one another, and `traffic` in whole messages.

    The traffic is that of the busiest rank in its busier direction: `traffic * M` bytes leave, or reach, it.
    """

    num_steps: float
    traffic: float

    def cost(self, message_bytes: float, link: Link) -> Cost:
        """`num_steps α + traffic M / β`; 0 for no bytes."""
        if message_bytes <= 0:
            return NOTHING
        return Cost(self.num_steps * link.step_us, link.us(self.traffic * message_bytes))

    def us(self, message_bytes: float, link: Link) -> float:
        """`cost`, in all."""
        return self.cost(message_bytes, link).us


def reduce_scatter(ranks: int) -> Steps:
    """Ring reduce-scatter: `(n - 1) α + (n - 1) / n · M / β` (NVRAR eq. 3). `M` is the message before it is
    scattered."""
    return Steps(ranks - 1, (ranks - 1) / ranks)


def all_gather(ranks: int) -> Steps:
    """Ring all-gather: `(n - 1) α + (n - 1) / n · M / β` (NVRAR eq. 5). `M` is the message after it is gathered."""
    return Steps(ranks - 1, (ranks - 1) / ranks)


def ring(ranks: int) -> Steps:
    """All-reduce as a reduce-scatter and an all-gather: `2 (n - 1) α + 2 (n - 1) / n · M / β` (NVRAR eq. 1)."""
    return Steps(2 * (ranks - 1), 2 * (ranks - 1) / ranks)


def library(ranks: int) -> Steps:
    """All-reduce of a library: `2 log2(n) α` of a tree for small messages, the traffic of a ring for large ones."""
    return Steps(2.0 * log2(ranks), ring(ranks).traffic)


def recursive_doubling(ranks: int) -> Steps:
    """All-reduce in which a rank trades its whole sum with rank `r XOR 2^i` at step `i` (NVRAR §4.1, Algorithm 1).

    `log2(n) (α + M / β)`. Where `n` is no power of two, `p` being the one below: the `n - p` ranks beyond first send
    theirs to a partner and receive the sum at the end, `(log2(p) + 2) α + (log2(p) + 1) M / β` (Thakur and Gropp form
    in MPICH, NVRAR reference 40).
    """
    if ranks <= 1:
        return Steps(0, 0.0)
    doublings = ranks.bit_length() - 1
    if ranks == 1 << doublings:
        return Steps(doublings, float(doublings))
    return Steps(doublings + 2, float(doublings + 1))


def one_shot(ranks: int) -> Steps:
    """All-reduce in which every rank reads all peers' messages and adds: `α + (n - 1) M / β`."""
    return Steps(1 if ranks > 1 else 0, float(ranks - 1))


def two_shot(ranks: int) -> Steps:
    """All-reduce in which every rank adds its share, then broadcasts it: `2 α + 2 (n - 1) / n · M / β`.

    Every rank reaches every peer at once, so each half is one step and not the `n - 1` of a ring.
    """
    return Steps(2 if ranks > 1 else 0, 2.0 * (ranks - 1) / ranks)


def multicast_one_shot(ranks: int) -> Steps:
    """One-shot through a switch that reduces: `α + n M / β`.

    A rank receives one sum instead of `n - 1` messages, but the switch fetches its message once for every reader.
    """
    return Steps(1, float(ranks)) if ranks > 1 else Steps(0, 0.0)


def multicast_two_shot(ranks: int) -> Steps:
    """Two-shot through a switch that reduces and multiplies: `2 α + (1 + 1 / n) M / β` (TokenWeave §4.3).

    The switch fetches each rank's message once, a share for every reader; each rank sends `M / n` of the sum, once.
    """
    return Steps(2, 1.0 + 1.0 / ranks) if ranks > 1 else Steps(0, 0.0)
