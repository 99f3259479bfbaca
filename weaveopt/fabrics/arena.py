"""Symmetric memory of a process group: one arena on every rank, of the same layout, mapped by all of them.

It is reserved when ranks bind a compiled graph, from the graph's memory plan; from then on nothing allocates and
nothing is exchanged. Operations find their buffers by name, and what lives only for a while in the transient zone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from weaveopt.errors import ArenaError
from weaveopt.fabrics import host, nvshmem, peer, shm, tcp
from weaveopt.fabrics.topology import Group, Topology
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import MemoryPlan, PlacedBuffer


class Arena(Protocol):
    """The symmetric memory of one group, as one rank sees it. Offsets count from the end of the header."""

    @property
    def group(self) -> Group: ...

    @property
    def num_bytes(self) -> int:
        """Size of this rank's part, header included."""
        ...

    @property
    def transient_begin(self) -> int:
        """Offset of the transient zone."""
        ...

    def buffer(self, name: str) -> PlacedBuffer:
        """A buffer that lives as long as the arena. Raises `ArenaError` if there is none of that name."""
        ...

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of this rank's part. Raises `ArenaError` if outside."""
        ...

    def at_close(self, callback: Callable[[], None]) -> None:
        """Register `callback` to run when the arena is released or replaced, so that operations bound to it bind
        again."""
        ...

    def close(self) -> None:
        """Gives the memory back."""
        ...


class Transport(Protocol):
    """Interface of a fabric's arenas: how they are reserved, found and released."""

    def reserve(self, topology: Topology, plan: MemoryPlan, floor_bytes: int, timeout_s: float) -> Arena:
        """The arena of `topology.group` with room for `plan`, made or made larger if need be.

        All ranks of the group call it at the same point with the same arguments. An arena that is made larger has,
        buffer by buffer, what it had or what `plan` asks for, and twice what was too little (`Layout.grown`). It is
        never below `floor_bytes`, its header included. Raises `ArenaError` on all ranks if one of them cannot share its
        memory or asks for something else, and `AgreementError` if a rank does not come within `timeout_s`.
        """
        ...

    def of(self, group_name: str) -> Arena:
        """The arena that was reserved for the group last. Raises `ArenaError` if there is none."""
        ...

    def release(self, group_name: str) -> None:
        """Gives the group's arenas back, if there are any."""
        ...


_TRANSPORTS: Mapping[Fabric, Transport] = MappingProxyType({
    Fabric.SHM: shm, Fabric.TCP: tcp, Fabric.PEER: peer, Fabric.MULTIMEM: peer, Fabric.HOST: host,
    Fabric.NVSHMEM: nvshmem,
})  # fmt: skip
"""The modules that have an arena."""


def transport(fabric: Fabric) -> Transport:
    """The transport of `fabric`. Raises `ArenaError` if it has none."""
    found = _TRANSPORTS.get(fabric)
    if found is None:
        known = ", ".join(sorted(each.value for each in _TRANSPORTS))
        raise ArenaError(f"fabric {fabric.value} has no arena in this version (those that have one: {known})")
    return found
