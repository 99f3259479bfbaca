"""Buffers for rows that a rank writes to its shared segment for all others to read: two, alternating by epoch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import shm
from weaveopt.fabrics.rows_call import RowsCall
from weaveopt.fabrics.shm import ShmArena
from weaveopt.fabrics.shm_calls import Caller, failure, tag_of
from weaveopt.fabrics.traits import TRAITS
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: shm.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]

NUM_BUFFERS = 2


def buffers_for(num_bytes: int) -> tuple[Buffer, ...]:
    """Both buffers, where a rank puts at most `num_bytes` into one. Raises `WeaveError` without the native module."""
    if _native is None:
        raise WeaveError("weaveopt was installed without its native part, which knows what its kernels need: build it")
    need = _native.partial_need(num_bytes)
    return (Buffer(need.name, need.num_bytes, Lifetime.ARENA, need.fill, TRAITS[Fabric.SHM].buffer_alignment),)


class SharedRows:
    """The buffers of one call in the arena that its group has now."""

    def __init__(self, call: RowsCall, text: str, op: str, num_bytes: int, forget: Callable[[], None]) -> None:
        """`call`, encoded as `text`, of the operator `op`, which puts at most `num_bytes` into a buffer.

        Raises `ArenaError` if no arena was reserved or the call does not fit it.
        """
        self.arena: ShmArena = shm.of(call.group)
        group = self.arena.group
        if len(group.ranks) != call.world:
            raise ArenaError(
                f"site {call.site}: planned for {counted(call.world, 'rank')}, group has {len(group.ranks)}"
            )
        [need] = buffers_for(num_bytes)
        buffer = self.arena.buffer(need.name)
        if buffer.num_bytes < need.num_bytes:
            raise ArenaError(
                f"site {call.site}: its {need.name} of {need.num_bytes} bytes does not fit the arena of group "
                f"{call.group!r}, which has {buffer.num_bytes} bytes for it"
            )
        self.site = _native.RowsSite()
        self.site.tag = tag_of(call.site, text)
        self.site.partial_offset = buffer.offset
        self.site.partial_bytes = buffer.num_bytes // NUM_BUFFERS
        self.site.timeout_s = call.timeout_s
        self.caller = Caller(op, call.site, group, call.timeout_s)
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        count = num_bytes // self.dtype.itemsize
        self._own = tuple(
            self.arena.tensor(buffer.offset + parity * self.site.partial_bytes, (count,), self.dtype)
            for parity in range(NUM_BUFFERS)
        )
        self.arena.at_close(forget)

    def own(self, parity: int, *shape: int) -> torch.Tensor:
        """Return the buffer of `parity` for this rank's rows of the next epoch."""
        count = 1
        for size in shape:
            count *= size
        return self._own[parity][:count].view(shape)

    def failed(self, code: int, status: _native.Status) -> WeaveError:
        return failure(self.caller, code, status)

    def checked(self, x: torch.Tensor, hidden: int, name: str) -> torch.Tensor:
        """`x` as contiguous rows in memory of the host. Raises `WeaveError` for another dtype, size or device."""
        if x.dtype is not self.dtype or x.numel() % hidden:
            raise WeaveError(
                f"site {self.caller.site}: {name} is {tuple(x.shape)} {x.dtype}, expected rows of {hidden} {self.dtype}"
            )
        if not x.is_cpu:
            raise WeaveError(f"site {self.caller.site}: {name} is on {x.device}, the arena in memory of the host")
        return x if x.is_contiguous() else x.contiguous()
