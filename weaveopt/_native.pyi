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
