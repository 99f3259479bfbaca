"""Ports for groups of ranks. They are bound by another process, some time after they were chosen."""

from __future__ import annotations

import random
import socket
from collections import deque
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_000
FEWEST = 1_000
"""Ports below the ephemeral ones from which on those are left alone."""

_reserved: deque[socket.socket] = deque(maxlen=64)
"""Reservations of the latest ports. A socket that drops out is closed with its last reference."""


def free_port() -> int:
    """Returns a TCP port that nobody listens on, that the system gives to no outgoing connection or unnamed listener,
    and that no other process gets from this function meanwhile.

    A port that was bound, closed and only then passed on can be anyone's when its user comes.
    """
    low, high = chosen_from(EPHEMERAL.read_text())
    for _ in range(1_000):
        port = random.SystemRandom().randrange(low, high)
        if reserve(port):
            return port
    raise RuntimeError(f"no free port from {low} to {high}")


def chosen_from(ephemeral: str) -> tuple[int, int]:
    """Range that ports are chosen from, given the system's ephemeral one: below it, as far as there is room."""
    first, last = (int(word) for word in ephemeral.split())
    return (LOWEST, first) if first >= LOWEST + FEWEST else (first, last + 1)


def reserve(port: int) -> bool:
    """Keeps a port from other callers, on this host, until this process ends or has taken 64 more. False if it is in
    use."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0weaveopt-port-{port}")  # in no folder: it is gone with its process
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        claim.close()
        return False
    _reserved.append(claim)
    return True
