"""Connections between hosts: made among those who have the group's key, whoever else is at the door."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.ranks import collect, run_ranks
from weaveopt.errors import ArenaError
from weaveopt.fabrics import addresses, connections, topology
from weaveopt.fabrics.connections import _HELLO, _MAGIC, connect

TIMEOUT_S = 20.0
CLOSED_S = 2.0
"""After connecting; less than what a stranger gets while it goes on."""


def _strangers_at(place: tuple[str, int], whom: int, answers: list[bytes]) -> list[threading.Thread]:
    """Threads that send garbage, half a greeting, nothing, or a greeting without the key; each appends its answer."""

    def visit(words: bytes, proof: bytes) -> None:
        with socket.create_connection(place, timeout=TIMEOUT_S) as door:
            told = b""
            try:
                door.sendall(words)
                if proof:
                    told = door.recv(64)
                    door.sendall(proof)
                while door.recv(64):
                    told += b"more"
            except ConnectionError:
                pass
            answers.append(told)

    hello = _HELLO.pack(_MAGIC, 1, whom, secrets.token_bytes(32))
    visits = [(secrets.token_bytes(200), b""), (hello[:10], b""), (b"", b""), (hello, secrets.token_bytes(32))]
    threads = [threading.Thread(target=visit, args=each, daemon=True) for each in visits]
    for thread in threads:
        thread.start()
    return threads


def _connects_among_strangers(rank: int) -> tuple[bytes, float, int]:
    answers: list[bytes] = []
    threads: list[threading.Thread] = []
    plain = socket.create_server

    def with_visitors(*arguments: object, **options: object) -> socket.socket:
        listener: socket.socket = plain(*arguments, **options)  # type: ignore[arg-type]
        threads.extend(_strangers_at(listener.getsockname()[:2], rank, answers))
        return listener

    connections.socket.create_server = with_visitors  # type: ignore[assignment]
    begin = time.monotonic()
    channel = topology.exchange("0", TIMEOUT_S)
    found = connect(channel, [other for other in range(3) if other != rank], TIMEOUT_S)
    seconds = time.monotonic() - begin
    for other, each in sorted(found.items()):
        each.sendall(bytes([rank]))
        assert each.recv(1) == bytes([other])
    until = time.monotonic() + CLOSED_S
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
        assert not thread.is_alive(), "a stranger was left with an open connection"
    assert all(b"more" not in each for each in answers)
    return bytes(found), seconds, len(answers)


def test_strangers_are_turned_away_and_keep_nobody_waiting() -> None:
    found = run_ranks(_connects_among_strangers, 3)
    assert [sorted(peers) for peers, _, _ in found] == [[1, 2], [0, 2], [0, 1]]
    for _, seconds, visits in found:
        assert seconds < connections._STRANGER_S and visits == 4


NUM_DRIBBLING = 70
DRIBBLE_S = 2.0


def _dribble(place: tuple[str, int], whom: int) -> None:
    """Strangers that say a right greeting, a byte at a time, and come again where they are turned away."""

    def visit() -> None:
        while True:
            try:
                with socket.create_connection(place, timeout=TIMEOUT_S) as door:
                    for byte in _HELLO.pack(_MAGIC, 1 - whom, whom, secrets.token_bytes(32)):
                        door.sendall(bytes([byte]))
                        time.sleep(DRIBBLE_S)
            except ConnectionRefusedError:
                return
            except OSError:
                continue

    visitors = [threading.Thread(target=visit, daemon=True) for _ in range(NUM_DRIBBLING)]
    for each in visitors:
        each.start()
    time.sleep(0.3)  # they are in before any peer comes


def _accept_fails(place: tuple[str, int], whom: int) -> None:
    """As where descriptors run out for a moment, and where one who came is gone before he is let in."""
    plain = socket.socket.accept
    errors = [errno.EMFILE, errno.ECONNABORTED, errno.ENFILE, errno.ENOBUFS, errno.EPROTO, errno.EMFILE]

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise OSError(errors.pop(), "made up")
        return plain(listener)

    connections.socket.socket.accept = failing  # type: ignore[method-assign, assignment]


def _connects(rank: int, prepare: Callable[[tuple[str, int], int], None]) -> float:
    """How long two ranks take to connect, where every listener is prepared so."""
    create = socket.create_server

    def prepared(*arguments: object, **options: object) -> socket.socket:
        listener: socket.socket = create(*arguments, **options)  # type: ignore[arg-type]
        prepare(listener.getsockname()[:2], rank)
        return listener

    connections.socket.create_server = prepared  # type: ignore[assignment]
    channel = topology.exchange("0", TIMEOUT_S)
    begin = time.monotonic()
    found = connect(channel, [1 - rank], TIMEOUT_S)
    seconds = time.monotonic() - begin
    found[1 - rank].sendall(bytes([rank]))
    assert found[1 - rank].recv(1) == bytes([1 - rank])
    return seconds


@pytest.mark.parametrize("prepare", [_dribble, _accept_fails])
def test_neither_slow_strangers_nor_a_failed_accept_keep_ranks_from_connecting(
    prepare: Callable[[tuple[str, int], int], None],
) -> None:
    assert max(run_ranks(_connects, 2, prepare, timeout_s=60)) < connections._STRANGER_S


def _one_cannot_listen(rank: int) -> str:
    if rank == 1:
        os.environ["WEAVE_ADDRESS"] = "203.0.113.9"  # not an address of this host
    with pytest.raises(ArenaError) as error:
        connect(topology.exchange("0", TIMEOUT_S), [1 - rank], TIMEOUT_S)
    return str(error.value)


def test_a_rank_that_cannot_listen_is_an_error_on_all() -> None:
    one, other = run_ranks(_one_cannot_listen, 2)
    assert one == other and "rank 1" in one and "cannot connect its hosts" in one


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        ({"MASTER_ADDR": "localhost"}, "127.0.0.1"),
        ({"MASTER_ADDR": "203.0.113.9", "WEAVE_ADDRESS": "10.1.2.3"}, "10.1.2.3"),
        ({"MASTER_ADDR": "203.0.113.9", "GLOO_SOCKET_IFNAME": "lo,other"}, "127.0.0.1"),
    ],
)
def test_the_address_that_others_connect_to(
    variables: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "WEAVE_ADDRESS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert addresses.own_address() == found


def test_a_name_of_this_host_that_stands_for_the_loopback_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian has it in /etc/hosts: `127.0.1.1 name`."""
    asked: list[str] = []

    def leads_to(host: str) -> str:
        asked.append(host)
        return "127.0.1.1" if host == "head" else "192.0.2.77"

    for name in ("WEAVE_ADDRESS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setattr(addresses, "_leads_to", leads_to)
    assert addresses.own_address() == "192.0.2.77" and asked[0] == "head"


@pytest.mark.parametrize("variables", [{}, {"GLOO_SOCKET_IFNAME": "none0"}])
def test_no_address_says_what_to_set(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "WEAVE_ADDRESS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArenaError, match=r"WEAVE_ADDRESS|GLOO_SOCKET_IFNAME"):
        addresses.own_address()


def _one_never_comes(rank: int) -> str:
    channel = topology.exchange("0", TIMEOUT_S)
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(Exception, match="did not come within") as error:
        connect(channel, [1], 1.0)
    dist.barrier()
    return type(error.value).__name__


def test_a_rank_that_never_comes_is_named() -> None:
    assert collect(_one_never_comes, 2)[0].value == "AgreementError"
