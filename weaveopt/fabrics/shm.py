"""The transport of fabric `shm`: one segment per rank of a process group, of the same layout, mapped by all of them.

CPU ranks of one host; `weaveopt.fabrics.topology` says whether it reaches all ranks. See `weaveopt.fabrics.arena`.
"""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist

from weaveopt.config import variable
from weaveopt.errors import ArenaError
from weaveopt.fabrics import topology as topologies
from weaveopt.fabrics.arenas import Arenas
from weaveopt.fabrics.lasting import lasting_tensors
from weaveopt.fabrics.layout import Layout, expect_equal_layouts, with_room
from weaveopt.fabrics.topology import Group, Payload, RecordExchange, Topology
from weaveopt.records.memory import MemoryPlan, PlacedBuffer
from weaveopt.solver.placement import aligned

try:
    from weaveopt import _native
except ImportError:  # built without it: the library path still works
    _native = None  # type: ignore[assignment]

PAGE_BYTES = 4096
FIRST_EPOCH = 0
"""Initial epoch. Epochs wrap at 2^32, so any value works."""


class ShmArena:
    """The shared memory of one group: this rank's segment, the peers' mapped, and the epoch of the last call."""

    def __init__(self, group: Group, segments: list[_native.Segment], num_processes: int, layout: Layout) -> None:
        self.group = group
        self.layout = layout
        self.num_bytes = _page_aligned(layout.num_bytes)
        self.closed = False
        """Replaced by a larger one, or released: calls that were bound to it must bind again."""
        self._native: _native.Group | None = _native.Group(segments, group.rank, num_processes, FIRST_EPOCH)
        self._own: _native.Segment | None = segments[group.rank]
        with lasting_tensors():
            self._bytes: torch.Tensor | None = torch.frombuffer(self._own, dtype=torch.uint8)
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._at_close: list[Callable[[], None]] = []

    @property
    def native(self) -> _native.Group:
        """Native group for calls into native code. Raises `ArenaError` once closed."""
        if self._native is None:
            raise ArenaError(f"the arena of group {self.group.name!r} was released")
        return self._native

    @property
    def transient_begin(self) -> int:
        """Offset of the transient zone."""
        return self.layout.transient_begin

    def buffer(self, name: str) -> PlacedBuffer:
        """A buffer that lives as long as the arena. Raises `ArenaError` if there is none of that name."""
        return self.layout.buffer(name)

    def at_close(self, callback: Callable[[], None]) -> None:
        """Register `callback` to run when the arena is released: holders of `native` or a view drop it then."""
        self._at_close.append(callback)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of this rank's segment, the same object for the same arguments. Raises `ArenaError` if outside."""
        key = (offset, shape, dtype)
        view = self._views.get(key)
        if view is None:
            end = offset + prod(shape) * dtype.itemsize
            if self._bytes is None or offset < 0 or end > self.num_bytes:
                raise ArenaError(f"bytes [{offset}, {end}) are outside the arena of {self.num_bytes} bytes")
            with lasting_tensors():
                view = self._views[key] = self._bytes[offset:end].view(dtype).view(shape)
        return view

    def close(self) -> None:
        """Release the memory; it is unmapped once the last view of it is gone. Waiting peers are signalled."""
        if self.closed or self._own is None:
            return
        self.closed = True
        self._own.mark_closed()
        for callback in self._at_close:
            callback()
        self._at_close.clear()
        self._views.clear()
        self._own = self._bytes = self._native = None


_arenas = Arenas[ShmArena]("arena")
of, release = _arenas.of, _arenas.release
release_all = atexit.register(_arenas.release_all)


def reserve(topology: Topology, plan: MemoryPlan, floor_bytes: int, timeout_s: float) -> ShmArena:
    """The arena of `topology.group` with room for `plan`, made or made larger if need be.

    All ranks of the group call it at the same point with the same arguments. A larger arena replaces the one there was
    (see `Layout.grown`): calls bind again, contents are lost. It is never below `floor_bytes`. Raises `ArenaError` on
    all ranks if memory is short on one or the plans differ, and `AgreementError` if a rank does not come within
    `timeout_s`.
    """
    name = topology.group.name
    if topology.fake:
        raise ArenaError(f"group {name!r}: no shared memory without peers")
    current = _arenas.current(name)
    channel = topologies.exchange(name, timeout_s)
    arena = grown(current, topology.group, plan, floor_bytes, channel, timeout_s)
    if arena is not current:
        _arenas.put(name, arena, ShmArena.close)
    return arena


