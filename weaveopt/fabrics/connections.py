"""TCP connections between the ranks of a group, each made by two ranks that have shown each other the group's key.

Every rank listens on one port of the address at which the others reach it, for as long as connections are made. Ranks
publish port and a secret through the group's store, and all secrets together make the key, which never travels. Of a
pair the higher rank connects:

    connector -> (who, whom, its nonce)         acceptor -> (its nonce, HMAC of both ranks and nonces by the key)
    connector -> HMAC of the same, of the other direction

Whoever cannot do that, in time, is not heard any further: the connection is closed, and the others go on.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from weaveopt.config import variable
from weaveopt.errors import ArenaError
from weaveopt.fabrics.topology import Exchange

_HELLO = struct.Struct("!8sII32s")
_MAGIC = b"weavetcp"
_NONCE_BYTES, _PROOF_BYTES = 32, 32
_STRANGER_S = 5.0
"""What somebody who connects gets to show who he is."""
_BACKLOG = 128
_MOST_HEARD = 64
"""Who connects beyond so many that have not shown who they are is turned away at once; peers try again."""
_ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): what leads there leads to other hosts."""
_SIOCGIFADDR = 0x8915
_CONNECTING_S = 30.0
"""All ranks are there by then: who cannot be reached in this time is behind a firewall."""


def own_address() -> str:
    """Of this host, the address at which the group's other hosts reach it.

    `WEAVE_ADDRESS` says it; else it is that of the interface which `GLOO_SOCKET_IFNAME` names, else the one that leads
    to the store. Raises `ArenaError` where none is known.
    """
    asked = variable("WEAVE_ADDRESS")
    if asked:
        return asked
    named = variable("GLOO_SOCKET_IFNAME").partition(",")[0]
    if named:
        return _address_of(named)
    store = variable("MASTER_ADDR")
    if not store:
        raise ArenaError("which address leads to the other hosts is not known: set WEAVE_ADDRESS (or MASTER_ADDR)")
    try:
        found = _leads_to(store)
        # On the store's own host its name may stand for the loopback (127.0.1.1), where nobody else comes.
        if _is_loopback(found) and not _is_loopback(store):
            found = _leads_to(_ELSEWHERE)
    except OSError as error:
        raise ArenaError(f"no address of this host leads to {store!r}: {error}; set WEAVE_ADDRESS") from None
    return found


def _leads_to(host: str) -> str:
    """The address that this host would send from; a datagram socket that is connected sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    """Of a name: whether it says so itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise ArenaError(f"interface {interface!r} (GLOO_SOCKET_IFNAME) has no address: {error}") from None
    return socket.inet_ntoa(found[20:24])


def connect(channel: Exchange, peers: Iterable[int], timeout_s: float) -> dict[int, socket.socket]:
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
        told = channel.gather({**record, "secret": secret, "error": error}, "connections between hosts", timeout_s)
        failed = [f"rank {rank}: {r['error']}" for rank, r in zip(group.ranks, told, strict=True) if r["error"]]
        if failed:
            raise ArenaError(f"group {group.name!r}: cannot connect its hosts: {'; '.join(failed)}")
        assert listener is not None
        key = hashlib.sha256("/".join(str(each["secret"]) for each in told).encode()).digest()
        meeting = _Meeting(key, group.rank, wanted, time.monotonic() + min(timeout_s, _CONNECTING_S))
        places = [(str(each["address"]), int(each["port"])) for each in told]
        try:
            meeting.hold(listener, places)
        except BaseException:
            meeting.close()
            raise
        missing = wanted - meeting.found.keys()
        met = channel.gather({"missing": ",".join(map(str, sorted(missing)))}, "the end of connecting", timeout_s)
        without = [rank for rank, each in zip(group.ranks, met, strict=True) if each["missing"]]
        if without:
            meeting.close()
            unreached = [group.ranks[index] for index in sorted(missing)]
            why = "; ".join(meeting.errors) or "they did not connect"
            detail = f" (rank {group.ranks[group.rank]} did not reach ranks {unreached}: {why})" if missing else ""
            raise ArenaError(f"group {group.name!r}: ranks {without} could not connect to all others{detail}")
        return meeting.found
    finally:
        if listener is not None:
            listener.close()


