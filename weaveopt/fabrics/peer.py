"""The transport of fabrics `peer` and `multimem`: GPUs of one host, one arena per rank of a group, mapped by all peers.

See `weaveopt.fabrics.arena`. An arena that is replaced by a larger one is given back, unless a CUDA graph was captured
with it: the graph holds its addresses, and its owner is not known here, so such an arena stays as long as the
process group.

A rank gives its part back while peers may still store into it: their signals for a call that is over here already.
Those stores hit memory that is still there. A rank's part is one allocation (cuMemCreate) that every peer has imported
and mapped, and it lives until the last of them has unmapped it, which each does after waiting for its own kernels
(torch's AllocationRef synchronizes the device first). That wait ends: ranks synchronized to make the larger arena, so
all of them have launched every call of the old one. The memory itself comes from torch's symmetric memory (backend
CUDA). For plans on `multimem` torch maps it by NVLink multicast too, and the arena's first calls are checked
(`weaveopt.fabrics.multicast`); for others, and where `TORCH_SYMM_MEM_DISABLE_MULTICAST` is set, nothing here makes a
multicast object. Once an arena of a group has the mapping, larger ones have it as well: calls are bound again to them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable, Sequence
from math import prod

import torch

from weaveopt.config import variable
from weaveopt.errors import ArenaError, MulticastError, WeaveError
from weaveopt.fabrics import multicast, symmetric, watchdog
from weaveopt.fabrics import topology as topologies
from weaveopt.fabrics.arenas import Arenas
from weaveopt.fabrics.lasting import lasting_tensors
from weaveopt.fabrics.layout import Layout, expect_equal_layouts, with_room
from weaveopt.fabrics.topology import Group, Payload, RecordExchange, Topology
from weaveopt.fabrics.traits import TRAITS
from weaveopt.fabrics.watchdog import Process
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import MemoryPlan, PlacedBuffer
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: reserve() says so
    _native = None  # type: ignore[assignment]

_TRAITS = TRAITS[Fabric.PEER]
_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")


class PeerArena:
    """The memory that one group shares: this rank's part, where the peers' parts are mapped, and why it failed."""

    def __init__(
        self, group: Group, device: int, layout: Layout, native: _native.PeerGroup, memory: torch.Tensor,
        handle: object, peers: Sequence[Process], multicast: bool = False,
    ) -> None:  # fmt: skip
        self.group = group
        self.device = device
        self.layout = layout
        self.native = native
        self.peers = tuple(peers)
        """The process of every rank."""
        self.multicast = multicast
        """True if all ranks' parts are mapped by NVLink multicast too."""
        self.error: WeaveError | None = None
        """Why nothing can run here any more; every later call raises it."""
        self.closed = False
        self.captured = False
        """A CUDA graph was captured with it: it may be replayed at any time."""
        self._memory: torch.Tensor | None = memory
        self._handle: object | None = handle
        self._at_close: list[Callable[[], None]] = []
        watchdog.watch(self)

    @property
    def num_bytes(self) -> int:
        return total_bytes(self.layout)

    @property
    def transient_begin(self) -> int:
        """Offset of the transient zone from the end of the header."""
        return self.layout.transient_begin

    def buffer(self, name: str) -> PlacedBuffer:
        """A buffer that lives as long as the arena. Raises `ArenaError` if there is none of that name."""
        return self.layout.buffer(name)

    def native_offset(self, offset: int) -> int:
        """Convert `offset` from the end of the header to kernels' offsets, which count from the start of the arena."""
        return _TRAITS.header_bytes + offset

    def begin_call(self) -> None:
        """Prepare a launch that uses addresses of the arena; called before each. Raises the arena's error if it has
        one."""
        if self.error is not None:
            watchdog.raise_again(self.error)
        if not self.captured and torch.cuda.is_current_stream_capturing():
            self.captured = True

    def at_close(self, callback: Callable[[], None]) -> None:
        """Register `callback` to run when the arena is released or replaced, so that calls bound to it bind again."""
        self._at_close.append(callback)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of this rank's part, starting `offset` bytes after the header. Raises `ArenaError` if
        outside."""
        begin = self.native_offset(offset)
        end = begin + prod(shape) * dtype.itemsize
        if self._memory is None or offset < 0 or end > self.num_bytes:
            raise ArenaError(f"bytes [{begin}, {end}) are outside the arena of {self.num_bytes} bytes")
        with lasting_tensors():
            return self._memory[begin:end].view(dtype).view(shape)

    def unbind(self) -> None:
        """Sites let go of it; the memory stays, for graphs that were captured before."""
        for callback in self._at_close:
            callback()
        self._at_close.clear()

    def close(self) -> None:
        """Gives the memory back. No captured graph that used it may be replayed afterwards."""
        if self.closed:
            return
        self.closed = True
        self.unbind()
        watchdog.forget(self)
        if self.error is not None:
            self.keep()
        self._memory = self._handle = None

    def keep(self) -> None:
        """Keep the memory until the process ends, which frees it.

        Nothing on this device can be freed any more after a trap, and trying ends the process with an abort; while a
        kernel waits for a peer, freeing would wait for the kernel.
        """
        for kept in (self._memory, self._handle, self.native):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_arenas = Arenas[PeerArena]("GPU arena")
of, release, kept = _arenas.of, _arenas.release, _arenas.kept


def retire(arena: PeerArena) -> None:
    """One that was captured stays: its graphs may be replayed at any time, until the group's arenas are released."""
    arena.unbind()
    if not arena.captured and arena.error is None:
        torch.cuda.synchronize(arena.device)
        arena.close()


