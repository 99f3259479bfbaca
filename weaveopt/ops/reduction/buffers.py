"""Named buffers of symmetric memory that calls of this family need, from the formulas of the native kernels.

| fabric | buffer | lifetime | who writes it when, and why it may |
|---|---|---|---|
| shm | `partial` (two, by parity of the epoch) | arena | its owner: peers read the other one in the call before |
| shm | `output` | call | its owner, once every peer's data of this call is there; peers read it within the call |
| GPUs | `mailboxes` (two, in turn) | arena | peers; the owner empties what it reads, and the one it emptied is next |
| GPUs | `staging` | arena | peers, each its own slots, once the owner is through the call before |
| GPUs | `output` | arena | peers, finished rows; normalized rows may stay there until the next call of the group |
| GPUs | `partial` | call | its owner: peers read it within the call (transfer `direct`) |
| nvshmem | `host_inbox`, `host_row_inbox` (halves) | arena | other ranks, once the call before last has ended |
| nvshmem | `host_outbox`, `host_row_outbox` (halves) | arena | the owner, once peers have read the previous contents |
| nvshmem | `host_flags` (halves) | arena | other ranks, after the rows; larger numbers every time |
| nvshmem | `host_sums` | arena | its owner, and only its own threads read it |

Halves: two, that calls use in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.topology import Group
from weaveopt.fabrics.traits import TRAITS, arena_fabric, header_bytes
from weaveopt.ops.reduction.call import FEATURES, ReductionCall
from weaveopt.ops.reduction.native import host_transfer, kernel_name, out_kind
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime, MemoryPlan, PlacedBuffer
from weaveopt.solver.placement import PlacementRequest, arena_bytes, place
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: buffers_of() says so
    _native = None  # type: ignore[assignment]

PARTIAL, OUTPUT, MAILBOXES, STAGING = "partial", "output", "mailboxes", "staging"
HOST_BUFFERS = ("host_inbox", "host_outbox", "host_row_inbox", "host_row_outbox", "host_flags", "host_sums")
"""Buffers of kernels between GPUs of several hosts."""
BUFFERS = (PARTIAL, OUTPUT, MAILBOXES, STAGING, *HOST_BUFFERS)
NUM_PARTIALS = 2
"""Number of `partial` buffers on shm: one for calls of even epochs, one for odd."""


@dataclass(frozen=True)
class RowFormat:
    """Format of the rows that a site reduces and returns, and the number of ranks."""

    hidden: int
    dtype: str
    out_dtype: str
    """Dtype of normalized rows."""
    world: int
    """Ranks that share memory: those of one host."""
    hosts: int = 1


@dataclass(frozen=True)
class ByteRange:
    """Bytes of an arena, counted from the end of its header."""

    offset: int
    num_bytes: int


def buffers_of(
    fabric: Fabric, rows: RowFormat, max_tokens: int, table: Sequence[KernelRow] = (), begun: bool = False
) -> tuple[Buffer, ...]:
    """Arena buffers on every rank for calls of up to `max_tokens` tokens on `fabric`, by any kernel of `table`.

    Those of calls that are `begun` are of the communication stream's channel: none is shared with calls in line.
    The sum may be returned full-size, and normalized rows may have scales of their own. Raises `WeaveError` without the
    native module, whose formulas these are.
    """
    if _native is None:
        raise WeaveError("weaveopt was installed without its native part, which knows what its kernels need: build it")
    largest: dict[str, Buffer] = {}
    for need in _needs(fabric, rows, max_tokens, table):
        name, own = buffer_name(need.name, fabric, begun), owns_buffers(fabric, begun)
        # What lives for a call would be another site's while the call is in flight.
        lifetime = Lifetime.ARENA if need.per_arena or own else Lifetime.CALL
        buffer = Buffer(name, need.num_bytes, lifetime, need.fill, TRAITS[fabric].buffer_alignment)
        known = largest.get(name, buffer)
        largest[name] = known if known.num_bytes > buffer.num_bytes else buffer
    return tuple(largest[name] for name in sorted(largest))


def owns_buffers(fabric: Fabric, begun: bool) -> bool:
    """True if calls in flight have buffers of their own: on CPU ranks a call in line waits for those in flight."""
    return begun and TRAITS[fabric].device == "cuda"


def communication_channel() -> int:
    """Channel of the calls on the communication stream, the same in all graphs: it belongs to their buffers, which are
    the same in all graphs too."""
    return _native.NUM_CHANNELS - 1


def buffer_name(name: str, fabric: Fabric, begun: bool) -> str:
    """Name of a kernel's buffer in the arena."""
    return f"{name} in flight" if owns_buffers(fabric, begun) else name


