"""TCP connections between the ranks of a group, each made by two ranks that have shown each other the group's key.

Every rank listens on one port of the address at which the others reach it, for as long as connections are made. Ranks
publish port and a secret through the group's store, and all secrets together make the key, which never travels. Of a
pair the higher rank connects:

    connector -> (who, whom, its nonce)         acceptor -> (its nonce, HMAC of both ranks and nonces by the key)
    connector -> HMAC of the same, of the other direction

Whoever has not done that within `_STRANGER_S`, in however many pieces, is not heard any further: the connection is
closed. One thread hears all who come, as far as each has spoken, so no peer waits for another.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from weaveopt.errors import ArenaError
from weaveopt.fabrics.addresses import own_address
from weaveopt.fabrics.topology import RecordExchange

_HELLO = struct.Struct("!8sII32s")
_MAGIC = b"weavetcp"
_NONCE_BYTES, _PROOF_BYTES = 32, 32
_STRANGER_S = 5.0
"""Total time that a connecting process has to authenticate."""
_BACKLOG = 128
_MOST_HEARD = 256
"""Maximum number of unauthenticated connections; one more closes the oldest, which is no peer, or tries again."""
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of `accept` that pass."""
_BROKEN = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP}
"""Errors of a listener that accepts no further peer; all others concern the peer that connected."""
_LOOK_S = 0.05
_CONNECTING_S = 30.0
"""Time to connect. All ranks have arrived by then: one that cannot be reached in this time is blocked by a firewall."""


def connect(channel: RecordExchange, peers: Iterable[int], timeout_s: float) -> dict[int, socket.socket]:
    """A connection to each of `peers`, by their index in the group of `channel`; everyone of the group calls it.

    Who is whose peer is mutual. Raises `AgreementError` where a rank does not come within `timeout_s`, and `ArenaError`
    on all ranks where one cannot be reached.
    """
    group, wanted = channel.group, frozenset(peers)
    error, listener = "", None
    record: dict[str, str | int] = {"address": "", "port": 0}
    secret = secrets.token_hex(32)
    try:
        address = own_address()
        listener = socket.create_server((address, 0), backlog=_BACKLOG, family=_family_of(address))
        record = {"address": address, "port": int(listener.getsockname()[1])}
    except (ArenaError, OSError) as failure:
        error = str(failure)
    try:
        answers = channel.gather({**record, "secret": secret, "error": error}, "connections between hosts", timeout_s)
        failed = [f"rank {rank}: {r['error']}" for rank, r in zip(group.ranks, answers, strict=True) if r["error"]]
        if failed:
            raise ArenaError(f"group {group.name!r}: cannot connect its hosts: {'; '.join(failed)}")
        assert listener is not None
        key = hashlib.sha256("/".join(str(each["secret"]) for each in answers).encode()).digest()
        setup = _ConnectionSetup(key, group.rank, wanted, time.monotonic() + min(timeout_s, _CONNECTING_S))
        places = [(str(each["address"]), int(each["port"])) for each in answers]
        try:
            setup.hold(listener, places)
        except BaseException:
            setup.close()
            raise
        missing = wanted - setup.found.keys()
        ended = channel.gather({"missing": ",".join(map(str, sorted(missing)))}, "the end of connecting", timeout_s)
        without = [rank for rank, each in zip(group.ranks, ended, strict=True) if each["missing"]]
        if without:
            setup.close()
            unreached = [group.ranks[index] for index in sorted(missing)]
            why = "; ".join(setup.errors) or "they did not connect"
            detail = f" (rank {group.ranks[group.rank]} did not reach ranks {unreached}: {why})" if missing else ""
            raise ArenaError(f"group {group.name!r}: ranks {without} could not connect to all others{detail}")
        return setup.found
    finally:
        if listener is not None:
            listener.close()