def total_bytes(layout: Layout) -> int:
    """Size of a rank's arena: the header and all buffers."""
    return _TRAITS.header_bytes + layout.num_bytes


def reserve(topology: Topology, plan: MemoryPlan, floor_bytes: int, timeout_s: float) -> PeerArena:
    """The arena of `topology.group` with room for `plan`, made or made larger if need be.

    All ranks of the group call it at the same point with the same arguments. A larger arena holds what the old one held
    and more (see `Layout.grown`); the old one stays alive only for graphs that were captured with it. None is below
    `floor_bytes`, its header included. Raises `ArenaError` on all ranks if one cannot share its memory or asks for
    other buffers, or during a CUDA-graph capture, `MulticastError` on all where a plan on `multimem` cannot be served,
    and `AgreementError` if a rank does not come within `timeout_s`.
    """
    name = topology.group.name
    if topology.fake:
        raise ArenaError(f"group {name!r}: no memory shared by GPUs without peers")
    current = _arenas.current(name)
    asked, channel = Layout.of(plan, floor_bytes - _TRAITS.header_bytes), topologies.exchange(name, timeout_s)
    by_multicast = plan.fabric is Fabric.MULTIMEM or (current is not None and current.multicast)
    fitting = current
    if by_multicast:
        asked = multicast.with_first_calls(asked, topology.group)
        if current is not None and not current.multicast:
            asked, fitting = current.layout.union(asked), None
    try:
        arena = with_room(fitting, asked, lambda each: _make(topology, each, channel, timeout_s, by_multicast))
    except MulticastError as error:
        if plan.fabric is Fabric.MULTIMEM:
            raise
        raise ArenaError(f"earlier graphs of the group use it, so a larger arena needs it: {error}") from error
    if arena is not current:
        _arenas.put(name, arena, retire)
    return arena


@atexit.register
def _keep_all() -> None:
    for arena in _arenas:
        arena.keep()


def obstacle(topology: Topology, fabric: Fabric) -> str:
    """Reason why this rank can make no arena of GPUs at all, on a fabric within a host; empty if it can."""
    if _native is None or not _native.has_cuda:
        return "weaveopt was built without CUDA; install it again where nvcc is found, with WEAVE_CUDA=1"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if topology.num_hosts > 1:
        return f"its ranks run on {counted(topology.num_hosts, 'host')}"
    most = TRAITS[fabric].max_world
    if topology.world < 2 or (most is not None and topology.world > most):
        return f"{counted(topology.world, 'rank')}, expected 2 to {most}"
    if torch.cuda.is_current_stream_capturing():
        return (
            "an arena cannot be made while a CUDA graph is captured: call the compiled model once, or "
            f"weaveopt.fabrics.{fabric.value}.reserve(), before the capture"
        )
    return ""


def _make(
    topology: Topology, layout: Layout, channel: RecordExchange, timeout_s: float, by_multicast: bool = False
) -> PeerArena:
    group = topology.group
    if by_multicast:
        multicast.expect_allowed(group, timeout_s)
    num_bytes = total_bytes(layout)
    device = -1
    try:  # reported to all: no rank may wait for what another cannot do
        own: Payload = {"error": obstacle(topology, Fabric.PEER) or symmetric.failed()}
        if not own["error"]:
            device = torch.cuda.current_device()
            own = _announcement(device, layout)
    except Exception as failure:
        own = {"error": one_line(failure)}
    answers = channel.gather(own, f"a GPU arena of {num_bytes} bytes", timeout_s)
    raise_if_any(group, answers, num_bytes)
    expect_equal_layouts(group, answers)
    alike = (
        ("GPUs differ (compute capability", "kind"),
        ("folders for temporary files differ (TMPDIR:", "tmp"),
    )
    expect_alike(group, answers, alike)
    peers = [Process(int(record["pid"]), str(record["start"])) for record in answers]

    memory: torch.Tensor | None = None
    native: _native.PeerGroup | None = None
    handle = None
    pointer = 0
    error = ""
    try:
        symmetric.catch_up(max(int(record["rendezvous"]) for record in answers))
        memory = _allocate(num_bytes, device)
    except Exception as failure:  # whatever it is, the others must hear of it
        error = one_line(failure)
    # Before torch's own exchange, which a rank that could not allocate would never join.
    raise_if_any(group, channel.gather({"error": error}, "its memory", timeout_s), num_bytes)
    assert memory is not None
    try:
        # The others wait `timeout_s` for what came of it, so it must end before.
        handle, bases = _exchange(memory, group, min(symmetric.RENDEZVOUS_S, timeout_s / 2), by_multicast)
        pointer = symmetric.multicast_pointer(handle) if by_multicast else 0
        fills = [(_TRAITS.header_bytes + offset, length, word) for offset, length, word in layout.fills()]
        native = _native.PeerGroup(bases, pointer, group.rank, device, num_bytes, fills)
        torch.cuda.synchronize(device)
    except Exception as failure:
        error = one_line(failure)
    # Only now may anyone write to a peer: all have cleared their own.
    raise_if_any(group, channel.gather({"error": error}, "the peers' memory", timeout_s), num_bytes)
    assert native is not None
    if by_multicast:
        why = "" if pointer else "torch made no multicast mapping"
        multicast.expect(group, channel, why, "its multicast mapping", timeout_s)
    arena = PeerArena(group, device, layout, native, memory, handle, peers, by_multicast)
    if by_multicast:
        try:
            multicast.check(arena, channel, timeout_s)
        except WeaveError:
            arena.close()
            raise
    return arena