def grown(
    current: ShmArena | None,
    group: Group,
    plan: MemoryPlan,
    floor_bytes: int,
    channel: RecordExchange,
    timeout_s: float,
) -> ShmArena:
    """`current` where it has room for `plan`, else one in its place: the caller closes `current` then."""
    return with_room(current, Layout.of(plan, floor_bytes), lambda each: _make(group, each, channel, timeout_s))


def _make(group: Group, layout: Layout, channel: RecordExchange, timeout_s: float) -> ShmArena:
    num_bytes = _page_aligned(layout.num_bytes)
    own: _native.Segment | None = None
    segments: list[_native.Segment] = []
    cookie = secrets.randbits(63)
    error = ""
    try:
        if _native is None:
            raise ArenaError("weaveopt was installed without its native part")
        own = _native.Segment.create(num_bytes, cookie, FIRST_EPOCH, len(group.ranks))
        _fill(own, layout)
    except Exception as failure:  # whatever it is, the others must hear of it
        error = str(failure) or type(failure).__name__
    try:
        record: dict[str, str | int] = {
            "pid": os.getpid(),
            "fd": own.fd if own else -1,
            "cookie": cookie,
            "layout": layout.text(),
        }
        announced = channel.gather({**record, "error": error}, f"an arena of {num_bytes} bytes", timeout_s)
        _raise_if_any(group, announced, num_bytes)
        expect_equal_layouts(group, announced)
        assert own is not None
        try:
            segments += _open_all(group, announced, own, num_bytes)
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        # Peers open our file through our descriptor, so it stays open until all have said that they are done.
        mapped = channel.gather({"error": error}, "the peers' memory", timeout_s)
        _raise_if_any(group, mapped, num_bytes)
        return ShmArena(group, segments, num_local_processes(), layout)
    finally:
        if own is not None:
            own.close_fd()
        # An error keeps this frame, and a program may keep the error: the memory must not live as long.
        own = None
        segments.clear()


def _open_all(
    group: Group, announced: Sequence[Payload], own: _native.Segment, num_bytes: int
) -> list[_native.Segment]:
    """This rank's segment and the peers', in group order."""
    found = []
    for index, (rank, record) in enumerate(zip(group.ranks, announced, strict=True)):
        if index == group.rank:
            found.append(own)
            continue
        try:
            pid, fd, cookie = int(record["pid"]), int(record["fd"]), int(record["cookie"])
            found.append(_native.Segment.open(pid, fd, cookie, num_bytes))
        except RuntimeError as failure:
            raise ArenaError(f"the memory of rank {rank}: {failure}") from None
    return found


def _fill(segment: _native.Segment, layout: Layout) -> None:
    """Initialize the buffers before the first call; peers map the segment later."""
    words = torch.frombuffer(segment, dtype=torch.int32)
    for offset, num_bytes, word in layout.fills():
        words[offset // 4 : (offset + num_bytes) // 4] = word if word < 1 << 31 else word - (1 << 32)


def _raise_if_any(group: Group, answers: Sequence[Payload], num_bytes: int) -> None:
    failed = [f"rank {rank}: {r['error']}" for rank, r in zip(group.ranks, answers, strict=True) if r["error"]]
    if failed:
        raise ArenaError(f"group {group.name!r}: cannot share {num_bytes} bytes per rank: {'; '.join(failed)}")


def _page_aligned(num_bytes: int) -> int:
    return aligned(num_bytes, PAGE_BYTES)


def num_local_processes() -> int:
    """Number of ranks on this host, of all groups: they share its cores. All ranks if the launcher does not say."""
    answers = variable("LOCAL_WORLD_SIZE")
    return int(answers) if answers.isdecimal() and int(answers) > 0 else dist.get_world_size()
