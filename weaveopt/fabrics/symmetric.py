"""Torch's rendezvous of symmetric memory, for groups of any shape.

Torch counts the rendezvous of a process, whatever their group, and names what it exchanges by that count. Ranks of a
group that have met different numbers of times then wait for each other's keys without end (pytorch/pytorch#196082):
first a group of ranks 0 and 1, then one of all, is enough. So ranks tell each other their counts before they meet,
and who is behind catches up by meeting nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
import torch.distributed as dist

_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Handle(Protocol):
    """What torch gives of a rendezvous; peers' memory is mapped as long as it lives."""

    @property
    def rank(self) -> int: ...
    @property
    def buffer_ptrs(self) -> list[int]: ...
    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


_num_met = 0
_kept: list[object] = []
"""Memory and handles of the meetings with nobody: torch forgets a rendezvous with its memory, but not its count."""


def num_met() -> int:
    """How often this process has met others for symmetric memory through this module."""
    return _num_met


def catch_up(to: int) -> None:
    """Meets nobody until `num_met()` is `to`; no other rank takes part."""
    if _num_met >= to:
        return
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    while _num_met < to:
        memory = _little_memory()
        _kept.append((memory, rendezvous(memory, alone)))


def _little_memory() -> torch.Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    device = torch.device("cuda", torch.cuda.current_device())
    return _SymmetricMemory.empty_strided_p2p((16,), (1,), torch.uint8, device)


def rendezvous(memory: torch.Tensor, process_group: dist.ProcessGroup) -> Handle:
    """Torch's handle of `memory`, which keeps the peers' parts mapped. All of the group call it, after catching up."""
    import torch.distributed._symmetric_memory as symmetric

    global _num_met
    _num_met += 1
    with _without_multicast():
        return cast(Handle, symmetric.rendezvous(memory, process_group))


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Torch makes a multicast object for every rendezvous where the GPUs can, which our kernels do not use."""
    before = os.environ.get(_MULTICAST_OFF)
    os.environ[_MULTICAST_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST_OFF]
        else:
            os.environ[_MULTICAST_OFF] = before
