from collections.abc import Sequence
from enum import Enum

from typing_extensions import Buffer

MAX_WORLD: int
MAX_CTAS: int
HEADER_BYTES: int
"""Header of a GPU arena; the buffers follow it."""
NUM_CHANNELS: int
NUM_MAILBOXES: int
TAG_FIELD_BITS: int
GPU_ALIGNMENT: int
SHM_ALIGNMENT: int

def process_identity(pid: int) -> str: ...

class Process:
    """Another process of this host, or of another one, of which nothing is known."""

    def __init__(self, pid: int, identity: str) -> None: ...
    @property
    def has_descriptor(self) -> bool: ...
    def has_ended(self) -> bool: ...

def available_memory(root: str = ...) -> tuple[int, str] | None: ...
def has_sm90_code(binary_version: int, ptx_version: int) -> bool: ...

class BufferNeed:
    """A named range of every rank's arena."""

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def fill(self) -> int | None:
        """What every 4-byte word holds before the first call."""
    @property
    def per_arena(self) -> bool:
        """Keeps one place for as long as the arena lives."""

class Code(Enum):
    OK = 0
    TIMEOUT = 1
    PEER_EXITED = 2
    PEER_FAILED = 3
    SITE_MISMATCH = 4
    POISONED = 5
    BUSY = 6
    FORKED = 7
    INTERRUPTED = 8
    ABANDONED = 9
    def __int__(self) -> int: ...

class Status:
    code: Code
    peer: int
    expected: int
    seen: int
    own_tag: int
    peer_tag: int
    slot: str

