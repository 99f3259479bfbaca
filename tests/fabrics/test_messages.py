"""Messages that a peer should not have sent, and connections that end: one code each, in time, and for good."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from weaveopt import _native
from weaveopt._native import Code

HEADER = struct.Struct("=IIQIIQ")
"""As docs/fabrics.md has it: magic, epoch, tag, slot, nothing, bytes."""
MAGIC, TAG, BYTES = 0x77767470, (7 << 32) | 5, 24
TIMEOUT_S = 0.3


def header(magic: int = MAGIC, epoch: int = 1, tag: int = TAG, slot: int = 0, num_bytes: int = BYTES) -> bytes:
    return HEADER.pack(magic, epoch, tag, slot, 0, num_bytes)


class Ends:
    """A rank's connections to two peers, whose ends the test has."""

    def __init__(self) -> None:
        pairs = [_connected() for _ in range(2)]
        self.peers = [theirs for _, theirs in pairs]
        self.rank = _native.Connections([ours.detach() for ours, _ in pairs] + [-1], 2, 64, 0)

    def exchange(self, timeout_s: float = TIMEOUT_S, peers: tuple[int, ...] = (0,)) -> tuple[int, dict[int, bytes]]:
        return self.rank.exchange(TAG, timeout_s, {}, dict.fromkeys(peers, BYTES))


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for peer in made.peers:
        peer.close()


