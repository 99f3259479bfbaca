"""Watchdog: reads the errors that this process's waiting kernels report, and raises each as one clear error.

A kernel that gives up on a peer writes the reason to host memory, signals the other peers, waits a moment for the host
to read it, and ends with a trap; from then on every CUDA call of the process fails, whatever it is about. So a thread
polls that memory: it writes to stderr, keeps the error on the group's arena, raises it in the main thread, and only
then lets the kernel end. The thread also notices a peer of this host that died, and ends the waits for it at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from weaveopt.errors import PeerTimeoutError, WeaveError, calls_differ
from weaveopt.fabrics.topology import Group, last_words
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: nothing is ever watched
    _native = None  # type: ignore[assignment]

POLL_S = 0.05
POLLS_PER_PEER_CHECK = 4
"""Waits for a peer that died end after the second check that finds it gone."""
_TAG_FIELD_BITS: int = 0 if _native is None else _native.TAG_FIELD_BITS
_TAG_FIELD = (1 << _TAG_FIELD_BITS) - 1
MAX_TOKENS = _TAG_FIELD
"""Largest token count that fits into the word by which peers compare what a rank runs."""


@dataclass(frozen=True)
class Process:
    """A rank's process. Holds a descriptor of it, where the system gives one out, from when it is made."""

    pid: int
    start: str
    """Host and start time, which distinguish it from other processes with the same number; empty if unknown."""
    _seen: _native.Process = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_seen", _native.Process(self.pid, self.start))

    def has_ended(self) -> bool:
        """True if the system says that the process ended; False for one of another host or pid namespace."""
        return self._seen.has_ended()


@dataclass(frozen=True)
class NamedSite:
    """Identification of a site in error messages, registered for its tag."""

    op: str
    site: str
    timeout_s: float


class NativeGroup(Protocol):
    """Methods of `_native.PeerGroup` that the watchdog uses."""

    @property
    def status(self) -> _native.Status: ...
    def acknowledge(self) -> None: ...
    def abort(self, code: _native.Code) -> None: ...
    def retire(self) -> None: ...


class Watched(Protocol):
    """An arena whose kernels may wait."""

    error: WeaveError | None
    """Why nothing can run in it any more."""

    @property
    def group(self) -> Group: ...
    @property
    def native(self) -> NativeGroup: ...
    @property
    def peers(self) -> Sequence[Process]: ...


_sites: dict[int, NamedSite] = {}
_watched: list[Watched] = []
_suspected: set[int] = set()
"""`id` of each watched arena with a peer that was gone at the last check."""
_lock = threading.RLock()
_wake = threading.Event()
_thread: threading.Thread | None = None


def this_process() -> Process:
    return Process(os.getpid(), _native.process_identity(os.getpid()))


def tag_of(checksum: int) -> int:
    """The part of a checksum that fits a tag."""
    return checksum & _TAG_FIELD


def name_site(tag: int, named: NamedSite) -> None:
    _sites[tag] = named


def watch(arena: Watched) -> None:
    """Watch `arena` until `forget`."""
    global _thread
    with _lock:
        _watched.append(arena)
        if _thread is None or not _thread.is_alive():
            _wake.clear()
            _thread = threading.Thread(target=_run, name="weaveopt-watchdog", daemon=True)
            _thread.start()


def forget(arena: Watched) -> None:
    """Stop watching `arena`; called before its memory is released."""
    arena.native.retire()
    with _lock:
        _suspected.discard(id(arena))
        _watched[:] = [other for other in _watched if other is not arena]


def fail(arena: Watched, what: str) -> NoReturn:
    """Raise the reason why a launch in `arena` failed: what its kernels reported, else `what`."""
    with _lock:
        # The trap of one arena's kernel ends every other's launches too.
        for other in (arena, *_watched):
            _read(other, in_main=False)
        error = arena.error or next((other.error for other in _watched if other.error is not None), None)
    if error is None:
        raise WeaveError(what)
    raise_again(error)


def raise_said(cause: BaseException) -> None:
    """Raise the error that a kernel of this process reported before it gave up, because of `cause`; returns if there is
    none.

    A kernel that gives up ends with a trap, and then CUDA calls fail that have nothing to do with it.
    """
    with _lock:
        for arena in tuple(_watched):
            _read(arena, in_main=False)
        error = next((arena.error for arena in _watched if arena.error is not None), None)
    if error is not None:
        _take_back()
        raise error from cause


def raise_again(error: WeaveError) -> NoReturn:
    """A later call than the one that failed."""
    _take_back()
    text = str(error)
    poisoned = "the arena is unusable since an earlier call failed. "
    raise type(error)(text if text.startswith(poisoned) else poisoned + text)


