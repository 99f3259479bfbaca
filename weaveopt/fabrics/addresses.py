"""The address of this host at which ranks of other hosts reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from weaveopt.config import variable
from weaveopt.errors import ArenaError

_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): what leads there leads to other hosts."""
_SIOCGIFADDR = 0x8915


def own_address() -> str:
    """The address of this host at which the group's other hosts reach it.

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
        # On the store's own host its name may stand for the loopback (127.0.1.1), which no other host reaches.
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
    """True if the address, or the name by itself, stands for the loopback."""
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
