"""The transport of fabric `host`: GPUs of one host that do not reach each other's memory share memory of the host.

See `weaveopt.fabrics.arena`. Each rank makes one segment, a memfd without a name whose pages are on the memory node of
its GPU; every rank maps all segments and registers them with the driver (cudaHostRegister), which locks their pages
and maps them for its GPU. A rank's kernels read its own segment and write to those of its peers, so what is polled is
on the reader's side. `csrc/fabric/host.h` says what kernels may do with them.

A segment lives until the last process that maps it has unmapped it, and each unmaps after its own kernels have ended.
So a peer's late store finds the memory still there, and nothing is left when processes die: neither a name nor a page.
Limits (the control group's memory, locked memory, /proc/<pid>/fd of a peer) are answers: all ranks leave the graph.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Sequence

import torch

from weaveopt.config import variable
from weaveopt.errors import ArenaError
from weaveopt.fabrics import gpus, watchdog
from weaveopt.fabrics import topology as topologies
from weaveopt.fabrics.arenas import Arenas
from weaveopt.fabrics.lasting import lasting_tensors
from weaveopt.fabrics.layout import Layout, expect_equal_layouts, with_room
from weaveopt.fabrics.peer import PeerArena, expect_alike, missing_code, obstacle, one_line, retire
from weaveopt.fabrics.shm import PAGE_BYTES
from weaveopt.fabrics.topology import Group, Payload, RecordExchange, Topology
from weaveopt.fabrics.traits import TRAITS
from weaveopt.fabrics.watchdog import Process
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import MemoryPlan
from weaveopt.solver.placement import aligned

try:
    from weaveopt import _native
except ImportError:  # built without it: reserve() says so
    _native = None  # type: ignore[assignment]

_TRAITS = TRAITS[Fabric.HOST]


class HostArena(PeerArena):
    """The memory that one group shares: this rank's segment, and those of its peers, mapped for this rank's GPU.

    `tensor` returns views on the CPU.
    """


_arenas = Arenas[HostArena]("arena in memory of the host")
of, release, kept = _arenas.of, _arenas.release, _arenas.kept


def total_bytes(layout: Layout) -> int:
    """Size of a rank's segment: the header and all buffers, in whole pages."""
    return aligned(_TRAITS.header_bytes + layout.num_bytes, PAGE_BYTES)


def reserve(topology: Topology, plan: MemoryPlan, floor_bytes: int, timeout_s: float) -> HostArena:
    """The arena of `topology.group` with room for `plan`, made or made larger if need be.

    All ranks of the group call it at the same point with the same arguments. The old one stays alive only for CUDA
    graphs that were captured with it. None is below `floor_bytes`, its header included. Raises `ArenaError` on all
    ranks if one cannot share or register its memory or asks for other buffers, or during a CUDA-graph capture, and
    `AgreementError` if a rank does not come within `timeout_s`.
    """
    name = topology.group.name
    if topology.fake:
        raise ArenaError(f"group {name!r}: no memory shared by GPUs without peers")
    current = _arenas.current(name)
    asked, channel = Layout.of(plan, floor_bytes - _TRAITS.header_bytes), topologies.exchange(name, timeout_s)
    arena = with_room(current, asked, lambda each: _make(topology, each, channel, timeout_s))
    if arena is not current:
        _arenas.put(name, arena, retire)
    return arena


@atexit.register
def _keep_all() -> None:
    for arena in _arenas:
        arena.keep()


def _obstacle(topology: Topology) -> str:
    """Reason why this rank can make no arena at all; empty if it can."""
    return obstacle(topology, Fabric.HOST) or gpus.why_no_host_memory(torch.cuda.current_device())