def _needs(
    fabric: Fabric, rows: RowFormat, max_tokens: int, table: Sequence[KernelRow]
) -> Sequence[_native.BufferNeed]:
    dtype = getattr(_native.DType, rows.dtype)
    if TRAITS[fabric].device == "cpu":
        return _native.shm_buffers(max_tokens, rows.hidden, dtype, getattr(_native.DType, rows.out_dtype), rows.world)
    if fabric is Fabric.NVSHMEM:
        kernels = table or [KernelRow(max_tokens, Algorithm.DOUBLING, Transfer.PACKET)]
        return [
            need
            for row in kernels
            for need in _native.host_buffers(
                host_transfer(row), min(max_tokens, row.max_tokens), rows.hidden, rows.hosts, rows.world
            )
        ]
    return [need for row in table for need in _needs_of_row(rows, row)]


def _needs_of_row(rows: RowFormat, row: KernelRow) -> Sequence[_native.BufferNeed]:
    dtype = getattr(_native.DType, rows.dtype)
    if row.transfer is Transfer.TILES:
        return _native.product_buffers(row.max_tokens, rows.hidden, dtype, rows.world)
    kernel, kind = getattr(_native.GpuKernel, kernel_name(row)), out_kind(rows.dtype, rows.out_dtype)
    return _native.gpu_buffers(kernel, row.max_tokens, rows.hidden, dtype, kind, rows.world)


def buffers_of_call(call: ReductionCall) -> tuple[Buffer, ...]:
    """Arena buffers of the call on every rank; none if the library runs it."""
    if call.fabric not in FEATURES:
        return ()
    rows = RowFormat(call.hidden, call.dtype, call.out_dtype, call.world // call.hosts, call.hosts)
    return buffers_of(call.fabric, rows, call.max_tokens, call.table, call.begun)


def wiring_of(fabric: Fabric, table: Sequence[KernelRow]) -> tuple[str, ...]:
    """The exchanges that say which hosts have to be connected; none on fabrics within one host."""
    return tuple(sorted({row.algorithm.value for row in table})) if TRAITS[fabric].crosses_hosts else ()


def placed_call(call: ReductionCall, placed: Mapping[str, PlacedBuffer]) -> ReductionCall:
    """`call` with the places that its plan gives its transient buffers, by name."""
    at = {name: b.offset_in_zone for name, b in placed.items() if b.lifetime is not Lifetime.ARENA}
    return replace(call, partial_offset=at.get(PARTIAL, 0), output_offset=at.get(OUTPUT, 0))


def memory_plan(group: str, calls: Sequence[ReductionCall]) -> MemoryPlan:
    """The plan of calls that follow one another in `group`, for use without a graph: transient buffers are
    at offset 0."""
    requests = [
        PlacementRequest(call.site, buffer, index, index)
        for index, call in enumerate(calls)
        for buffer in buffers_of_call(call)
    ]
    placed = place(requests)
    fabric = arena_fabric(call.fabric for call in calls if call.fabric in FEATURES)
    wiring = sorted({name for call in calls for name in wiring_of(call.fabric, call.table)})
    return MemoryPlan(group, fabric, header_bytes(fabric) + arena_bytes(placed), placed, wiring=tuple(wiring))


def locate(call: ReductionCall, layout: Layout) -> dict[str, ByteRange]:
    """Ranges of the call's buffers in an arena of `layout`, by the kernels' names. Raises `ArenaError` if one does not
    fit."""
    transient = {PARTIAL: call.partial_offset, OUTPUT: call.output_offset}
    names = {buffer_name(name, call.fabric, call.begun): name for name in BUFFERS}
    found = {}
    for need in buffers_of_call(call):
        if need.lifetime is Lifetime.ARENA:
            buffer = layout.buffer(need.name)
            at = ByteRange(buffer.offset, buffer.num_bytes)
        else:
            offset = layout.transient_begin + transient[need.name]
            at = ByteRange(offset, layout.num_bytes - offset)
        if at.num_bytes < need.num_bytes:
            raise ArenaError(
                f"site {call.site}: its {need.name} of {need.num_bytes} bytes does not fit the arena of group "
                f"{call.group!r}, which has {at.num_bytes} bytes for it"
            )
        found[names[need.name]] = at
    return found


def expect_world(call: ReductionCall, group: Group) -> None:
    """Raises `ArenaError` if `call` was planned for another number of ranks."""
    if len(group.ranks) != call.world:
        raise ArenaError(f"site {call.site}: planned for {counted(call.world, 'rank')}, group has {len(group.ranks)}")
