"""Symmetric memory: one segment per rank of a process group, of the same size, mapped by all of them.

It is reserved once, when ranks bind a compiled graph; offsets into it are the plan's. From then on nothing
allocates and nothing rendezvouses. Only the `shm` fabric is here; `weaveopt.fabrics.topology` says whether it
reaches all ranks.
"""

from __future__ import annotations

import atexit
import os
import secrets
import weakref
from collections.abc import Callable
from math import prod

import torch
import torch.distributed as dist

from weaveopt.errors import ArenaError
from weaveopt.fabrics import topology as topologies
from weaveopt.fabrics.topology import Exchange, Group, Topology

try:
    from weaveopt import _native
except ImportError:  # built without it: the library path still works
    _native = None  # type: ignore[assignment]

PAGE_BYTES = 4096
FIRST_EPOCH = 0
"""Where epochs start. They wrap at 2^32, so any value is as good."""


class Arena:
    """The shared memory of one group: this rank's segment, the peers' mapped, and the epoch of the last call."""

    def __init__(self, group: Group, segments: list[_native.Segment], num_processes: int, num_bytes: int) -> None:
        self.group = group
        self.num_bytes = num_bytes
        self.closed = False
        """Replaced by a larger one, or released: calls that were bound to it must bind again."""
        self._native: _native.Group | None = _native.Group(segments, group.rank, num_processes, FIRST_EPOCH)
        self._own: _native.Segment | None = segments[group.rank]
        self._bytes: torch.Tensor | None = torch.frombuffer(self._own, dtype=torch.uint8)
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._at_close: list[Callable[[], None]] = []

    @property
    def native(self) -> _native.Group:
        """What native calls are bound to. Raises `ArenaError` once closed."""
        if self._native is None:
            raise ArenaError(f"the arena of group {self.group.name!r} was released")
        return self._native

    def at_close(self, callback: Callable[[], None]) -> None:
        """Has `callback` run when the arena is given back: whoever keeps `native` or a view drops it then."""
        self._at_close.append(callback)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of this rank's segment, the same object for the same arguments. Raises `ArenaError` if outside."""
        key = (offset, shape, dtype)
        view = self._views.get(key)
        if view is None:
            end = offset + prod(shape) * dtype.itemsize
            if self._bytes is None or offset < 0 or end > self.num_bytes:
                raise ArenaError(f"bytes [{offset}, {end}) are outside the arena of {self.num_bytes} bytes")
            view = self._views[key] = self._bytes[offset:end].view(dtype).view(shape)
        return view

    def close(self) -> None:
        """Gives the memory back; it is unmapped once the last view of it is gone. Peers that wait are told."""
        if self.closed or self._own is None:
            return
        self.closed = True
        self._own.mark_closed()
        for callback in self._at_close:
            callback()
        self._at_close.clear()
        self._views.clear()
        self._own = self._bytes = self._native = None


class _Entry:
    """The arena of a process group, as long as that process group lives."""

    def __init__(self, arena: Arena, pg: dist.ProcessGroup) -> None:
        self.arena = arena
        self.process_group = weakref.ref(pg, lambda _: arena.close())


_entries: dict[str, _Entry] = {}


def reserve(topology: Topology, num_bytes: int, timeout_s: float) -> Arena:
    """The arena of `topology.group` with at least `num_bytes`, made or made larger if need be.

    All ranks of the group call it at the same point with the same size. A larger arena replaces the one there was;
    offsets stay valid, contents do not. Raises `ArenaError` if memory is short on any rank (all ranks raise), and
    `AgreementError` if a rank does not come within `timeout_s`.
    """
    name = topology.group.name
    if topology.fake or _native is None:
        raise ArenaError(
            f"group {name!r}: no shared memory " + ("without peers" if topology.fake else "(no native part)")
        )
    pg = topologies.process_group(name)
    entry = _entries.get(name)
    valid = entry is not None and entry.process_group() is pg and not entry.arena.closed
    if entry is not None and valid and entry.arena.num_bytes >= num_bytes:
        return entry.arena
    channel = topologies.exchange(name, timeout_s)
    arena = _make(topology, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, channel, timeout_s)
    # Only now: all ranks have met in _make, so nobody is inside a call of the old one any more.
    if entry is not None:
        entry.arena.close()
    _entries[name] = _Entry(arena, pg)
    return arena


def of(group_name: str) -> Arena:
    """The arena that was reserved for the group, or `ArenaError`."""
    entry = _entries.get(group_name)
    if entry is None or entry.arena.closed or entry.process_group() is not topologies.process_group(group_name):
        raise ArenaError(f"no arena was reserved for group {group_name!r}: arena.reserve() comes before the first call")
    return entry.arena


def release(group_name: str) -> None:
    """Gives the group's arena back, if there is one."""
    entry = _entries.pop(group_name, None)
    if entry is not None:
        entry.arena.close()


@atexit.register
def release_all() -> None:
    for name in tuple(_entries):
        release(name)


def _make(topology: Topology, num_bytes: int, channel: Exchange, timeout_s: float) -> Arena:
    group = topology.group
    own: _native.Segment | None = None
    cookie = secrets.randbits(63)
    try:
        own = _native.Segment.create(num_bytes, cookie, FIRST_EPOCH)
        error = ""
    except RuntimeError as failure:
        error = str(failure)
    announced = channel.gather(
        {"pid": os.getpid(), "fd": own.fd if own else -1, "cookie": cookie, "bytes": num_bytes, "error": error},
        f"an arena of {num_bytes} bytes",
        timeout_s,
    )
    _raise_if_any(group, [str(record["error"]) for record in announced], num_bytes)
    sizes = [int(record["bytes"]) for record in announced]
    if len(set(sizes)) > 1:
        raise ArenaError(f"group {group.name!r}: ranks {group.ranks} ask for arenas of {sizes} bytes")
    segments: list[_native.Segment] = []
    try:
        for rank, record in enumerate(announced):
            if rank == group.rank and own is not None:
                segments.append(own)
            else:
                pid, fd, peer_cookie = int(record["pid"]), int(record["fd"]), int(record["cookie"])
                segments.append(_native.Segment.open(pid, fd, peer_cookie, num_bytes))
    except RuntimeError as failure:
        error = str(failure)
    # Peers open our file through our descriptor, so it stays open until all have said that they are done.
    mapped = channel.gather({"error": error}, "the peers' memory", timeout_s)
    if own is not None:
        own.close_fd()
    _raise_if_any(group, [str(record["error"]) for record in mapped], num_bytes)
    return Arena(group, segments, _num_local_processes(), num_bytes)


def _raise_if_any(group: Group, errors: list[str], num_bytes: int) -> None:
    failed = [f"rank {rank}: {error}" for rank, error in zip(group.ranks, errors, strict=True) if error]
    if failed:
        raise ArenaError(f"group {group.name!r}: cannot share {num_bytes} bytes per rank: {'; '.join(failed)}")


def _num_local_processes() -> int:
    """Ranks on this host, of all groups: they share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