WRONG = {
    "another magic": (header(magic=MAGIC + 1), Code.PEER_FAILED, "header"),
    "garbage": (b"GET / HTTP/1.1\r\nHost: weave\r\n\r\n\r\n", Code.PEER_FAILED, "header"),
    "a call of long ago": (header(epoch=0), Code.SITE_MISMATCH, "message"),
    "a call far ahead": (header(epoch=3), Code.SITE_MISMATCH, "message"),
    "the next call, with this one's message missing": (header(epoch=2), Code.SITE_MISMATCH, "message"),
    "another site": (header(tag=TAG + (1 << 32)), Code.SITE_MISMATCH, "message"),
    "another token count": (header(tag=TAG + 1), Code.SITE_MISMATCH, "message"),
    "an unknown slot": (header(slot=9), Code.SITE_MISMATCH, "unknown"),
    "a byte too much": (header(num_bytes=BYTES + 1), Code.SITE_MISMATCH, "size"),
    "a byte too few": (header(num_bytes=BYTES - 1), Code.SITE_MISMATCH, "size"),
    "a length that no memory has": (header(num_bytes=(1 << 64) - 1), Code.SITE_MISMATCH, "size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_message_that_does_not_belong_here_ends_the_call_for_good(name: str, ends: Ends) -> None:
    words, code, slot = WRONG[name]
    ends.peers[0].sendall(words + bytes(BYTES))
    begin = time.monotonic()
    assert ends.exchange(timeout_s=30.0)[0] == int(code)
    assert time.monotonic() - begin < 1.0
    status = ends.rank.status
    assert (status.peer, status.slot, status.expected, status.own_tag) == (0, slot, 1, TAG)
    if "another" in name and slot == "message":
        assert status.peer_tag == struct.unpack_from("=Q", words, 8)[0] != TAG
    # The peer that did nothing wrong finds its connection closed, and does not wait for a call that never comes.
    ends.peers[1].settimeout(5.0)
    assert ends.peers[1].recv(1) == b""
    assert ends.exchange(peers=(1,))[0] == int(Code.POISONED)
    assert (ends.rank.status.peer, ends.rank.status.slot) == (0, slot)


@pytest.mark.parametrize("sent", [b"", header()[:9], header(), header() + bytes(BYTES - 1)])
def test_a_peer_that_falls_silent_is_waited_for_no_longer_than_the_timeout(sent: bytes, ends: Ends) -> None:
    ends.peers[0].sendall(sent)
    begin = time.monotonic()
    assert ends.exchange()[0] == int(Code.TIMEOUT)
    assert TIMEOUT_S * 0.9 < time.monotonic() - begin < TIMEOUT_S + 1.0
    assert ends.rank.status.peer == 0


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sent", [b"", header()[:9], header(), header() + bytes(BYTES - 1)])
def test_a_connection_that_ends_is_noticed_at_once(sent: bytes, reset: bool, ends: Ends) -> None:
    ends.peers[0].sendall(sent)
    if reset:
        ends.peers[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ends.peers[0].close()
    begin = time.monotonic()
    assert ends.exchange(timeout_s=30.0)[0] == int(Code.PEER_EXITED)
    assert time.monotonic() - begin < 1.0


def test_a_connection_that_ends_after_the_message_is_noticed_by_the_next_call(ends: Ends) -> None:
    ends.peers[0].sendall(header() + b"m" * BYTES)
    ends.peers[0].close()
    assert ends.exchange() == (int(Code.OK), {0: b"m" * BYTES})
    assert ends.exchange(timeout_s=30.0)[0] == int(Code.PEER_EXITED)


def test_a_message_may_come_byte_by_byte_and_the_next_call_before_its_time(ends: Ends) -> None:
    def dribble() -> None:
        for byte in header() + b"1" * BYTES + header(epoch=2) + b"2" * BYTES:
            ends.peers[0].sendall(bytes([byte]))
            time.sleep(0.001)
        ends.peers[1].sendall(header(epoch=2) + b"3" * BYTES)

    sending = threading.Thread(target=dribble)
    sending.start()
    assert ends.exchange(timeout_s=5.0) == (int(Code.OK), {0: b"1" * BYTES})
    assert ends.exchange(timeout_s=5.0, peers=(0, 1)) == (int(Code.OK), {0: b"2" * BYTES, 1: b"3" * BYTES})
    sending.join()


@pytest.mark.parametrize("words", [header(), header(num_bytes=BYTES) + bytes(BYTES - 1)])
def test_single_bytes_buy_no_time(words: bytes, ends: Ends) -> None:
    """A byte every tenth of the timeout, in the header and after it: the peer is given up as a silent one is."""
    over = threading.Event()

    def dribble() -> None:
        for byte in words:
            if over.wait(TIMEOUT_S / 10):
                return
            ends.peers[0].send(bytes([byte]))

    sending = threading.Thread(target=dribble)
    sending.start()
    begin = time.monotonic()
    code, _ = ends.exchange()
    seconds = time.monotonic() - begin
    over.set()
    sending.join()
    assert code == int(Code.TIMEOUT) and ends.rank.status.peer == 0
    assert TIMEOUT_S * 0.9 < seconds < TIMEOUT_S + 1.0


def test_every_message_that_is_whole_gives_the_next_one_its_time(ends: Ends) -> None:
    """Two peers, each later than the other by less than the timeout, both together later than it."""
    late = [
        threading.Timer((1 + index) * 0.7 * TIMEOUT_S, ends.peers[index].sendall, [header() + bytes(BYTES)])
        for index in range(2)
    ]
    for each in late:
        each.start()
    assert ends.exchange(peers=(0, 1))[0] == int(Code.OK)
    for each in late:
        each.join()


def test_what_comes_of_the_next_call_waits_while_another_peer_is_late(ends: Ends) -> None:
    ends.peers[0].sendall(header() + b"1" * BYTES + header(epoch=2) + b"2" * BYTES)
    late = threading.Timer(0.1, lambda: ends.peers[1].sendall(header() + b"3" * BYTES))
    late.start()
    assert ends.exchange(timeout_s=5.0, peers=(0, 1)) == (int(Code.OK), {0: b"1" * BYTES, 1: b"3" * BYTES})
    assert ends.exchange() == (int(Code.OK), {0: b"2" * BYTES})
    late.join()


def test_a_peer_that_reads_nothing_is_waited_for_no_longer_than_the_timeout(ends: Ends) -> None:
    begin = time.monotonic()
    code, _ = ends.rank.exchange(TAG, TIMEOUT_S, {1: bytes(64 << 20)}, {})
    assert code == int(Code.TIMEOUT) and ends.rank.status.peer == 1
    assert time.monotonic() - begin < TIMEOUT_S + 2.0


def test_ctrl_c_ends_a_wait_for_another_host(ends: Ends) -> None:
    """Later calls say why, and the peers find the connection closed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        begin = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ends.exchange(timeout_s=30.0)
        assert time.monotonic() - begin < 1.2
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    code, _ = ends.exchange()
    assert code == int(Code.POISONED) and ends.rank.status.code == Code.INTERRUPTED
    for peer in ends.peers:
        peer.settimeout(2.0)
        assert peer.recv(1) == b""
