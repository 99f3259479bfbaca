"""Types of the native module between hosts; see csrc/reduction/hosts/bindings.nvshmem.cpp."""

from collections.abc import Sequence

from weaveopt._native import Code, DType, NormSpec, OutKind, QuantKind, ReductionParameters, Status

def version() -> str: ...
def unique_id() -> bytes: ...
def start(rank: int, world: int, unique_id: bytes, device: int) -> None: ...

class NvshmemGroup:
    def __init__(self, device: int, num_bytes: int, hosts: Sequence[str]) -> None: ...
    @staticmethod
    def of_one_process(device: int, num_bytes: int, rank: int, bases: Sequence[int]) -> NvshmemGroup:
        """A rank whose peers' arenas are all of this process, zeros, and stay the caller's: for tests."""
    @property
    def address(self) -> int: ...
    def is_direct(self, rank: int) -> bool:
        """Whether the memory of `rank` is mapped here, so that rows are stored there and not put."""
    @property
    def status(self) -> Status: ...
    def acknowledge(self) -> None: ...
    def abort(self, code: Code) -> None: ...
    def retire(self) -> None: ...

class HostsPlace:
    """A range of every arena, from its first byte on."""

    def __init__(self, offset: int, num_bytes: int) -> None: ...
    offset: int
    num_bytes: int

class HostsPlaces:
    """Offsets of the buffers of `_native.host_buffers`, by their names without `host_`."""

    def __init__(self) -> None: ...
    inbox: HostsPlace
    outbox: HostsPlace
    row_inbox: HostsPlace
    row_outbox: HostsPlace
    flags: HostsPlace
    sums: HostsPlace

class HostsSite:
    tag: int
    hidden: int
    dtype: DType
    out_kind: OutKind
    quant: QuantKind
    post: NormSpec
    norm: NormSpec
    scale: float
    timeout_s: float
    channel: int
    places: HostsPlaces
    hosts: Sequence[Sequence[int]]
    """The ranks of the group on each host."""

class HostsAllReduceNorm:
    def __init__(self, group: NvshmemGroup, site: HostsSite) -> None: ...
    def run(
        self,
        tokens: int,
        kernel: int,
        num_ctas: int,
        stream: int,
        partial: int,
        partial_offset: int,
        residual: int,
        parameters: ReductionParameters,
        normalized: int,
        sum: int,
        row_scale: int,
        /,
    ) -> int: ...

def doubling_unsupported(dtype: DType, hidden: int, device: int) -> str: ...
