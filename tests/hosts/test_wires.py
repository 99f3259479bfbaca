"""When packets arrive, and which of them do not arrive whole: the arithmetic of emulated links."""

from __future__ import annotations

import socket
import struct

import pytest

from tests.hosts.link import Link, Wires, data_bytes, truncated

US = 1e-6


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def _packet(num_data: int) -> bytes:
    """TCP from 10.77.0.1 to 10.77.0.2."""
    addresses = socket.inet_aton("10.77.0.1") + socket.inet_aton("10.77.0.2")
    header = struct.pack("!BBHHHBBH", 0x45, 0, 40 + num_data, 7, 0x4000, 64, 6, 0) + addresses
    header = header[:10] + struct.pack("!H", _checksum(header)) + header[12:]
    return header + struct.pack("!HHIIBBHHH", 1, 2, 3, 4, 0x50, 0x18, 500, 0, 0) + bytes(num_data)


def _arrivals(wires: Wires) -> list[tuple[float, int, int]]:
    """Microsecond, host and length of every packet that is under way."""
    found = []
    while (at := wires.next_at()) is not None:
        found += [(round(at / US, 3), target, len(packet)) for target, packet in wires.due(at)]
    return found


def test_a_packet_takes_its_delay_and_its_bytes() -> None:
    wires = Wires(2, Link(delay_us=50, gbit_per_s=10))
    wires.carry(_packet(12460), 0, 1, 1.0)  # 12500 bytes: 10 us
    assert list(wires.due(1.0 + 59.9 * US)) == []
    assert _arrivals(wires) == [(1000060.0, 1, 12500)]


def test_what_the_carrier_needs_itself_is_part_of_the_delay() -> None:
    for own_us, arrives in ((30.0, 20.0), (80.0, 0.0)):
        wires = Wires(2, Link(delay_us=50))
        wires.own_us = own_us
        wires.carry(_packet(1), 0, 1, 0.0)
        assert _arrivals(wires) == [(arrives, 1, 41)]


def test_packets_wait_for_the_cable_of_their_host_and_of_their_target() -> None:
    wires = Wires(3, Link(gbit_per_s=10))
    for source, target in ((0, 1), (0, 2), (1, 2), (2, 0)):
        wires.carry(_packet(12460), source, target, 0.0)
    # 0's second follows its first; 2 gets that when it has left, and 1's after it; 2's own way out is free.
    assert _arrivals(wires) == [(10.0, 1, 12500), (10.0, 0, 12500), (20.0, 2, 12500), (30.0, 2, 12500)]


def test_a_host_that_rested_does_not_catch_up() -> None:
    wires = Wires(2, Link(gbit_per_s=10))
    wires.carry(_packet(12460), 0, 1, 0.0)
    wires.carry(_packet(12460), 0, 1, 1.0)
    assert _arrivals(wires) == [(10.0, 1, 12500), (1000010.0, 1, 12500)]


def _lost(seed: int) -> list[int]:
    wires = Wires(2, Link(loss_percent=5, seed=seed))
    for length in range(1000):
        wires.carry(_packet(length), 0, 1, float(length))
    arrived = {length - 40 for _, _, length in _arrivals(wires)}
    assert wires.counts.lost == 1000 - len(arrived) == 1000 - wires.counts.carried
    return [length for length in range(1000) if length not in arrived]


def test_loss_is_as_asked_and_the_same_again() -> None:
    first = _lost(0)
    assert first == _lost(0) != _lost(1)
    assert 30 < len(first) < 70


def test_directions_lose_different_packets() -> None:
    wires = Wires(2, Link(loss_percent=50))
    for length in range(100):
        wires.carry(_packet(length), 0, 1, float(length))
        wires.carry(_packet(length), 1, 0, float(length))
    found = _arrivals(wires)
    assert [length for _, target, length in found if target] != [length for _, target, length in found if not target]


@pytest.mark.parametrize("link", [Link(truncate_percent=100), Link()])
def test_a_truncated_packet_is_a_whole_ip_packet_with_less_data(link: Link) -> None:
    wires = Wires(2, link)
    if not link.truncate_percent:
        wires.to_truncate = 1
    whole = _packet(1001)
    wires.carry(_packet(0), 0, 1, 0.0)  # has nothing to lose
    wires.carry(whole, 0, 1, 1.0)
    ((_, bare), (_, cut)) = wires.due(2.0)
    assert len(bare) == 40 and wires.counts.truncated == 1
    assert len(cut) == struct.unpack("!H", cut[2:4])[0] == 40 + 500 == 40 + data_bytes(cut)
    assert _checksum(cut[:20]) == 0 and cut[20:] == whole[20 : len(cut)]
    assert truncated(_packet(1)) == _packet(0)


def test_duplicates_come_as_often_as_asked() -> None:
    wires = Wires(2, Link())
    wires.to_duplicate = 2
    for _ in range(4):
        wires.carry(_packet(10), 0, 1, 0.0)
    assert len(_arrivals(wires)) == 6 and wires.counts.duplicated == 2
    wires = Wires(2, Link(duplicate_percent=20))
    for number in range(1000):
        wires.carry(_packet(10), 0, 1, float(number))
    assert len(_arrivals(wires)) == 1000 + wires.counts.duplicated and 150 < wires.counts.duplicated < 250


def test_packets_keep_their_order_unless_asked() -> None:
    def order(link: Link) -> list[int]:
        wires = Wires(2, link)
        for number in range(200):
            wires.carry(_packet(number), 0, 1, number * US)
        return [length - 40 for _, _, length in _arrivals(wires)]

    assert order(Link(delay_us=50, loss_percent=5)) == sorted(order(Link(delay_us=50, loss_percent=5)))
    mixed = order(Link(delay_us=50, reorder_percent=10))
    assert mixed != sorted(mixed) == list(range(200))


def test_a_link_that_is_down_carries_nothing_and_loses_what_is_under_way() -> None:
    wires = Wires(3, Link(delay_us=50))
    wires.carry(_packet(1), 0, 1, 0.0)
    wires.down.add(1)
    for source, target in ((0, 1), (1, 0), (0, 2)):
        wires.carry(_packet(2), source, target, 0.0)
    assert _arrivals(wires) == [(50.0, 2, 42)] and wires.counts.cut_off == 3
    wires.down.discard(1)
    wires.carry(_packet(3), 0, 1, 1.0)
    assert _arrivals(wires) == [(1000050.0, 1, 43)]
