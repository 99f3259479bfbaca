"""Properties of the fabrics, a table with one line for each, so that no other code compares fabric names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from types import MappingProxyType

from weaveopt.records.candidate import Fabric, Rejection

try:
    from weaveopt import _native
except ImportError:  # built without it: is_built() says so
    _native = None  # type: ignore[assignment]


class NativePart(StrEnum):
    """A part of the native module; the value is its name in messages."""

    HOST = "native part"
    CUDA = "CUDA part"
    NVSHMEM = "NVSHMEM part"

    @property
    def code(self) -> str:
        """Code of the rejection for a part that is not built."""
        return f"{self.value.lower().replace(' ', '_')}_missing"


def is_built(part: NativePart) -> bool:
    """True if this installation has the part. The CUDA part is built if nvcc and GPUs are found, and a separate
    module if NVSHMEM is found too; that module is not loaded before it is used."""
    if part is NativePart.NVSHMEM:
        return is_built(NativePart.CUDA) and find_spec("weaveopt._nvshmem") is not None
    return _native is not None and (part is NativePart.HOST or bool(_native.has_cuda))


@dataclass(frozen=True)
class Traits:
    """Properties of a fabric, wherever it is used."""

    device: str | None
    """`cpu` or `cuda`: whose ranks it joins. None: either's."""
    crosses_hosts: bool
    within_host: bool = True
    """True if it is useful when all ranks are on one host."""
    native_part: NativePart | None = None
    """Native part that has to be built for it."""
    max_world: int | None = None
    """Ranks that its kernels join at most; None: any number."""
    header_bytes: int = 0
    """Size of the header at the start of its arenas, before the first buffer."""
    buffer_alignment: int = 256
    """Bytes at a multiple of which buffers begin."""
    needs_peer_access: bool = False
    """True if its kernels access peers' memory directly, which the GPUs have to be able to map."""
    serves: frozenset[Fabric] = frozenset()
    """Other fabrics whose kernels find what they need in an arena of this one."""
    needs_multicast: bool = False
    """True if its kernels use an NVLink multicast mapping of all ranks' memory, which torch has to make."""
    needs_host_memory: bool = False
    """True if its kernels use memory of the host, which processes share and register with the driver."""
    gives_way_to: frozenset[Fabric] = frozenset()
    """Fabrics that carry each byte over the same wires fewer times: where one of them reaches all ranks, this one is
    not used."""
    measured_only: bool = False
    """True if it is used only where the machine's profile has times of it."""


_PAGE_BYTES = 4096
_PEER = Traits("cuda", crosses_hosts=False, native_part=NativePart.CUDA, needs_peer_access=True)
_NVSHMEM = Traits("cuda", crosses_hosts=True, within_host=False, native_part=NativePart.NVSHMEM, needs_peer_access=True)
if _native is not None:
    _PEER = replace(
        _PEER,
        max_world=_native.MAX_WORLD,
        header_bytes=_native.HEADER_BYTES,
        buffer_alignment=_native.GPU_ALIGNMENT,
    )
    _NVSHMEM = replace(_NVSHMEM, header_bytes=_native.HEADER_BYTES, buffer_alignment=_native.GPU_ALIGNMENT)

TRAITS: Mapping[Fabric, Traits] = MappingProxyType({
    # Memory that is mapped by multicast is reachable by peers too.
    Fabric.MULTIMEM: replace(_PEER, needs_multicast=True, serves=frozenset({Fabric.PEER})),
    Fabric.PEER: _PEER,
    Fabric.HOST: replace(
        _PEER,
        needs_peer_access=False,
        needs_host_memory=True,
        gives_way_to=frozenset({Fabric.PEER}),
        measured_only=True,
    ),
    # On pages, no two buffers on one: the first touch decides where a page lives.
    Fabric.SHM: Traits("cpu", crosses_hosts=False, native_part=NativePart.HOST, buffer_alignment=_PAGE_BYTES),
    Fabric.TCP: Traits(
        "cpu", crosses_hosts=True, within_host=False, native_part=NativePart.HOST, buffer_alignment=_PAGE_BYTES
    ),
    Fabric.NVSHMEM: _NVSHMEM,
    Fabric.LIBRARY: Traits(None, crosses_hosts=True),
})  # fmt: skip


def header_bytes(fabric: Fabric) -> int:
    """Size of the header at the start of an arena of `fabric`, before the first buffer."""
    return TRAITS[fabric].header_bytes


def arena_fabric(fabrics: Iterable[Fabric]) -> Fabric:
    """The fabric of `fabrics` whose arena serves the kernels of all of them.

    A group's ranks have one kind of device, so there is one.
    """
    asked = frozenset(fabrics)
    found = [fabric for fabric in Fabric if fabric in asked and asked <= {fabric, *TRAITS[fabric].serves}]
    assert found, f"no arena serves sites on {sorted(fabric.value for fabric in asked)} at once"
    return found[0]


_RANKS = {"cpu": "CPU ranks", "cuda": "GPUs"}


def rejection(
    fabric: Fabric,
    device: str,
    num_hosts: int,
    fake: bool,
    no_peer_access: tuple[int, int] | None = None,
    no_multicast: Rejection | None = None,
    no_host_memory: Rejection | None = None,
) -> Rejection | None:
    """Reject `fabric` if it does not reach ranks on `num_hosts` hosts that use `device`; None if it does.

    `fake`: there are no ranks; what is built here, and what could be probed, says nothing of the machine meant.
    `no_peer_access`: two ranks of one host whose GPUs cannot map each other's memory.
    `no_multicast`: why the ranks have no multicast mapping of their memory; None: torch makes one.
    `no_host_memory`: why the ranks' GPUs cannot use memory of the host that processes share; None: they can.
    """
    traits = TRAITS[fabric]
    if traits.device not in (None, device):
        values = (("device", device),)
        return Rejection(f"fabric_needs_{traits.device}", f"{fabric.value} joins {_RANKS[str(traits.device)]}", values)
    if not fake and traits.native_part is not None and not is_built(traits.native_part):
        return Rejection(traits.native_part.code, f"weaveopt was installed without its {traits.native_part.value}")
    if num_hosts == 1 and not traits.within_host:
        return Rejection("fabric_needs_hosts", f"{fabric.value} joins ranks of several hosts", (("hosts", 1),))
    if num_hosts > 1 and not traits.crosses_hosts:
        return Rejection("fabric_needs_one_host", f"{fabric.value} stays within a host", (("hosts", num_hosts),))
    if no_peer_access is not None and traits.needs_peer_access:
        ranks = (("rank", no_peer_access[0]), ("peer", no_peer_access[1]))
        return Rejection("no_peer_access", "the GPUs of two ranks cannot map each other's memory", ranks)
    if no_multicast is not None and traits.needs_multicast:
        return no_multicast
    if no_host_memory is not None and traits.needs_host_memory:
        return no_host_memory
    return None