def describe(arena: Watched, status: _native.Status) -> WeaveError:
    """The error that `status` of the arena's group stands for."""
    codes = _native.Code
    group = arena.group
    tokens, named = _named(status.own_tag)
    peer = group.ranks[status.peer] if 0 <= status.peer < len(group.ranks) else -1
    where = f"weave::{named.op} at site {named.site} with {counted(tokens, 'token')}, group {group.name!r}"
    where = f"{where}, rank {group.ranks[group.rank]}"
    expected = f"slot {status.slot}, expected {status.expected:#x}, seen {status.seen:#x}"
    if status.code == codes.SITE_MISMATCH:
        return calls_differ(where, _runs(status.own_tag), peer, _runs(status.peer_tag), expected)
    if status.code in (codes.PEER_EXITED, codes.PEER_FAILED):
        ended = [group.ranks[rank] for rank, process in enumerate(arena.peers) if process.has_ended()]
        if ended and peer not in ended:
            # The peer waited for is alive, and waits, or gave up waiting, for the one that is gone.
            return PeerTimeoutError(f"{where}: peer rank {ended[0]} exited (waited for rank {peer}: {expected})")
    why = {
        codes.TIMEOUT: f"did not signal within {named.timeout_s:g} s",
        codes.PEER_EXITED: "exited",
        codes.PEER_FAILED: "gave up waiting itself",
    }.get(status.code, f"failed ({status.code})")
    words = "" if status.code == codes.TIMEOUT else last_words(group.name, peer)
    return PeerTimeoutError(f"{where}: peer rank {peer} {why} ({expected}){words and f'. It said: {words}'}")


def _named(tag: int) -> tuple[int, NamedSite]:
    """Tokens and site of a tag word; see tag_word() in csrc/fabric/arena.h."""
    site = tag & _TAG_FIELD
    unknown = NamedSite("unknown", f"unknown here (tag {site:06x})", float("nan"))
    return tag >> _TAG_FIELD_BITS & _TAG_FIELD, _sites.get(site, unknown)


def _runs(tag: int) -> str:
    tokens, named = _named(tag)
    return f"site {named.site} with {counted(tokens, 'token')}"


def _run() -> None:
    polls = 0
    while not _wake.wait(POLL_S):
        polls += 1
        with _lock:
            _look(check_peers=polls % POLLS_PER_PEER_CHECK == 0)


def _look(check_peers: bool) -> None:
    """Check all arenas, under the lock; the thread keeps no reference to them afterwards.

    Otherwise an arena that is released meanwhile would be freed on this thread, whose current GPU is the first one:
    that takes half a gigabyte of a GPU that may be a peer's.
    """
    for arena in tuple(_watched):
        _read(arena, in_main=True)
        if check_peers:
            _check_peers(arena)


def _read(arena: Watched, in_main: bool) -> None:
    if arena.error is not None:
        return
    native = arena.native
    status = native.status
    if status.code == _native.Code.OK:
        return
    error = describe(arena, status)
    arena.error = error
    # One write, so that lines of several ranks do not mix.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"weaveopt: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    if in_main:
        _raise_in_main(error)
    native.acknowledge()


def _check_peers(arena: Watched) -> None:
    if arena.error is not None or not any(process.has_ended() for process in arena.peers):
        _suspected.discard(id(arena))
    elif id(arena) in _suspected:
        arena.native.abort(_native.Code.PEER_EXITED)
    else:
        _suspected.add(id(arena))


def _raise_in_main(error: WeaveError) -> None:
    """Raise at the main thread's next step in Python: it may be deep in a wait that has nothing to do with us."""
    kind = type(error)
    message = str(error)

    def construct(self: WeaveError) -> None:
        RuntimeError.__init__(self, message)

    # Python makes the exception itself, without arguments.
    answers = type(kind.__name__, (kind,), {"__init__": construct, "__module__": kind.__module__})
    ident = threading.main_thread().ident
    if ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(answers))


def _take_back() -> None:
    """The main thread is about to raise the error itself."""
    ident = threading.get_ident()
    if ident == threading.main_thread().ident:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)


def _begin_anew() -> None:
    """Reset this module in a forked process: the arenas are its parent's, and so is the thread.

    The thread may have held the lock, or that of the event, at the fork, and it would never be released.
    """
    global _lock, _wake, _thread
    _lock, _wake, _thread = threading.RLock(), threading.Event(), None
    _watched.clear()
    _suspected.clear()


os.register_at_fork(after_in_child=_begin_anew)


@atexit.register
def _stop() -> None:
    _wake.set()
    if _thread is not None:
        _thread.join(1.0)
