"""Progress of a rank in its process groups, served to ranks that wait for it.

A thread of the process answers on a socket, also while the main thread waits in a collective or in a kernel. It costs
nothing while no rank asks. Whoever asks has the address and a token from the group's store.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

QUESTION_BYTES = 128
ANSWER_BYTES = 4096
_QUESTION_S = 0.5
"""Longest time that a connection may take to ask."""
_ANSWER_S = 2.0
"""Longest time of an answer, the connection included."""


@dataclass(frozen=True)
class Position:
    """Progress of a rank in a group."""

    calls: int
    """Number of calls of graphs with rewritten sites of the group that it began; equal on ranks at the same point."""
    collectives: int
    """Collectives of the group that it issued; -1 where the library does not count them."""


@dataclass(frozen=True)
class Address:
    """The address at which a rank answers questions about one of its groups."""

    host: str
    port: int
    token: str


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64


class _ServerOfSixth(_Server):
    address_family = socket.AF_INET6


class _PositionHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.settimeout(_QUESTION_S)
        with contextlib.suppress(OSError):
            look = _looks.get(self.request.recv(QUESTION_BYTES).decode(errors="replace"))
            if look is not None:
                self.request.sendall(json.dumps(asdict(look())).encode())


_looks: dict[str, Callable[[], Position]] = {}
"""Token -> how far this rank is in the group that the token was made for."""
_servers: dict[str, _Server] = {}
_lock = threading.Lock()


def serve(host: str, look: Callable[[], Position]) -> Address | None:
    """Serve `look()` on a listening socket of this process until `stop`; None if it cannot listen."""
    with _lock:
        server = _servers.get(host)
        if server is None:
            try:
                server = _servers[host] = (_ServerOfSixth if ":" in host else _Server)((host, 0), _PositionHandler)
            except OSError:
                return None
            # Nothing ends the loop but the process, so it need not look whether to end.
            arguments = {"poll_interval": 3600.0}
            threading.Thread(
                target=server.serve_forever, kwargs=arguments, name="weaveopt-positions", daemon=True
            ).start()
    token = secrets.token_hex(16)
    _looks[token] = look
    return Address(host, int(server.server_address[1]), token)


def stop(address: Address | None) -> None:
    """Ends what `serve` began."""
    if address is not None:
        _looks.pop(address.token, None)


def ask(address: Address) -> Position | None:
    """Return the progress of the rank at `address`; None if it does not answer."""
    try:
        with socket.create_connection((address.host, address.port), timeout=_ANSWER_S) as connection:
            connection.sendall(address.token.encode())
            connection.shutdown(socket.SHUT_WR)
            said = connection.makefile("rb").read(ANSWER_BYTES)
        return Position(**json.loads(said)) if said else None
    except (OSError, ValueError, TypeError):
        return None


def has_ended(address: Address) -> bool:
    """True if nothing listens at `address` any more. The caller knows that it could be reached."""
    try:
        socket.create_connection((address.host, address.port), timeout=_ANSWER_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _begin_anew() -> None:
    """Reset this module in a forked process: groups and threads are its parent's, and one may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _looks.clear()
    for server in _servers.values():
        server.socket.close()
    _servers.clear()


os.register_at_fork(after_in_child=_begin_anew)
