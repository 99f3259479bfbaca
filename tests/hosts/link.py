"""Fate of packets between emulated hosts: their arrival times, and which are lost, doubled or cut.

`Wires` knows no device and no clock, so the same packets at the same times always have the same fate.
"""

from __future__ import annotations

import heapq
import itertools
import random
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass

LATE_S = 100e-6
"""Least extra delay of a packet that is overtaken."""


@dataclass(frozen=True)
class Link:
    """From every host to every other one: hosts hang on a switch that never blocks, each by one cable."""

    delay_us: float = 0.0
    """One way, between two hosts."""
    gbit_per_s: float = 0.0
    """Rate of a host in each direction. 0: not limited."""
    loss_percent: float = 0.0
    """Share of packets that are lost. They are as large as `mtu`, so fewer than between real hosts."""
    duplicate_percent: float = 0.0
    truncate_percent: float = 0.0
    """Share of packets with data that lose half of it."""
    reorder_percent: float = 0.0
    """Share of packets that arrive `delay_us` later, 100 at least, so that others overtake them."""
    retry_ms: int = 0
    """TCP's least retransmission timeout. 0: the kernel's, 200 ms."""
    seed: int = 0
    mtu: int = 65000
    """Bytes of a packet at most. As large as possible: each costs a relay about as much, whatever it carries."""

    @property
    def is_plain(self) -> bool:
        """True if packets arrive on time and whole. A bridge suffices then; a rate may still be needed."""
        return not (
            self.delay_us
            or self.loss_percent
            or self.duplicate_percent
            or self.truncate_percent
            or self.reorder_percent
        )


@dataclass
class Counts:
    """Packet counts since the hosts were made."""

    carried: int = 0
    lost: int = 0
    duplicated: int = 0
    truncated: int = 0
    reordered: int = 0
    cut_off: int = 0
    """They came to, or left, a host whose link was down."""
    num_bytes: int = 0

    def to_record(self) -> dict[str, int]:
        return asdict(self)


class Wires:
    """The links of `count` hosts. Times are in seconds, of any clock."""

    def __init__(self, count: int, link: Link) -> None:
        self.count, self.link, self.counts = count, link, Counts()
        self.down: set[int] = set()
        self.loss_percent = link.loss_percent
        self.own_us = 0.0
        """One-way time of the relay itself for a packet."""
        self.to_duplicate = self.to_truncate = 0
        """So many of the next packets that carry data."""
        self._sent_until, self._received_until = [0.0] * count, [0.0] * count
        self._chance = [[random.Random(f"{link.seed}/{s}/{t}") for t in range(count)] for s in range(count)]
        self._under_way: list[tuple[float, int, int, int, bytes]] = []
        self._numbers = itertools.count()

    def carry(self, packet: bytes, source: int, target: int, now: float) -> None:
        """Host `source` sends `packet`, which is an IP packet, at the time `now`."""
        chance, link = self._chance[source][target], self.link
        if self.down and (source in self.down or target in self.down):
            self.counts.cut_off += 1
            return
        copies = 1
        has_data = data_bytes(packet) > 0
        if link.duplicate_percent and self._strikes(chance, link.duplicate_percent):
            copies = 2
        elif self.to_duplicate and has_data:
            copies, self.to_duplicate = 2, self.to_duplicate - 1
        self.counts.duplicated += copies - 1
        if has_data and link.truncate_percent and self._strikes(chance, link.truncate_percent):
            packet = truncated(packet)
            self.counts.truncated += 1
        elif has_data and self.to_truncate:
            packet, self.to_truncate = truncated(packet), self.to_truncate - 1
            self.counts.truncated += 1
        for _ in range(copies):
            arrives = self._arrives(len(packet), source, target, now)
            if self.loss_percent and self._strikes(chance, self.loss_percent):
                self.counts.lost += 1
                continue
            if link.reorder_percent and self._strikes(chance, link.reorder_percent):
                arrives += max(link.delay_us * 1e-6, LATE_S)
                self.counts.reordered += 1
            heapq.heappush(self._under_way, (arrives, next(self._numbers), source, target, packet))

    @staticmethod
    def _strikes(chance: random.Random, percent: float) -> bool:
        return chance.random() * 100 < percent

    def _arrives(self, num_bytes: int, source: int, target: int, now: float) -> float:
        """Time at which a packet's last byte arrives. A switch forwards bytes as they come, once the cable to the
        target is free."""
        rate = self.link.gbit_per_s
        seconds = num_bytes * 8e-9 / rate if rate else 0.0
        begin = max(now, self._sent_until[source])
        self._sent_until[source] = begin + seconds
        end = max(begin, self._received_until[target]) + seconds
        self._received_until[target] = end
        return end + max(self.link.delay_us - self.own_us, 0.0) * 1e-6

    def __len__(self) -> int:
        """Packets that are under way."""
        return len(self._under_way)

    def next_at(self) -> float | None:
        """When the next packet arrives."""
        return self._under_way[0][0] if self._under_way else None

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Packets that have arrived by `now`, in order, with the host that they arrive at."""
        while self._under_way and self._under_way[0][0] <= now:
            _, _, source, target, packet = heapq.heappop(self._under_way)
            if source in self.down or target in self.down:
                self.counts.cut_off += 1
                continue
            self.counts.carried += 1
            self.counts.num_bytes += len(packet)
            yield target, packet


def _header_bytes(packet: bytes) -> int:
    return (packet[0] & 15) * 4


def data_bytes(packet: bytes) -> int:
    """Payload bytes of an IPv4 packet; of a TCP segment, the bytes after the TCP header."""
    begin = _header_bytes(packet)
    if packet[9] == 6:
        begin += (packet[begin + 12] >> 4) * 4
    return len(packet) - begin


def truncated(packet: bytes) -> bytes:
    """`packet` without the last half of its data. Its IP header says so; TCP's checksum is that of the whole."""
    kept = len(packet) - (data_bytes(packet) + 1) // 2
    header = bytearray(packet[: _header_bytes(packet)])
    struct.pack_into("!H", header, 2, kept)
    struct.pack_into("!H", header, 10, 0)
    total = sum(struct.unpack(f"!{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", header, 10, total ^ 0xFFFF)
    return bytes(header) + packet[len(header) : kept]
