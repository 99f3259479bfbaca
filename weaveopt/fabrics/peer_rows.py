"""Rows that a rank puts into one buffer of the arenas of a group of GPUs, and matrices as their kernels read them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod

import torch

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import peer, watchdog
from weaveopt.fabrics.peer import PeerArena
from weaveopt.fabrics.rows_call import RowsCall
from weaveopt.fabrics.traits import TRAITS
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: peer.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor
VECTOR_BYTES = 16
"""Bytes that a thread moves in one access; rows, results and parameters are aligned to them."""
HIGH_PRIORITY = -1


def buffer_for(name: str, num_bytes: int) -> Buffer:
    """One place for as long as the arena lives: a peer that is a call ahead may write to it."""
    alignment = TRAITS[Fabric.PEER].buffer_alignment
    return Buffer(name, -(-num_bytes // alignment) * alignment, Lifetime.ARENA, None, alignment)


class PeerRows:
    """The buffer of one call in the arena that its group has now."""

    def __init__(self, call: RowsCall, text: str, op: str, need: Buffer, forget: Callable[[], None]) -> None:
        """`call`, encoded as `text`, of the operator `op`.

        Raises `ArenaError` if no arena was reserved or the call does not fit it.
        """
        self.arena: PeerArena = peer.of(call.group)
        group = self.arena.group
        if len(group.ranks) != call.world:
            raise ArenaError(
                f"site {call.site}: planned for {counted(call.world, 'rank')}, group has {len(group.ranks)}"
            )
        if call.max_tokens > watchdog.MAX_TOKENS:
            raise ArenaError(
                f"site {call.site}: {counted(call.max_tokens, 'token')}, the kernels count to {watchdog.MAX_TOKENS}"
            )
        buffer = self.arena.buffer(need.name)
        if buffer.num_bytes < need.num_bytes:
            raise ArenaError(
                f"site {call.site}: its {need.name} of {need.num_bytes} bytes does not fit the arena of group "
                f"{call.group!r}, which has {buffer.num_bytes} bytes for it"
            )
        self.offset, self.num_bytes = self.arena.native_offset(buffer.offset), buffer.num_bytes
        """Offset and size of the buffer; the offset counts from the start of the arena, as in kernels."""
        self._begin = buffer.offset
        # The tag covers the whole call: ranks whose plans differ detect it at the first synchronization.
        self.tag = watchdog.tag_of(zlib.crc32(text.encode()))
        watchdog.name_site(self.tag, watchdog.NamedSite(op, call.site, call.timeout_s))
        self.device = self.arena.device
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        self._site = call.site
        self._where = f"weave::{op} at site {call.site}, group {call.group!r}, rank {group.ranks[group.rank]}"
        self._whole = self.arena.tensor(buffer.offset, (need.num_bytes // self.dtype.itemsize,), self.dtype)
        self.arena.at_close(forget)

    def own(self, *shape: int) -> Tensor:
        """The first rows of this rank's buffer."""
        return self._whole[: prod(shape)].view(shape)

    @contextmanager
    def launching(self) -> Iterator[torch.cuda.Stream]:
        """Around every call: its device is the current one, and this its stream. Raises why nothing can run."""
        self.arena.begin_call()
        before = torch.cuda._exchange_device(self.device)
        try:
            yield torch.cuda.current_stream(self.device)
        finally:
            torch.cuda._maybe_exchange_device(before)

    def check(self, code: int) -> None:
        """Raise the error that a CUDA error code stands for; 0 is success."""
        if code:
            text = _native.cuda_error_text(code)
            watchdog.fail(self.arena, f"{self._where}: a kernel could not be launched: {text}")

    def checked(self, x: Tensor, hidden: int, name: str) -> Tensor:
        """`x` as contiguous rows that begin at multiples of 16 bytes. Raises `WeaveError` for another dtype, size or
        device."""
        if x.dtype is not self.dtype or x.numel() % hidden:
            found = f"{tuple(x.shape)} {x.dtype}"
            raise WeaveError(f"site {self._site}: {name} is {found}, expected rows of {hidden} {self.dtype}")
        if x.device.index != self.device:
            raise WeaveError(f"site {self._site}: {name} is on {x.device}, the arena on cuda:{self.device}")
        if x.is_contiguous() and x.data_ptr() % VECTOR_BYTES == 0:
            return x
        return x.clone(memory_format=torch.contiguous_format)


def aligned_rows(x: Tensor) -> Tensor:
    """A matrix, or a copy of it, whose rows are contiguous and begin at multiples of 16 bytes."""
    stride = x.stride(0) * x.element_size()
    if x.stride(1) == 1 and x.stride(0) >= x.shape[1] and stride % VECTOR_BYTES == x.data_ptr() % VECTOR_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def aligned_vector(x: Tensor) -> Tensor:
    """A vector, or a copy of it, whose elements are contiguous and begin at a multiple of 16 bytes."""
    if x.is_contiguous() and x.data_ptr() % VECTOR_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@cache
def second_stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which a device exchanges rows while a GEMM runs; created before any capture, when the
    first site is bound."""
    return torch.cuda.Stream(device, priority=HIGH_PRIORITY)
