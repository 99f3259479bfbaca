"""Shared parts of all calls in shared memory: the tag that peers compare, and the errors for native codes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from weaveopt.errors import PeerTimeoutError, WeaveError, calls_differ
from weaveopt.fabrics.topology import Group, last_words
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: no call is bound then
    _native = None  # type: ignore[assignment]

_OWN = {} if _native is None else {
    _native.Code.INTERRUPTED: "the handler of a signal raised while this rank waited",
    _native.Code.ABANDONED: "an exception ended the call on this rank",
}  # fmt: skip
"""Failures of this rank itself, by code."""
_names: dict[int, str] = {}
"""Tag -> site, for messages."""


@dataclass(frozen=True)
class Caller:
    """Identification of a call in error messages."""

    op: str
    site: str
    group: Group
    timeout_s: float

    @property
    def where(self) -> str:
        ranks = self.group.ranks
        return f"weave::{self.op} at site {self.site}, group {self.group.name!r}, rank {ranks[self.group.rank]}"


def tag_of(site: str, text: str) -> int:
    """Compute and register a call's tag from its encoding `text`; ranks whose plans differ detect it when they
    synchronize."""
    tag = zlib.crc32(text.encode())
    _names[tag] = site
    return tag


def failure(caller: Caller, code: int, status: _native.Status) -> WeaveError:
    """Return the error for `code`; `status` is the first failure of the arena."""
    where, codes = caller.where, _native.Code
    if code == int(codes.BUSY):
        return WeaveError(
            f"{where}: another thread runs an operation of the same group, or this one does and the handler of a "
            "signal came in between; run them one by one"
        )
    if code == int(codes.FORKED):
        return WeaveError(
            f"{where}: this process was forked from the one that is that rank: run the model there, or start "
            "processes that run it by spawn"
        )
    peer = caller.group.ranks[status.peer]
    expected = f"slot {status.slot}, expected epoch {status.expected}, seen {status.seen}"
    if status.code == codes.SITE_MISMATCH:
        error: WeaveError = calls_differ(where, _describe(status.own_tag), peer, _describe(status.peer_tag), expected)
    elif status.code in _OWN:
        error = WeaveError(f"{where}: {_OWN[status.code]} ({expected})")
    else:
        why = {
            codes.TIMEOUT: f"did not signal within {caller.timeout_s:g} s",
            codes.PEER_EXITED: "exited",
            codes.PEER_FAILED: "gave up waiting itself",
        }[status.code]
        words = "" if status.code == codes.TIMEOUT else last_words(caller.group.name, peer)
        error = PeerTimeoutError(f"{where}: peer rank {peer} {why} ({expected}){words and f'. It said: {words}'}")
    if code == int(codes.POISONED):
        error = type(error)(f"{where}: the arena is unusable since an earlier call failed. {error}")
    return error


def _describe(tag: int) -> str:
    site, tokens = tag >> 32, tag & 0xFFFFFFFF
    return f"site {_names.get(site, f'unknown here (tag {site:08x})')} with {counted(tokens, 'token')}"
