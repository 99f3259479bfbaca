"""Accuracy of emulated links: round trips and bytes per second between two of the hosts, against those asked for.

Packets are made by TCP as between any two hosts: what a benchmark sees has its part of these errors. The ends of round
trips have the relay's priority, so these are the links' own, whatever else the machine does; bytes per second need the
machine to themselves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tests.emulation.emulated_hosts import Host, Link, hosts, missing
from tests.hosts.relay import hurry

PORT = 29500
ROUNDS = 2000
TRANSFER_S = 1.0
_PIECE = 1 << 20


@dataclass(frozen=True)
class Truth:
    """Measured round trips and rates between two hosts."""

    round_trip_us: float
    """Median round trip of one byte."""
    slow_round_trip_us: float
    """One of a hundred takes longer."""
    gbit_per_s: float
    """One host sends, another receives."""
    both_gbit_per_s: float
    """The sum over all hosts, when each sends to the next."""


def _connection(listens: socket.socket | None, host: Host, peer: Host) -> socket.socket:
    if listens is not None:
        found, _ = listens.accept()
    else:
        found = socket.create_connection((peer.address, PORT), timeout=10.0)
    found.settimeout(30.0)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _echo(host: Host, peer: Host, tell: Connection) -> None:
    hurry()
    host.enter()
    with socket.create_server((host.address, PORT)) as listener:
        tell.send("listens")
        with _connection(listener, host, peer) as other:
            while piece := other.recv(64):
                other.sendall(piece)


def _ping(host: Host, peer: Host, tell: Connection) -> None:
    hurry()
    host.enter()
    times = []
    with _connection(None, host, peer) as other:
        for turn in range(ROUNDS + 100):
            begin = time.perf_counter()
            other.sendall(b"x")
            other.recv(64)
            if turn >= 100:
                times.append((time.perf_counter() - begin) * 1e6)
    tell.send(times)


def _drain(host: Host, peer: Host, tell: Connection) -> None:
    """Bits per second from the first byte after a warm-up to the last."""
    host.enter()
    buffer = bytearray(_PIECE)
    with socket.create_server((host.address, PORT)) as listener:
        tell.send("listens")
        with _connection(listener, host, peer) as other:
            warm_at = time.perf_counter() + TRANSFER_S / 4
            begin, count = 0.0, 0
            while moved := other.recv_into(buffer):
                now = time.perf_counter()
                if begin:
                    count, end = count + moved, now
                elif now > warm_at:
                    begin = end = now
    tell.send([count * 8e-9 / (end - begin) if begin and end > begin else 0.0])


def _pour(host: Host, peer: Host, tell: Connection) -> None:
    host.enter()
    piece = bytes(_PIECE)
    with _connection(None, host, peer) as other:
        until = time.perf_counter() + TRANSFER_S
        while time.perf_counter() < until:
            other.sendall(piece)


Part = Callable[[Host, Host, Connection], None]


def _measured(listening: Part, calling: Part, pairs: list[tuple[Host, Host]]) -> list[list[float]]:
    """Results of the two ends of every pair: first the listening ends, on each pair's second host, then the calling
    ends."""
    fork = multiprocessing.get_context("fork")
    found: list[list[float]] = []
    with ExitStack() as ends:
        pipes, processes = [], []
        for part, turn in ((listening, 1), (calling, 0)):
            for pair in pairs:
                ours, theirs = fork.Pipe()
                process = fork.Process(target=part, args=(pair[turn], pair[1 - turn], theirs), daemon=True)
                process.start()
                ends.callback(process.join)
                ends.callback(process.kill)
                processes.append(process)
                pipes.append(ours)
                theirs.close()
                if part is listening:
                    assert ours.recv() == "listens"
        for pipe in pipes:
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append([])
    return found


def measure(made: list[Host]) -> Truth:
    """Measures hosts that have nothing else to do."""
    _, times = _measured(_echo, _ping, [(made[0], made[1])])
    ordered = sorted(times)
    (rate,), _ = _measured(_drain, _pour, [(made[0], made[1])])
    ring = list(zip(made, [*made[1:], made[0]], strict=True))
    total = sum(each for told in _measured(_drain, _pour, ring) for each in told)
    return Truth(statistics.median(ordered), ordered[len(ordered) * 99 // 100], rate, total)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulation.emulated_hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--delay-us", type=float, default=0.0, help="one way")
    parser.add_argument("--gbit", type=float, default=0.0, help="of each host in each direction; 0: as fast as it goes")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of packets")
    parser.add_argument("--mtu", type=int, default=Link().mtu)
    parser.add_argument("--relay", action="store_true", help="also where the kernel could do it")
    asked = parser.parse_args()
    link = Link(asked.delay_us, asked.gbit, asked.loss, mtu=asked.mtu)
    if why := missing(link, asked.relay):
        print(f"no hosts can be emulated: {why}")
        return 1
    with hosts(asked.hosts, link, changing=asked.relay) as made:
        found = measure(list(made))
        way = f"a relay that takes {made.own_us:.0f} us itself" if made.is_relayed else "the kernel"
        rate = f"{asked.gbit:g} Gbit/s" if asked.gbit else "any rate"
        print(f"{len(made)} hosts by {way}, {asked.delay_us:g} us one way, {rate}, {asked.loss:g}% loss: measured")
        print(f"  round trip of a byte {found.round_trip_us:.0f} us ({2 * asked.delay_us:g} asked for), "
              f"one of a hundred above {found.slow_round_trip_us:.0f} us")  # fmt: skip
        print(f"  one host to another {found.gbit_per_s:.2f} Gbit/s; each to the next, together "
              f"{found.both_gbit_per_s:.2f} Gbit/s ({asked.gbit * len(made):g} asked for)")  # fmt: skip
    return 0
