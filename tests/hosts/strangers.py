"""Somebody on a host that is not the group's, who comes to every port that its ranks open.

python -m tests.hosts.strangers STRANGER FOLDER      ends at the end of its input, with the answers it got
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.hosts.faults import Stranger

HELLO = struct.Struct("!8sII32s")
MAGIC = b"weavetcp"
NUM_MANY, NUM_RANKS = 200, 4


def _visit(place: tuple[str, int], rank: int, stranger: Stranger) -> list[socket.socket]:
    doors: list[socket.socket] = []
    for _ in range(NUM_MANY if stranger is Stranger.MANY else 1):
        try:
            doors.append(socket.create_connection(place, 5.0))
        except OSError:  # the ranks are done with connecting
            return doors
    if stranger is Stranger.GARBAGE:
        doors[0].sendall(secrets.token_bytes(4096))
    elif stranger in (Stranger.STAYS, Stranger.NO_KEY):
        proof = secrets.token_bytes(32) if stranger is Stranger.NO_KEY else b""
        for peer in range(NUM_RANKS):  # whom of them the rank waits for is not known here
            with suppress(OSError):
                doors.append(socket.create_connection(place, 5.0))
                doors[-1].sendall(HELLO.pack(MAGIC, peer, rank, secrets.token_bytes(32)) + proof)
    return doors


def main(stranger: Stranger, ports: Path) -> None:
    doors: list[socket.socket] = []
    seen = 0
    print("ready", flush=True)
    while not select.select([0], [], [], 0.02)[0]:
        lines = ports.read_text().splitlines() if ports.exists() else []
        for line in lines[seen:]:
            rank, address, port = line.split()
            doors += _visit((address, int(port)), int(rank), stranger)
            seen += 1
    closed = 0
    until = time.monotonic() + 1.0
    for door in doors:
        door.settimeout(max(until - time.monotonic(), 0.01))
        try:
            while door.recv(4096):
                pass
            closed += 1
        except ConnectionError:
            closed += 1
        except OSError:
            pass
    print(len(doors), closed, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Stranger[sys.argv[1]], Path(sys.argv[2]))
