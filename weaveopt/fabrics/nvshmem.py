"""The transport of fabric `nvshmem`: GPUs of several hosts, one arena per rank in NVSHMEM's symmetric heap.

NVSHMEM is started once in a process, by the ranks of the first group that asks for an arena: rank 0 of the group makes
the unique id, which travels through the group's store. Its memory is given out by all of those ranks at once, so
another group of the process has arenas only if it has the same ranks in the same order, and an arena that is outgrown,
or whose process group is gone, stays until the process ends: giving it back would need all ranks at once, too.

Ranks say what speaks against an arena before any of them waits in NVSHMEM. What is left is that a rank dies between
that and its start: NVSHMEM's own waits have no end.
"""

from __future__ import annotations

import base64
import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch

from weaveopt.config import variable
from weaveopt.errors import ArenaError
from weaveopt.fabrics import topology as topologies
from weaveopt.fabrics import watchdog
from weaveopt.fabrics.arenas import Arenas
from weaveopt.fabrics.hosts import Hosts
from weaveopt.fabrics.lasting import lasting_tensors
from weaveopt.fabrics.layout import Layout, expect_equal_layouts, with_room
from weaveopt.fabrics.peer import PeerArena, missing_code, one_line, raise_if_any
from weaveopt.fabrics.topology import Group, Payload, RecordExchange, Topology
from weaveopt.fabrics.traits import TRAITS
from weaveopt.fabrics.watchdog import Process
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import MemoryPlan
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: module() says so before anything here is needed
    _native = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from weaveopt import _nvshmem

_TRAITS = TRAITS[Fabric.NVSHMEM]
_MULTICAST_OFF = "NVSHMEM_DISABLE_NVLS"

_started: tuple[int, ...] = ()
"""The global ranks that started NVSHMEM with this process, in their order there; none: it was not started here."""


class _AllocatedMemory:
    """Memory of another allocator, as torch asks for it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class NvshmemArena(PeerArena):
    """This rank's part of NVSHMEM's heap that a group uses, and the group's hosts."""

    def __init__(
        self, hosts: Hosts, group: Group, device: int, layout: Layout, native: _native.PeerGroup, memory: torch.Tensor,
        peers: Sequence[Process],
    ) -> None:  # fmt: skip
        self.hosts = hosts
        super().__init__(group, device, layout, native, memory, None, peers)


_arenas = Arenas[NvshmemArena]("NVSHMEM arena")
of, release, kept = _arenas.of, _arenas.release, _arenas.kept


def module() -> ModuleType:
    """`weaveopt._nvshmem`. Raises `ImportError` where it was not built or NVSHMEM's library is not found."""
    if not variable(_MULTICAST_OFF):
        os.environ[_MULTICAST_OFF] = "1"  # a multicast object can put the GPUs of a shared host out of service
    return importlib.import_module("weaveopt._nvshmem")


def total_bytes(layout: Layout) -> int:
    """Size of a rank's arena: the header and all buffers."""
    return _TRAITS.header_bytes + layout.num_bytes


def reserve(topology: Topology, plan: MemoryPlan, floor_bytes: int, timeout_s: float) -> NvshmemArena:
    """The arena of `topology.group` with room for `plan`, made or made larger if need be.

    All ranks of the group call it at the same point with the same arguments. Raises `ArenaError` on all ranks if one
    cannot share its memory or asks for other buffers, and `AgreementError` if a rank does not come within `timeout_s`.
    """
    name = topology.group.name
    if topology.fake:
        raise ArenaError(f"group {name!r}: no memory shared by GPUs without peers")
    current = _arenas.current(name)
    asked, channel = Layout.of(plan, floor_bytes - _TRAITS.header_bytes), topologies.exchange(name, timeout_s)
    arena = with_room(current, asked, lambda each: _make(topology, each, channel, timeout_s))
    if arena is not current:
        _arenas.put(name, arena, lambda old: old.unbind())
    return arena


