"""The shape of a profile's JSON, for the type checker; `profile.schema.json` says the same to the validator."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class OriginDocument(TypedDict):
    kind: str
    date: str
    host: str
    note: str


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


class MemoryDocument(TypedDict):
    origin: str
    floor_us: float
    bytes_per_s: float
    points: NotRequired[list[PointDocument]]


class TileDocument(TypedDict):
    m: int
    n: int
    flops_per_s: float


class RateDocument(TypedDict):
    m: int
    flops_per_s: float


class ProductsDocument(TypedDict):
    origin: str
    launch_us: float
    bytes_per_s: float
    units: NotRequired[int]
    tiles: NotRequired[list[TileDocument]]
    rates: NotRequired[list[RateDocument]]


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