def _announcement(device: int, layout: Layout) -> Payload:
    num_bytes = total_bytes(layout)
    properties = torch.cuda.get_device_properties(device)
    own = watchdog.this_process()
    error = missing_code(device, f"{properties.major}{properties.minor}")
    if not error and torch.cuda.mem_get_info(device)[0] < num_bytes:
        torch.cuda.empty_cache()  # what torch keeps for later is free as well
        free = torch.cuda.mem_get_info(device)[0]
        if free < num_bytes:
            error = f"{free} bytes are free on cuda:{device}"
    return {
        "device": str(getattr(properties, "uuid", f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{device}")),
        # Kernels pair their CTAs with those of peers, and there are as many as the GPU has processors.
        "kind": f"{properties.major}.{properties.minor} with {properties.multi_processor_count} processors",
        "pid": own.pid,
        "start": own.start,
        "rendezvous": symmetric.num_rendezvous(),
        # Directory in which torch's ranks look for each other's sockets.
        "tmp": next(filter(None, map(variable, _TEMPORARY)), "/tmp"),
        "layout": layout.text(),
        "error": error,
    }


def missing_code(device: int, arch: str) -> str:
    """Error text if this build has no kernels for the GPU's architecture; empty if it has."""
    if _native.has_code(device):
        return ""
    return (
        f"weaveopt was built for CUDA architectures {_native.CUDA_ARCHS}, and cuda:{device} is sm_{arch}: "
        f"install it again with WEAVE_CUDA_ARCHS={arch}"
    )


def _allocate(num_bytes: int, device: int) -> torch.Tensor:
    return symmetric.allocate((num_bytes,), (1,), torch.uint8, torch.device("cuda", device))


def _exchange(
    memory: torch.Tensor, group: Group, timeout_s: float, by_multicast: bool
) -> tuple[symmetric.Handle, list[int]]:
    """Torch's handle, which keeps the peers' memory mapped, and where each rank's is."""
    handle = symmetric.rendezvous(memory, topologies.process_group(group.name), timeout_s, by_multicast)
    bases = [int(pointer) for pointer in handle.buffer_ptrs]
    if bases[group.rank] != memory.data_ptr() or handle.rank != group.rank:
        raise ArenaError(
            f"torch's symmetric memory puts rank {handle.rank} at {bases[handle.rank]:#x}, "
            f"expected rank {group.rank} at {memory.data_ptr():#x}"
        )
    return handle, bases


def expect_alike(group: Group, answers: Sequence[Payload], alike: Sequence[tuple[str, str]]) -> None:
    """Check that ranks announced equal values of each key of `alike`, named by its words, and GPUs of their own.

    Raises `ArenaError` if not.
    """
    for what, key in alike:
        if len({record[key] for record in answers}) > 1:
            found = "; ".join(f"rank {rank}: {r[key]}" for rank, r in zip(group.ranks, answers, strict=True))
            raise ArenaError(f"group {group.name!r}: its {what} {found})")
    owners: dict[str, int] = {}
    for rank, record in zip(group.ranks, answers, strict=True):
        other = owners.setdefault(str(record["device"]), rank)
        if other != rank:
            raise ArenaError(
                f"group {group.name!r}: ranks {other} and {rank} both use GPU {record['device']}; give every rank its "
                "own, with torch.cuda.set_device(local_rank) before the first call"
            )


def raise_if_any(group: Group, answers: Sequence[Payload], num_bytes: int) -> None:
    """Raise `ArenaError` with the texts that ranks reported under `error`, if there are any."""
    failed = [f"rank {rank}: {r['error']}" for rank, r in zip(group.ranks, answers, strict=True) if r["error"]]
    if failed:
        raise ArenaError(
            f"group {group.name!r}: cannot share {num_bytes} bytes of GPU memory per rank: {'; '.join(failed)}"
        )


def one_line(failure: Exception) -> str:
    """The first line of what went wrong."""
    lines = str(failure).strip().splitlines()
    return lines[0] if lines else type(failure).__name__