class _Meeting:
    """One rank's part in making connections."""

    def __init__(self, key: bytes, rank: int, wanted: frozenset[int], deadline: float) -> None:
        self._key, self._rank, self._wanted, self._deadline = key, rank, wanted, deadline
        self._lock = threading.Lock()
        self._all_found = threading.Event()
        self._heard = threading.BoundedSemaphore(_MOST_HEARD)
        self._unproven: set[socket.socket] = set()
        """Connections whose other end has yet to show that it is a peer."""
        self.found: dict[int, socket.socket] = {}
        self.errors: list[str] = []

    def hold(self, listener: socket.socket, places: Sequence[tuple[str, int]]) -> None:
        """Until all are found, or time is up. Whoever has not shown by then that he is a peer hears so."""
        if not self._wanted:
            return
        lower = sorted(rank for rank in self._wanted if rank < self._rank)
        threads = [
            threading.Thread(target=self._reach, args=(peer, places[peer]), name="weaveopt-connect", daemon=True)
            for peer in lower
        ]
        accepting = threading.Thread(target=self._accept, args=(listener,), name="weaveopt-accept", daemon=True)
        for thread in (*threads, accepting):
            thread.start()
        self._all_found.wait(max(self._deadline - time.monotonic(), 0))
        self._all_found.set()  # whoever still tries stops
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
        """Raises `ConnectionError` where connecting is over."""
        with self._lock:
            self._unproven.add(connection)
            if self._all_found.is_set():
                raise ConnectionError("connecting is over")

    def _dismiss(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproven.discard(connection)
            connection.close()

    def _reach(self, peer: int, place: tuple[str, int]) -> None:
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
            self._all_found.wait(0.05)
        if error is not None:
            self.errors.append(f"{place[0]}:{place[1]}: {error}")

    def _introduce(self, connection: socket.socket, peer: int) -> bool:
        mine = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(_HELLO.pack(_MAGIC, self._rank, peer, mine))
        theirs, proof = _received(connection, _NONCE_BYTES), _received(connection, _PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(b"accept", self._rank, peer, mine, theirs)):
            return False
        connection.sendall(self._proof(b"connect", self._rank, peer, mine, theirs))
        return True

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.05)
        while not self._all_found.is_set():
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                if not self._heard.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._hear, args=(connection,), name="weaveopt-hear", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        """Whoever it is has until `_STRANGER_S` to be a peer, and no longer than connecting takes."""
        try:
            self._question(connection)
            connection.settimeout(_STRANGER_S)
            magic, peer, whom, theirs = _HELLO.unpack(_received(connection, _HELLO.size))
            if magic != _MAGIC or whom != self._rank or peer not in self._wanted:
                raise ConnectionError
            mine = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(mine + self._proof(b"accept", peer, self._rank, theirs, mine))
            proof = _received(connection, _PROOF_BYTES)
            if not hmac.compare_digest(proof, self._proof(b"connect", peer, self._rank, theirs, mine)):
                raise ConnectionError
            if not self._keep(peer, connection):
                raise ConnectionError
        except (OSError, struct.error):
            self._dismiss(connection)
        finally:
            self._heard.release()

    def _proof(self, direction: bytes, connector: int, acceptor: int, first: bytes, second: bytes) -> bytes:
        ranks = struct.pack("!II", connector, acceptor)
        return hmac.digest(self._key, direction + ranks + first + second, "sha256")


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        piece = connection.recv(num_bytes - len(found))
        if not piece:
            raise ConnectionError("the other end closed the connection")
        found += piece
    return found


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
