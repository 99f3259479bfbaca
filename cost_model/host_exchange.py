"""Time of exchanges in which all hosts take part: additive terms, as they were measured together.

A link that is measured while all else is idle hides what an exchange is made of: every rank sends, receives, adds and
wakes up at once, and hosts that are emulated on one machine do so on the same processors. So these terms come from
exchanges themselves (`weaveopt calibrate` on several hosts), and stand in for `α`, `β` and `o` wherever they are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2


@dataclass(frozen=True)
class HostExchangeTerms:
    """An exchange among `hosts` hosts of `ranks_per_host` ranks, per rank, the busiest one's."""

    origin: str
    hosts: int
    ranks_per_host: int
    call_us: float
    """Time of a call, whatever it exchanges: the operator, and one wait for the slowest rank."""
    round_us: float
    """Time of each round, which waits for the one before."""
    message_us: float
    """Time of each message sent, including the one received for it."""
    sent_byte_us: float
    """Time of each byte sent, including the one received for it: the link, both copies, the addition."""
    row_byte_us: float
    """Time of each byte of the message itself, beyond the price of its own passes over memory."""
    processors: float = 0.0
    """Processors that the ranks of all hosts share, if hosts are emulated on one machine; 0: each host has its own."""

    def crowding(self, hosts: int, ranks_per_host: int) -> float:
        """How much longer everything takes than with a processor for every rank."""
        return max(1.0, hosts * ranks_per_host / self.processors) if self.processors else 1.0

    def fixed_us(self, rounds: int, messages: int) -> float:
        """Time that does not grow with the bytes."""
        return self.call_us + rounds * self.round_us + messages * self.message_us

    def bytes_us(self, sent_bytes: float, message_bytes: float) -> float:
        """Time that grows with the bytes."""
        return sent_bytes * self.sent_byte_us + message_bytes * self.row_byte_us


def nearest(known: Sequence[HostExchangeTerms], hosts: int, ranks_per_host: int) -> HostExchangeTerms | None:
    """The one of as many ranks a host and hosts, or the nearest in either; None where nothing was measured."""
    return min(
        known,
        key=lambda each: (
            abs(log2(each.ranks_per_host / ranks_per_host)), abs(log2(each.hosts / hosts)), each.hosts,
        ),
        default=None,
    )  # fmt: skip
