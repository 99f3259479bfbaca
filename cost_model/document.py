"""The shape of a profile's JSON, for the type checker; `profile.schema.json` says the same to the validator."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class OriginDocument(TypedDict):
    kind: str
    date: str
    host: str
    note: str
    spread: NotRequired[float]


class PointDocument(TypedDict):
    bytes: int
    us: float


class LinkDocument(TypedDict):
    origin: str
    latency_us: float
    bytes_per_s: float


class CurveDocument(TypedDict):
    origin: str
    algorithm: str
    world: int
    points: list[PointDocument]


class FusedCurveDocument(CurveDocument):
    form: NotRequired[str]
    ctas: NotRequired[int]
    hidden: NotRequired[int]


class FabricDocument(TypedDict):
    link: LinkDocument
    forms: NotRequired[list[str]]
    all_reduce: NotRequired[list[CurveDocument]]
    all_reduce_norm: NotRequired[list[FusedCurveDocument]]
    all_gather: NotRequired[list[CurveDocument]]
    reduce_scatter: NotRequired[list[CurveDocument]]
    all_to_all: NotRequired[list[CurveDocument]]


class RowCurveDocument(TypedDict):
    hidden: int
    points: list[PointDocument]


class MemoryDocument(TypedDict):
    origin: str
    floor_us: float
    bytes_per_s: float
    points: NotRequired[list[PointDocument]]
    norms: NotRequired[list[RowCurveDocument]]


class TileDocument(TypedDict):
    m: int
    n: int
    flops_per_s: float


class RateDocument(TypedDict):
    m: int
    flops_per_s: float


class SamplesDocument(TypedDict):
    m: list[int]
    n: list[int]
    k: list[int]
    us: list[float]


class ProductsDocument(TypedDict):
    origin: str
    launch_us: float
    bytes_per_s: float
    units: NotRequired[int]
    tiles: NotRequired[list[TileDocument]]
    rates: NotRequired[list[RateDocument]]
    fill_us: NotRequired[float]
    last_wave: NotRequired[float]
    samples: NotRequired[SamplesDocument]


class AttentionDocument(TypedDict):
    origin: str
    units: int
    tile_q: int
    tile_kv: int
    launch_us: float
    step_us: float
    causal_step_us: float
    bytes_per_s: float


class CrowdedDocument(TypedDict):
    ctas: int
    product: float
    exchange: float


class ContentionDocument(TypedDict):
    origin: str
    rows: list[CrowdedDocument]


class CopyEngineDocument(TypedDict):
    origin: str
    latency_us: float
    bytes_per_s: float
    contended_bytes_per_s: float


class LaunchDocument(TypedDict):
    origin: str
    graph_us: float
    eager_us: float


class WiringDocument(TypedDict):
    origin: str
    processors: int
    memory_bytes: int
    links: dict[str, str]


class ProfileDocument(TypedDict):
    schema: int
    name: str
    device: str
    ranks_per_host: int
    relative_error: float
    origins: dict[str, OriginDocument]
    memory: MemoryDocument
    products: dict[str, ProductsDocument]
    inter_host: LinkDocument
    fabrics: dict[str, FabricDocument]
    attention: NotRequired[AttentionDocument]
    contention: NotRequired[ContentionDocument]
    copy_engine: NotRequired[CopyEngineDocument]
    launch: NotRequired[LaunchDocument]
    wiring: NotRequired[WiringDocument]