def _make(topology: Topology, layout: Layout, channel: RecordExchange, timeout_s: float) -> HostArena:
    group, num_bytes, device = topology.group, total_bytes(layout), -1
    own: _native.Segment | None = None
    segments: list[_native.Segment] = []
    cookie = secrets.randbits(63)
    try:
        try:  # reported to all: no rank may wait for what another cannot do
            announced: Payload = {"error": _obstacle(topology)}
            if not announced["error"]:
                device = torch.cuda.current_device()
                own = _segment(num_bytes, cookie, layout, len(group.ranks), device)
                announced = _announcement(device, own, cookie, layout)
        except Exception as failure:
            announced = {"error": one_line(failure)}
        answers = channel.gather(announced, f"an arena of {num_bytes} bytes in memory of the host", timeout_s)
        _raise_if_any(group, answers, num_bytes)
        expect_equal_layouts(group, answers)
        expect_alike(group, answers, (("GPUs differ (compute capability", "kind"),))
        assert own is not None
        error, native = "", None
        try:
            segments += _open_all(group, answers, own, num_bytes)
            native = _native.HostGroup(segments, group.rank, device)
        except Exception as failure:  # whatever it is, the others must hear of it
            error = one_line(failure)
        # Only now may anyone write to a peer. Peers open our file through our descriptor: it stays open until then.
        _raise_if_any(group, channel.gather({"error": error}, "the peers' memory", timeout_s), num_bytes)
        assert native is not None
        with lasting_tensors():
            memory = torch.frombuffer(own, dtype=torch.uint8)
        peers = [Process(int(record["pid"]), str(record["start"])) for record in answers]
        return HostArena(group, device, layout, native, memory, tuple(segments), peers)
    finally:
        if own is not None:
            own.close_fd()
        # An error keeps this frame, and a program may keep the error: the memory must not live as long.
        own = native = None
        segments.clear()


def _segment(num_bytes: int, cookie: int, layout: Layout, world: int, device: int) -> _native.Segment:
    """This rank's segment, cleared and filled, on the memory node of its GPU where the system allows that."""
    node = gpus.memory_node(device)
    # Not in /dev/shm: containers often have 64 MiB of it, which NCCL needs where GPUs have no peer access.
    segment = _native.Segment.create(num_bytes, cookie, 0, world, in_dev_shm=False, node=node)
    words = torch.frombuffer(segment, dtype=torch.int32)
    for offset, size, word in layout.fills():
        begin = (_TRAITS.header_bytes + offset) // 4
        words[begin : begin + size // 4] = word if word < 1 << 31 else word - (1 << 32)
    return segment


def _announcement(device: int, segment: _native.Segment, cookie: int, layout: Layout) -> Payload:
    properties = torch.cuda.get_device_properties(device)
    own = watchdog.this_process()
    return {
        "device": str(getattr(properties, "uuid", f"{variable('CUDA_VISIBLE_DEVICES')}:{device}")),
        # Kernels pair their CTAs with those of peers, and there are as many as the GPU has processors.
        "kind": f"{properties.major}.{properties.minor} with {properties.multi_processor_count} processors",
        "pid": own.pid,
        "start": own.start,
        "fd": segment.fd,
        "cookie": cookie,
        "layout": layout.text(),
        "error": missing_code(device, f"{properties.major}{properties.minor}"),
    }


def _open_all(group: Group, answers: Sequence[Payload], own: _native.Segment, num_bytes: int) -> list[_native.Segment]:
    """This rank's segment and the peers', in group order."""
    found = []
    for index, (rank, record) in enumerate(zip(group.ranks, answers, strict=True)):
        if index == group.rank:
            found.append(own)
            continue
        try:
            pid, fd, cookie = int(record["pid"]), int(record["fd"]), int(record["cookie"])
            found.append(_native.Segment.open(pid, fd, cookie, num_bytes))
        except RuntimeError as failure:
            raise ArenaError(f"the memory of rank {rank}: {failure}") from None
    return found


def _raise_if_any(group: Group, answers: Sequence[Payload], num_bytes: int) -> None:
    failed = [f"rank {rank}: {r['error']}" for rank, r in zip(group.ranks, answers, strict=True) if r["error"]]
    if failed:
        raise ArenaError(
            f"group {group.name!r}: cannot share {num_bytes} bytes of host memory per rank: {'; '.join(failed)}"
        )
