from enum import Enum

from typing_extensions import Buffer

class Code(Enum):
    OK = 0
    TIMEOUT = 1
    PEER_EXITED = 2
    PEER_FAILED = 3
    SITE_MISMATCH = 4
    POISONED = 5
    BUSY = 6
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
    def create(data_bytes: int, cookie: int, first_epoch: int) -> Segment: ...
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

class NormForm:
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
    post: NormForm
    norm: NormForm
    sum_out: SumOut
    timeout_s: float

class AllReduceNorm:
    def __init__(self, group: Group, site: AllReduceNormSite, max_threads: int, isa: str = ...) -> None: ...
    def enter(self, tokens: int, /) -> int: ...
    def leave(self) -> None: ...
    def run(
        self,
        tokens: int,
        num_threads: int,
        partial: int,
        residual: int,
        reduced_bias: int,
        post_weight: int,
        post_bias: int,
        weight: int,
        bias: int,
        normed: int,
        sum: int,
        fp32_parameters: int,
        scale: float,
        /,
    ) -> int: ...
    def enter_and_run(
        self,
        tokens: int,
        num_threads: int,
        partial: int,
        residual: int,
        reduced_bias: int,
        post_weight: int,
        post_bias: int,
        weight: int,
        bias: int,
        normed: int,
        sum: int,
        fp32_parameters: int,
        scale: float,
        /,
    ) -> int: ...
    @property
    def next_parity(self) -> int: ...

def isas() -> list[str]: ...

has_cuda: bool
"""Whether the CUDA part was built; what follows is there only then."""

class GpuForm(Enum):
    mail_one_shot = 0
    mail_two_shot = 1
    bulk = 2
    direct = 3
    def __int__(self) -> int: ...

class OutKind(Enum):
    same = 0
    float32 = 1
    float8_e4m3fn = 2

class QuantKind(Enum):
    none = 0
    static = 1
    per_token = 2

class Regions:
    def __init__(self, mailbox_bytes: int, staging_bytes: int, output_bytes: int) -> None: ...
    @property
    def mailbox_bytes(self) -> int: ...
    @property
    def staging_bytes(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def output_offset(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...

class PeerGroup:
    def __init__(self, bases: list[int], multicast: int, rank: int, device: int, regions: Regions) -> None: ...
    @property
    def status(self) -> Status: ...
    def acknowledge(self) -> None: ...
    def abort(self, code: Code) -> None: ...

class GpuSite:
    tag: int
    hidden: int
    dtype: DType
    out_kind: OutKind
    quant: QuantKind
    post: NormForm
    norm: NormForm
    sum_whole: bool
    scale: float
    timeout_s: float

class GpuAllReduceNorm:
    def __init__(self, group: PeerGroup, site: GpuSite) -> None: ...
    def run(
        self,
        tokens: int,
        form: int,
        num_ctas: int,
        stream: int,
        partial: int,
        partial_offset: int,
        residual: int,
        reduced_bias: int,
        post_weight: int,
        post_bias: int,
        weight: int,
        bias: int,
        scale_value: int,
        quant_scale: int,
        fp32_parameters: int,
        normed: int,
        sum: int,
        row_scale: int,
        /,
    ) -> int: ...

def unsupported(form: GpuForm, dtype: DType, hidden: int, world: int, fp8: bool, device: int) -> str: ...
def cuda_error_text(code: int) -> str: ...
