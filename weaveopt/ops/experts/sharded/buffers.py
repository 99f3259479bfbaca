"""The two buffers of a call, on every fabric: rows that ranks push here, and returned results."""

from __future__ import annotations

from typing import Protocol

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime, PlacedBuffer
from weaveopt.records.site import DTYPE_BYTES

try:
    from weaveopt import _native
except ImportError:  # built without it: needed() says so
    _native = None  # type: ignore[assignment]


class HasBuffers(Protocol):
    """An arena."""

    def buffer(self, name: str) -> PlacedBuffer: ...


def needed(call: ExpertExchangeCall, fabric: Fabric) -> tuple[Buffer, ...]:
    """Arena buffers of the call on every rank: dispatch, combine. Raises `WeaveError` without the native module."""
    if _native is None:
        raise WeaveError("weaveopt was installed without its native part, which knows what its kernels need: build it")
    needs_of = _native.gpu_sharded_mixture_needs if fabric is Fabric.PEER else _native.sharded_mixture_needs
    needs = needs_of(call.world, call.max_tokens, call.choices, call.hidden * DTYPE_BYTES[call.dtype])
    alignment = TRAITS[fabric].buffer_alignment
    return tuple(Buffer(need.name, need.num_bytes, Lifetime.ARENA, need.fill, alignment) for need in needs)


def placed(call: ExpertExchangeCall, needs: tuple[Buffer, ...], arena: HasBuffers) -> tuple[int, int]:
    """Offsets of both buffers in `arena`, as its layout counts. Raises `ArenaError` if one does not fit."""
    for need in needs:
        found = arena.buffer(need.name)
        if found.num_bytes < need.num_bytes:
            raise ArenaError(
                f"site {call.site}: its {need.name} of {need.num_bytes} bytes does not fit the arena of group "
                f"{call.group!r}, which has {found.num_bytes} bytes for it"
            )
    dispatch, combine = (arena.buffer(need.name).offset for need in needs)
    return dispatch, combine