@dataclass
class _Visit:
    """An incoming connection that has not yet been authenticated as a peer's."""

    connection: socket.socket
    until: float
    peer: int = -1
    """Rank that the other end claims to be; -1 before it has claimed one."""
    proof: bytes = b""
    """Proof expected from the connecting process."""
    heard: bytearray = field(default_factory=bytearray)

    @property
    def num_bytes(self) -> int:
        """Number of bytes in its next message."""
        return _HELLO.size if self.peer < 0 else _PROOF_BYTES


class _ConnectionSetup:
    """One rank's part in making connections."""

    def __init__(self, key: bytes, rank: int, wanted: frozenset[int], deadline: float) -> None:
        self._key, self._rank, self._wanted, self._deadline = key, rank, wanted, deadline
        self._lock = threading.Lock()
        self._all_found = threading.Event()
        self._unproven: set[socket.socket] = set()
        """Connections that this rank makes, whose other end has yet to show that it is a peer."""
        self._visits: dict[socket.socket, _Visit] = {}
        """Unauthenticated connections in order of arrival; used only by the accepting thread."""
        self.found: dict[int, socket.socket] = {}
        self.errors: list[str] = []

    def hold(self, listener: socket.socket, places: Sequence[tuple[str, int]]) -> None:
        """Make and accept connections until all peers are found, or time is up. Unauthenticated ones are then shut
        down."""
        if not self._wanted:
            return
        lower = sorted(rank for rank in self._wanted if rank < self._rank)
        threads = [
            threading.Thread(target=self._connect_to, args=(peer, places[peer]), name="weaveopt-connect", daemon=True)
            for peer in lower
        ]
        accepting = threading.Thread(target=self._accept, args=(listener,), name="weaveopt-accept", daemon=True)
        try:
            for thread in (accepting, *threads):
                thread.start()
            self._all_found.wait(max(self._deadline - time.monotonic(), 0))
        finally:
            self._all_found.set()  # whoever still tries stops
            if accepting.ident is not None:
                accepting.join()
        with self._lock:
            for each in self._unproven:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # its thread wakes up, and closes it

    def close(self) -> None:
        for each in self.found.values():
            each.close()
        self.found.clear()

    def _keep(self, peer: int, connection: socket.socket) -> bool:
        """False where somebody has taken the place already."""
        with self._lock:
            if peer not in self._wanted or peer in self.found or self._all_found.is_set():
                return False
            connection.settimeout(None)
            self._unproven.discard(connection)
            self.found[peer] = connection
            if len(self.found) == len(self._wanted):
                self._all_found.set()
            return True

    def _question(self, connection: socket.socket) -> None:
        """Register a connection as unauthenticated. Raises `ConnectionError` once connecting is over."""
        with self._lock:
            self._unproven.add(connection)
            if self._all_found.is_set():
                raise ConnectionError("connecting is over")

    def _dismiss(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproven.discard(connection)
            connection.close()

    def _connect_to(self, peer: int, place: tuple[str, int]) -> None:
        error: Exception | None = None
        while not self._all_found.is_set() and time.monotonic() < self._deadline:
            try:
                left = max(self._deadline - time.monotonic(), 0.1)
                connection = socket.create_connection(place, timeout=min(left, _STRANGER_S))
            except OSError as failure:
                error = failure
            else:
                try:
                    self._question(connection)
                    if self._introduce(connection, peer) and self._keep(peer, connection):
                        return
                    error = ConnectionError("it did not show the group's key")
                except OSError as failure:
                    error = failure
                self._dismiss(connection)
            self._all_found.wait(_LOOK_S)
        if error is not None:
            self.errors.append(f"{place[0]}:{place[1]}: {error}")

    def _introduce(self, connection: socket.socket, peer: int) -> bool:
        mine, until = secrets.token_bytes(_NONCE_BYTES), min(time.monotonic() + _STRANGER_S, self._deadline)
        connection.sendall(_HELLO.pack(_MAGIC, self._rank, peer, mine))
        theirs, proof = _received(connection, _NONCE_BYTES, until), _received(connection, _PROOF_BYTES, until)
        if not hmac.compare_digest(proof, self._proof(b"accept", self._rank, peer, mine, theirs)):
            return False
        connection.sendall(self._proof(b"connect", self._rank, peer, mine, theirs))
        return True

    def _accept(self, listener: socket.socket) -> None:
        """Lets in who comes and hears him, until all are found; whoever is no peer by then hears so."""
        listener.setblocking(False)
        # Not epoll, which takes a descriptor: there may be none.
        with selectors.PollSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not self._all_found.is_set():
                for key, _ in selector.select(_LOOK_S):
                    if key.data is None:
                        self._let_in(listener, selector)
                    elif not self._hears(key.data):
                        self._see_off(key.data, selector)
                now = time.monotonic()
                for visit in [each for each in self._visits.values() if each.until <= now]:
                    self._see_off(visit, selector)
            for visit in list(self._visits.values()):
                self._see_off(visit, selector)

    def _let_in(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._make_room(selector)
                self._all_found.wait(_LOOK_S)
            elif error.errno in _BROKEN:
                self.errors.append(f"no peer can connect any more: {error}")
                selector.unregister(listener)
            return
        if len(self._visits) >= _MOST_HEARD:
            self._make_room(selector)
        connection.setblocking(False)
        visit = self._visits[connection] = _Visit(connection, time.monotonic() + _STRANGER_S)
        selector.register(connection, selectors.EVENT_READ, visit)

    def _make_room(self, selector: selectors.BaseSelector) -> None:
        """Sees off the oldest of those who have said least."""
        oldest = min(self._visits.values(), key=lambda each: each.peer >= 0, default=None)
        if oldest is not None:
            self._see_off(oldest, selector)

    def _see_off(self, visit: _Visit, selector: selectors.BaseSelector) -> None:
        """Closes the connection of one who is no peer; that of a peer goes on."""
        if self._visits.pop(visit.connection, None) is None:
            return
        selector.unregister(visit.connection)
        if visit.connection is not self.found.get(visit.peer):
            visit.connection.close()

    def _hears(self, visit: _Visit) -> bool:
        """Takes what `visit` has said by now; false where that was the last of it."""
        try:
            piece = visit.connection.recv(visit.num_bytes - len(visit.heard))
        except BlockingIOError:
            return True
        except OSError:
            return False
        visit.heard += piece
        if not piece or len(visit.heard) < visit.num_bytes:
            return bool(piece)
        words = bytes(visit.heard)
        visit.heard.clear()
        if visit.peer < 0:
            return self._answer(visit, words)
        if hmac.compare_digest(words, visit.proof):
            self._keep(visit.peer, visit.connection)
        return False

    def _answer(self, visit: _Visit, hello: bytes) -> bool:
        magic, peer, whom, theirs = _HELLO.unpack(hello)
        if magic != _MAGIC or whom != self._rank or peer not in self._wanted:
            return False
        mine = secrets.token_bytes(_NONCE_BYTES)
        visit.peer, visit.proof = peer, self._proof(b"connect", peer, self._rank, theirs, mine)
        answer = mine + self._proof(b"accept", peer, self._rank, theirs, mine)
        with suppress(OSError):
            return visit.connection.send(answer) == len(answer)
        return False

    def _proof(self, direction: bytes, connector: int, acceptor: int, first: bytes, second: bytes) -> bytes:
        ranks = struct.pack("!II", connector, acceptor)
        return hmac.digest(self._key, direction + ranks + first + second, "sha256")


def _received(connection: socket.socket, num_bytes: int, until: float) -> bytes:
    found = b""
    while len(found) < num_bytes:
        connection.settimeout(max(until - time.monotonic(), 1e-3))
        piece = connection.recv(num_bytes - len(found))
        if not piece:
            raise ConnectionError("the other end closed the connection")
        found += piece
        if time.monotonic() > until:
            raise TimeoutError("the other end did not show in time who it is")
    return found


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