class Segment(Buffer):
    @staticmethod
    def create(
        data_bytes: int,
        cookie: int,
        first_epoch: int,
        num_segments: int = ...,
        root: str = ...,
        in_dev_shm: bool = ...,
        node: int = ...,
    ) -> Segment: ...
    @staticmethod
    def open(pid: int, fd: int, cookie: int, data_bytes: int) -> Segment: ...
    @property
    def fd(self) -> int: ...
    def close_fd(self) -> None: ...
    def mark_closed(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Group:
    def __init__(self, segments: list[Segment], rank: int, num_processes: int, first_epoch: int) -> None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def status(self) -> Status: ...

class RowsSite:
    """A site whose calls synchronize once: every rank puts rows into its partial buffer, and all read them."""

    tag: int
    partial_offset: int
    partial_bytes: int
    timeout_s: float

def partial_need(num_bytes: int) -> BufferNeed: ...

class Connections:
    """One TCP connection to each rank of other hosts."""

    def __init__(self, sockets: list[int], rank: int, num_processes: int, first_epoch: int) -> None: ...
    def add(self, index: int, socket: int) -> None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def status(self) -> Status: ...
    def exchange(
        self, tag: int, timeout_s: float, sent: dict[int, bytes], expected: dict[int, int]
    ) -> tuple[int, dict[int, bytes]]: ...

class DType(Enum):
    float32 = 0
    bfloat16 = 1
    float16 = 2

class NormKind(Enum):
    none = 0
    rms = 1
    layer = 2

class SumOut(Enum):
    none = 0
    whole = 1
    sharded = 2

class Layout:
    partial_offset: int
    partial_bytes: int
    output_offset: int

class NormSpec:
    kind: NormKind
    eps: float
    weight_offset: float
    cast_before_weight: bool

class AllReduceNormSite:
    tag: int
    hidden: int
    dtype: DType
    out_dtype: DType
    layout: Layout
    max_tokens: int
    one_shot_max_tokens: int
    post: NormSpec
    norm: NormSpec
    sum_out: SumOut
    timeout_s: float

class ReductionParameters:
    """Addresses of a reduction's parameters, in the order of their bits in `fp32`; 0: there is none."""

    def __init__(
        self,
        reduced_bias: int = 0,
        post_weight: int = 0,
        post_bias: int = 0,
        weight: int = 0,
        bias: int = 0,
        scale_value: int = 0,
        quant_scale: int = 0,
        fp32: int = 0,
    ) -> None: ...
    @property
    def reduced_bias(self) -> int: ...
    @property
    def post_weight(self) -> int: ...
    @property
    def post_bias(self) -> int: ...
    @property
    def weight(self) -> int: ...
    @property
    def bias(self) -> int: ...
    @property
    def scale_value(self) -> int: ...
    @property
    def quant_scale(self) -> int: ...
    @property
    def fp32(self) -> int:
        """Bit i: the i-th of them is fp32, else of the activations' dtype."""

class AllReduceNorm:
    def __init__(self, group: Group, site: AllReduceNormSite, max_threads: int, isa: str = ...) -> None: ...
    @property
    def status(self) -> Status: ...
    def enter(self, tokens: int, /) -> int: ...
    def abandon(self) -> None:
        """Ends a call that this thread entered and did not run, if there is one, and signals peers that wait for it."""
    def run(
        self,
        tokens: int,
        num_threads: int,
        partial: int,
        residual: int,
        parameters: ReductionParameters,
        normalized: int,
        sum: int,
        scale: float,
        /,
    ) -> int: ...
    def enter_and_run(
        self,
        tokens: int,
        num_threads: int,
        partial: int,
        residual: int,
        parameters: ReductionParameters,
        normalized: int,
        sum: int,
        scale: float,
        /,
    ) -> int: ...
    @property
    def next_parity(self) -> int: ...

class HostExchange(Enum):
    one_shot = 0
    two_shot = 1
    doubling = 2
    halving = 3

class AllReduceNormOfHosts(AllReduceNorm):
    """A site among the CPU ranks of several hosts."""

    def __init__(
        self,
        group: Group,
        wire: Connections,
        host: int,
        ranks: list[list[int]],
        table: list[tuple[int, HostExchange]],
        site: AllReduceNormSite,
        max_threads: int,
    ) -> None: ...
    @property
    def message_bytes(self) -> int: ...

def host_peers(exchange: HostExchange, host: int, hosts: int) -> list[int]: ...
def host_schedule(exchange: HostExchange, host: int, hosts: int) -> list[tuple[int, bool, int, int, int, int]]: ...

class HostTransfer(Enum):
    packet = 0
    flagged_row = 1

    def __int__(self) -> int: ...

def host_buffers(
    transfer: HostTransfer, tokens: int, hidden: int, hosts: int, ranks_of_host: int
) -> list[BufferNeed]: ...
def host_parts(exchange: HostExchange, hosts: int) -> int: ...
def isas() -> list[str]: ...

class GpuKernel(Enum):
    ll_packet_one_shot = 0
    ll_packet_two_shot = 1
    bulk = 2
    direct = 3
    posted = 4
    def __int__(self) -> int: ...

class OutKind(Enum):
    same = 0
    float32 = 1
    float8_e4m3fn = 2

class QuantKind(Enum):
    none = 0
    static = 1
    per_token = 2

def gpu_buffers(
    kernel: GpuKernel, tokens: int, hidden: int, dtype: DType, out_kind: OutKind, world: int
) -> list[BufferNeed]: ...
def product_buffers(tokens: int, hidden: int, dtype: DType, world: int) -> list[BufferNeed]: ...
def product_staging_bytes(tokens: int, hidden: int, dtype: DType, world: int) -> int: ...
def product_most_tokens(world: int) -> int: ...
def product_waves(tokens: int, hidden: int, tile_columns: int, reducer_ctas: int, world: int, num_sms: int) -> int: ...

PRODUCT_MOST_HIDDEN: int
GATHER_SPARE_CTAS: int
"""SMs that GEMMs of `all_gather_gemm` leave free."""

def shm_buffers(max_tokens: int, hidden: int, dtype: DType, out_dtype: DType, world: int) -> list[BufferNeed]: ...

EXPERT_TILE_ROWS: int
"""Of tiles of rows sorted by expert, in the GEMMs of `experts_gate_up` and `experts_down`."""
WIDE_EXPERT_TILE_ROWS: int
"""The same where a GEMM is `wide`."""

MOST_EXPERT_RANGES: int

def expert_row_counts(num_rows: int, num_experts: int) -> int: ...

has_cuda: bool
"""Whether the CUDA part was built; what follows is there only then."""

class PeerGroup:
    def __init__(
        self,
        bases: list[int],
        multicast: int,
        rank: int,
        device: int,
        num_bytes: int,
        fills: list[tuple[int, int, int]],
    ) -> None: ...
    @property
    def status(self) -> Status: ...
    def acknowledge(self) -> None: ...
    def abort(self, code: Code) -> None: ...
    def retire(self) -> None: ...

class HostGroup(PeerGroup):
    """Segments of every rank, registered for this rank's GPU: their headers are zeros, their buffers filled."""

    def __init__(self, segments: list[Segment], rank: int, device: int) -> None: ...

def why_no_host_memory(device: int) -> str:
    """Why the GPU cannot use memory of the host that processes share; empty where it can."""

def has_peer_atomics(device: int, peer: int) -> bool:
    """True if a GPU supports native atomics on the memory of another: over NVLink."""

class SideStream:
    def __init__(self, device: int) -> None: ...
    @property
    def handle(self) -> int: ...
    @property
    def device(self) -> int: ...

class StreamCrossing:
    def __init__(self, stream: SideStream) -> None: ...
    def fork(self, current: int) -> int: ...
    def launched(self) -> int: ...
    def join(self, current: int) -> int: ...

class GpuSite:
    tag: int
    hidden: int
    dtype: DType
    out_kind: OutKind
    quant: QuantKind
    post: NormSpec
    norm: NormSpec
    sum_whole: bool
    scale: float
    timeout_s: float
    channel: int
    multicast: bool
    """The kernels use the multicast mapping of the arenas, which has to be there."""
    mailbox_offset: int
    mailbox_bytes: int
    """Of one: of the buffer that all sites of the channel share, divided by `NUM_MAILBOXES`."""
    staging_offset: int
    staging_bytes: int
    """-1: up to the arena's end, as far as launches check it; the same below."""
    output_offset: int
    output_bytes: int

class GpuAllReduceNorm:
    def __init__(self, group: PeerGroup, site: GpuSite) -> None: ...
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
    def run_product(
        self,
        tokens: int,
        tiles: TileConfig,
        stream: int,
        a: int,
        a_stride: int,
        matrix: GemmMatrix,
        residual: int,
        parameters: ReductionParameters,
        normalized: int,
        sum: int,
        /,
    ) -> int: ...

class GpuGemmReduceScatter:
    def __init__(
        self,
        group: PeerGroup,
        tag: int,
        dtype: DType,
        hidden: int,
        scale: float,
        channel: int,
        timeout_s: float,
        staging_offset: int,
        staging_bytes: int,
    ) -> None: ...
    def sum_parts(self, tokens: int, outer: int, block: int, out: int, stream: int, /) -> int: ...
    def run_tiles(
        self,
        tokens: int,
        tiles: TileConfig,
        a: int,
        a_stride: int,
        matrix: GemmMatrix,
        out: int,
        stream: int,
        /,
    ) -> int: ...
    def run_tiles_norm(
        self,
        tokens: int,
        tiles: TileConfig,
        a: int,
        a_stride: int,
        matrix: GemmMatrix,
        residual: int,
        norm: NormSpec,
        parameters: ReductionParameters,
        normalized: int,
        sum: int,
        stream: int,
        /,
    ) -> int: ...

class GpuAllGatherGemm:
    def __init__(
        self,
        group: PeerGroup,
        tag: int,
        dtype: DType,
        hidden: int,
        channel: int,
        timeout_s: float,
        rows_offset: int,
        rows_bytes: int,
    ) -> None: ...
    def begin(self, outer: int, inner: int, shard: int, keeps_own: bool, main: int, side: int, /) -> int: ...
    def await_shards(self, main: int, /) -> int: ...
    def multiply(
        self,
        tile_columns: int,
        group_pairs: int,
        weight: int,
        weight_stride: int,
        bias: int,
        n: int,
        out: int,
        main: int,
        /,
    ) -> int: ...
    def hand_out(self, rows: int, side: int, /) -> int: ...
    def end(self, main: int, side: int, /) -> int: ...

def unsupported(kernel: GpuKernel, dtype: DType, hidden: int, world: int, fp8: bool, device: int) -> str: ...
def product_unsupported(dtype: DType, hidden: int, k: int, world: int, device: int) -> str: ...
def gemm(
    a: int,
    weight: int,
    out: int,
    rows: int,
    n: int,
    k: int,
    a_stride: int,
    weight_stride: int,
    out_stride: int,
    dtype: DType,
    tile_columns: int,
    group_pairs: int,
    stream: int,
    bias: int = 0,
) -> int: ...
def gemm_unsupported(dtype: DType, n: int, k: int, device: int) -> str: ...

class PullMark:
    """A point in the work of a GPU: all that a stream had, or a pull. None is made by hand."""

    @property
    def capture(self) -> int: ...

class PullStreams:
    def __init__(self, device: int, lanes: int) -> None: ...
    @staticmethod
    def capture_of(current: int) -> int:
        """Identifies the capture that a raw stream is part of; 0: none."""

    def mark(self, current: int) -> PullMark: ...
    def wait(self, current: int, mark: PullMark) -> None: ...
    def pull(self, current: int, copies: Sequence[tuple[int, int, int]], after: Sequence[PullMark]) -> PullMark:
        """Copies (to, from, bytes) that follow the marks; the mark of their end."""

    def settle(self, marks: Sequence[PullMark]) -> None:
        """Waits on the host."""

class ExpertWeight:
    def __init__(
        self, data: int, experts: int, rows: int, expert_stride: int, row_stride: int, depth_stride: int, bias: int
    ) -> None: ...
    def add_range(self, data: int, experts: int) -> None:
        """Further experts, at another address and of the same strides; up to `MOST_EXPERT_RANGES` in all."""

class ExpertRouting:
    def __init__(self, order: int, table: int, num_rows: int, group: int, tile_rows: int) -> None: ...

class ExpertGate:
    def __init__(self, gated: bool, interleaved: bool, activation: int, alpha: float, limit: float) -> None: ...

def experts_gate_up(
    x: int,
    x_stride: int,
    hidden: int,
    choices: int,
    weight: ExpertWeight,
    routing: ExpertRouting,
    gate: ExpertGate,
    inner: int,
    dtype: DType,
    gathered: int,
    stream: int,
) -> int: ...
def experts_down(
    inner: int,
    inner_width: int,
    weight: ExpertWeight,
    routing: ExpertRouting,
    results: int,
    dtype: DType,
    wide: bool,
    stream: int,
) -> int: ...
def experts_both(
    x: int,
    x_stride: int,
    hidden: int,
    choices: int,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    routing: ExpertRouting,
    gate: ExpertGate,
    inner: int,
    results: int,
    dtype: DType,
    lag: int,
    stream: int,
) -> int: ...
def sort_expert_rows(
    experts: int,
    num_rows: int,
    num_experts: int,
    tile_rows: int,
    counts: int,
    order: int,
    table: int,
    early: bool,
    stream: int,
) -> int: ...
def experts_unsupported(dtype: DType, hidden: int, inner: int, addresses: int, device: int) -> str: ...
def cuda_error_text(code: int) -> str: ...
def has_code(device: int) -> bool: ...

CUDA_ARCHS: str
"""What kernels were compiled for: `80;90;100+PTX`."""

class TileConfig:
    """How a kernel divides its GEMM; the record of the same name in `weaveopt.cost_model` for native code."""

    def __init__(self, tile_columns: int, group_pairs: int, reducer_ctas: int) -> None: ...
    @property
    def tile_columns(self) -> int: ...
    @property
    def group_pairs(self) -> int: ...
    @property
    def reducer_ctas(self) -> int: ...

class GemmMatrix:
    """The weight of a GEMM, [hidden, k]: its address, and elements from row to row."""

    def __init__(self, data: int, stride: int, k: int) -> None: ...
    @property
    def data(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def k(self) -> int: ...

class GemmReduceScatter:
    def __init__(self, group: Group, site: RowsSite, dtype: DType, max_threads: int) -> None: ...
    @property
    def status(self) -> Status: ...
    @property
    def next_parity(self) -> int: ...
    def enter(self, tokens: int) -> int: ...
    def abandon(self) -> None:
        """Ends a call that this thread entered and did not run, if there is one, and signals peers that wait for it."""
    def run(self, tokens: int, outer: int, inner: int, row: int, scale: float, out: int, num_threads: int) -> int: ...

class AllGatherGemm:
    def __init__(self, group: Group, site: RowsSite, max_threads: int) -> None: ...
    @property
    def status(self) -> Status: ...
    def run(self, tokens: int, outer: int, block_bytes: int, shard: int, whole: int, num_threads: int) -> int: ...

class ShardedMixtureSite:
    tag: int
    dispatch_offset: int
    combine_offset: int
    max_tokens: int
    choices: int
    num_experts: int
    hidden: int
    dtype: DType
    timeout_s: float

class ShardedMixture:
    def __init__(self, group: Group, site: ShardedMixtureSite, isa: str = ...) -> None: ...
    @property
    def status(self) -> Status: ...
    @property
    def rows_dispatched(self) -> int: ...
    @property
    def rows_returned(self) -> int: ...
    def enter(self) -> int: ...
    def dispatch(self, x: int, experts: int, tokens: int, num_threads: int) -> None: ...
    def collect(self, first: int, last: int) -> tuple[int, int]: ...
    def gather(self, rows: int, experts: int, num_threads: int) -> None: ...
    def return_results(self, results: int, num_threads: int) -> None: ...
    def finish(self, weights: int, out: int, num_threads: int) -> int: ...
    def end_without_results(self) -> int: ...
    def abandon(self) -> None: ...

class TokenCounts:
    def __init__(self, group: Group, offset: int, tag: int, timeout_s: float) -> None: ...
    @property
    def status(self) -> Status: ...
    def largest(self, tokens: int) -> tuple[int, int]: ...

def token_counts_need() -> BufferNeed: ...
def sharded_mixture_needs(world: int, max_tokens: int, choices: int, row_bytes: int) -> list[BufferNeed]: ...
def gpu_sharded_mixture_needs(world: int, max_tokens: int, choices: int, row_bytes: int) -> list[BufferNeed]: ...

class GpuShardedMixtureSite:
    tag: int
    channel: int
    dispatch_offset: int
    combine_offset: int
    max_tokens: int
    choices: int
    num_experts: int
    hidden: int
    dtype: DType
    timeout_s: float

class GpuShardedMixture:
    def __init__(self, group: PeerGroup, site: GpuShardedMixtureSite) -> None: ...
    @property
    def ids_offset(self) -> int: ...
    @property
    def rows_offset(self) -> int: ...
    @property
    def result_buffers(self) -> list[int]: ...
    def dispatch(
        self, tokens: int, slot_tokens: int, x: int, x_stride: int, experts: int, traffic: int, stream: int
    ) -> int: ...
    def down(
        self, slot_tokens: int, inner: int, inner_width: int, weight: ExpertWeight, routing: ExpertRouting, stream: int
    ) -> int: ...
    def combine(
        self,
        tokens: int,
        slot_tokens: int,
        experts: int,
        weights: int,
        weights_dtype: DType,
        out: int,
        stream: int,
    ) -> int: ...