def _obstacle(topology: Topology) -> str:
    """Reason why this rank can make no arena at all; empty if it can."""
    try:
        module()
    except ImportError as error:
        return f"weaveopt was built without NVSHMEM, or cannot load it: {one_line(error)}"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if topology.num_hosts < 2:
        return f"{counted(topology.world, 'rank')} on one host, expected several hosts"
    most = max(len(ranks) for ranks in Hosts.of(topology).ranks)
    if most > _native.MAX_WORLD:
        return f"a host has {counted(most, 'rank')} of the group, expected at most {_native.MAX_WORLD}"
    if torch.cuda.is_current_stream_capturing():
        return "an arena cannot be made while a CUDA graph is captured: call the compiled model once before"
    if _started not in ((), topology.group.ranks):
        return f"NVSHMEM was started by ranks {_started}, and joins no others in this process"
    return ""


def _host(name: str) -> str:
    """Readable name of a host from `topology`: its network name, and `WEAVE_HOST` if that is set."""
    return "/".join(word for word in name.split("/")[:2] if word)


def _announcement(topology: Topology, device: int, layout: Layout) -> Payload:
    properties = torch.cuda.get_device_properties(device)
    own = watchdog.this_process()
    error = missing_code(device, f"{properties.major}{properties.minor}")
    unique_id = ""
    if not error and not _started and topology.group.rank == 0:
        unique_id = base64.b64encode(module().unique_id()).decode()
    return {
        "pid": own.pid,
        "start": own.start,
        "version": str(module().version()),
        "started": str(_started),
        "id": unique_id,
        "layout": layout.text(),
        "error": error,
    }


def _make(topology: Topology, layout: Layout, channel: RecordExchange, timeout_s: float) -> NvshmemArena:
    global _started
    group, num_bytes, device = topology.group, total_bytes(layout), -1
    try:  # reported to all: no rank may wait for what another cannot do
        own: Payload = {"error": _obstacle(topology)}
        if not own["error"]:
            device = torch.cuda.current_device()
            own = _announcement(topology, device, layout)
    except Exception as failure:
        own = {"error": one_line(failure)}
    answers = channel.gather(own, f"an NVSHMEM arena of {num_bytes} bytes", timeout_s)
    raise_if_any(group, answers, num_bytes)
    expect_equal_layouts(group, answers)
    for what in ("version", "started"):
        if len({record[what] for record in answers}) > 1:
            found = "; ".join(f"rank {rank}: {r[what]}" for rank, r in zip(group.ranks, answers, strict=True))
            raise ArenaError(f"group {group.name!r}: NVSHMEM differs ({what}: {found})")
    hosts = Hosts.of(topology)
    native: _native.PeerGroup | None = None
    memory: torch.Tensor | None = None
    error = ""
    try:
        if not _started:
            module().start(group.rank, topology.world, base64.b64decode(str(answers[0]["id"])), device)
            _started = group.ranks
        made: _nvshmem.NvshmemGroup = module().NvshmemGroup(device, num_bytes, [_host(name) for name in topology.hosts])
        with lasting_tensors():
            memory = torch.as_tensor(_AllocatedMemory(made.address, num_bytes), device=torch.device("cuda", device))
        unmapped = [topology.group.ranks[rank] for rank in hosts.ranks[hosts.own] if not made.is_direct(rank)]
        if unmapped:
            raise ArenaError(f"the memory of ranks {unmapped} of the same host is not mapped here")
        native = cast("_native.PeerGroup", made)  # the arena asks for no more than both have
    except Exception as failure:
        error = one_line(failure)
    # Only now may anyone write to a peer: all have cleared their own.
    raise_if_any(group, channel.gather({"error": error}, "NVSHMEM's memory", timeout_s), num_bytes)
    assert native is not None and memory is not None
    peers = [Process(int(record["pid"]), str(record["start"])) for record in answers]
    return NvshmemArena(hosts, group, device, layout, native, memory, peers)
