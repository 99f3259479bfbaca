"""GEMM + reduce-scatter and all-gather + GEMM on GPUs as far as no GPU is needed: which kernel gets what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import weaveopt.ops  # noqa: F401
from tests.ops.test_all_reduce_norm_peer import MadeUpArena
from weaveopt import _native
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import peer as transport
from weaveopt.fabrics import peer_rows
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.rows_call import RowsCall, decode, memory_plan
from weaveopt.ops.gemm_comm.all_gather import op as gathers
from weaveopt.ops.gemm_comm.all_gather import peer as gather
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall, Weights
from weaveopt.ops.gemm_comm.reduce_scatter import op as scatters
from weaveopt.ops.gemm_comm.reduce_scatter import peer as scatter
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, Products
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Lifetime, PlacedBuffer

TOKENS, HIDDEN, DEPTH = 512, 256, 64
TILES, PUSHED = TileConfig(256, 1, 4), TileConfig(256, 1)
SCATTER = GemmReduceScatterCall(
    site="down", group="0", fabric=Fabric.PEER, world=2, hidden=HIDDEN, dtype="bfloat16", max_tokens=TOKENS,
    timeout_s=30.0, scale=0.5, cut=str(TILES),
)  # fmt: skip
GATHER = AllGatherGemmCall(
    site="up", group="0", fabric=Fabric.PEER, world=2, hidden=HIDDEN, dtype="bfloat16", max_tokens=TOKENS,
    timeout_s=30.0, cut=str(PUSHED),
)  # fmt: skip
STREAM, SIDE = SimpleNamespace(cuda_stream=77), SimpleNamespace(cuda_stream=78)


class RowsArena(MadeUpArena):
    def buffer(self, name: str) -> PlacedBuffer:
        return self.layout.buffer(name)

    def native_offset(self, offset: int) -> int:
        return _native.HEADER_BYTES + offset


@dataclass
class Launches:
    """Stands for the native module: the names of what was launched, with the values."""

    made: list[tuple[object, ...]] = field(default_factory=list)
    calls: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)
    why_not: str = ""
    code: int = 0

    def site(self, *values: object) -> Launches:
        self.made.append(values)
        return self

    def __getattr__(self, name: str) -> object:
        def launch(*values: object) -> int:
            self.calls.append((name, values))
            return self.code

        return launch

    def take(self) -> list[tuple[str, tuple[object, ...]]]:
        taken, self.calls = self.calls, []
        return taken


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    found = Launches()
    module = SimpleNamespace(
        GpuGemmReduceScatter=found.site, GpuAllGatherGemm=found.site, DType=_native.DType,
        TileConfig=_native.TileConfig, GemmMatrix=_native.GemmMatrix, NormSpec=_native.NormSpec,
        NormKind=_native.NormKind, ReductionParameters=_native.ReductionParameters,
        product_most_tokens=_native.product_most_tokens, product_unsupported=lambda *of: found.why_not,
        gemm_unsupported=lambda *of: found.why_not, cuda_error_text=lambda code: f"error {code}",
    )  # fmt: skip
    for each in (scatter, gather, peer_rows):
        monkeypatch.setattr(each, "_native", module)
    monkeypatch.setattr(gather, "second_stream", lambda device: SIDE)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda index: -1)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda index: -1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: STREAM)
    yield found


def arena_for(call: RowsCall, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = gathers.SITES if isinstance(call, AllGatherGemmCall) else scatters.SITES
    plan = memory_plan("0", [(call, sites[Fabric.PEER].buffers(call))])  # type: ignore[arg-type]
    arena = RowsArena(Layout.of(plan))
    monkeypatch.setattr(transport, "of", lambda name: arena)


def scatter_site(call: GemmReduceScatterCall, monkeypatch: pytest.MonkeyPatch) -> scatter.PeerGemmReduceScatter:
    arena_for(call, monkeypatch)
    return scatter.PeerGemmReduceScatter.bind(call, call.encode(), "gemm_reduce_scatter", lambda: None)


def gather_site(call: AllGatherGemmCall, monkeypatch: pytest.MonkeyPatch) -> gather.PeerAllGatherGemm:
    arena_for(call, monkeypatch)
    return gather.PeerAllGatherGemm.bind(call, call.encode(), "all_gather_gemm", lambda: None)


def fields(record: object) -> tuple[object, ...]:
    """Values of a native record, in the order of its constructor."""
    names = {
        _native.TileConfig: ("tile_columns", "group_pairs", "reducer_ctas"),
        _native.GemmMatrix: ("data", "stride", "k"),
        _native.NormSpec: ("kind", "eps", "weight_offset", "cast_before_weight"),
    }[type(record)]  # type: ignore[index]
    return tuple(getattr(record, name) for name in names)


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


def test_calls_are_encoded() -> None:
    assert decode(GemmReduceScatterCall, SCATTER.encode()) == SCATTER
    assert decode(AllGatherGemmCall, GATHER.encode()) == GATHER


@pytest.mark.parametrize("world", [2, 3, 8])
def test_buffers_have_room_for_all_rows(world: int) -> None:
    [staging] = scatters.SITES[Fabric.PEER].buffers(replace(SCATTER, world=world))
    [gathered] = gathers.SITES[Fabric.PEER].buffers(replace(GATHER, world=world))
    assert (staging.name, gathered.name) == ("staging", "gathered")
    for buffer in (staging, gathered):
        assert buffer.lifetime is Lifetime.ARENA and buffer.num_bytes >= -(-TOKENS // world) * world * HIDDEN * 2
        assert buffer.num_bytes % buffer.alignment == 0
    product = _native.product_staging_bytes(TOKENS, HIDDEN, _native.DType.bfloat16, world)
    assert staging.num_bytes >= product, "the kernel that sends tiles"


def test_a_product_alone_goes_in_tiles(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    site = scatter_site(SCATTER, monkeypatch)
    a, weight = ones(300, DEPTH), ones(HIDDEN, 2 * DEPTH)
    result = site.run(Products([a], [weight[:, :DEPTH].t()]), 1)
    assert result is not None and result.shape == (150, HIDDEN)
    [(name, values)] = launches.take()
    assert name == "run_tiles"
    tokens, tiles, rows, stride, matrix, *rest = values
    assert (tokens, rows, stride, *rest) == (300, a.data_ptr(), DEPTH, result.data_ptr(), 77)
    assert fields(tiles) == (256, 1, 4) and fields(matrix) == (weight.data_ptr(), 2 * DEPTH, DEPTH)
    [made] = launches.made
    assert made[2:7] == (_native.DType.bfloat16, HIDDEN, 0.5, 0, 30.0) and made[7] == _native.HEADER_BYTES


def test_all_else_is_summed_behind_the_gemms(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(call: GemmReduceScatterCall, products: Products, outer: int = 1) -> tuple[str, tuple[object, ...]]:
        result = scatter_site(call, monkeypatch).run(products, outer)
        assert result is not None
        [launched] = launches.take()
        assert launched[1][-2:] == (result.data_ptr(), 77)
        return launched

    a, b = ones(TOKENS, DEPTH), ones(DEPTH, HIDDEN)
    half = TOKENS // 2 * HIDDEN
    assert run(SCATTER, Products([a, a], [b, b]))[1][:3] == (TOKENS, 1, half)
    assert run(SCATTER, Products([a], [b], [ones(HIDDEN)]))[0] == "sum_parts"
    assert run(SCATTER, Products([a], [b]), 4)[1][:3] == (TOKENS, 4, half // 4)
    assert run(replace(SCATTER, columns=True), Products([a], [b]))[1][:3] == (TOKENS, TOKENS, HIDDEN // 2)
    assert run(replace(SCATTER, cut=""), Products([a], [b]))[1][:3] == (TOKENS, 1, half)
    launches.why_not = "another chip"
    assert run(SCATTER, Products([a], [b]))[0] == "sum_parts"


def test_scatters_that_launch_nothing_or_cannot(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    site, b = scatter_site(SCATTER, monkeypatch), ones(DEPTH, HIDDEN)
    assert site.run(Products([ones(TOKENS + 2, DEPTH)], [b]), 1) is None, "more than the buffer has room for"
    empty = site.run(Products([ones(0, DEPTH)], [b]), 1)
    assert empty is not None and empty.shape == (0, HIDDEN) and not launches.calls
    with pytest.raises(WeaveError, match="are not 1 block"):
        site.run(Products([ones(7, DEPTH)], [b]), 1)
    with pytest.raises(WeaveError, match="expected 256 of torch"):
        site.run(Products([ones(8, DEPTH, dtype=torch.float16)], [b.half()]), 1)
    launches.code = 3
    with pytest.raises(WeaveError, match="could not be launched: error 3"):
        site.run(Products([ones(8, DEPTH)], [b]), 1)
    for change in ({"cut": "columns=64 pairs=1 ctas=4"}, {"dtype": "float32"}):
        with pytest.raises(WeaveError, match="there is no such kernel"):
            scatter_site(replace(SCATTER, **change), monkeypatch)  # type: ignore[arg-type]
    scatter_site(SCATTER, monkeypatch)
    larger = replace(SCATTER, max_tokens=2 * TOKENS)
    with pytest.raises(ArenaError, match="does not fit the arena"):
        scatter.PeerGemmReduceScatter.bind(larger, larger.encode(), "op", lambda: None)
    other = replace(SCATTER, world=4)
    with pytest.raises(ArenaError, match="planned for 4 ranks, group has 2"):
        scatter.PeerGemmReduceScatter.bind(other, other.encode(), "op", lambda: None)


def names(launches: Launches) -> list[str]:
    return [name for name, _ in launches.take()]


def test_a_gemm_begins_before_all_rows_are_here(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, weights = ones(100, HIDDEN), [ones(64, HIDDEN)]
    for output in (False, True):
        site = gather_site(replace(GATHER, returns_rows=output), monkeypatch)
        found = site.run(shard, Weights([each.t() for each in weights], [None]), 1)
        assert found is not None
        rows, products = found
        assert [each.shape for each in products] == [(200, 64)]
        assert rows.shape == ((200, HIDDEN) if output else (0,))
        calls = launches.take()
        assert calls[0] == ("begin", (1, 100, shard.data_ptr(), False, 77, 78)), "own rows stay where they are"
        for (name, values), weight, product in zip(calls[1:2], weights, products, strict=True):
            assert name == "multiply"
            assert values == (256, 1, weight.data_ptr(), HIDDEN, 0, weight.shape[0], product.data_ptr(), 77)
        assert calls[2:] == [("hand_out", (rows.data_ptr(), 78))] * output + [("end", (77, 78))]


def test_only_the_widest_gemm_begins_early(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's GEMMs are faster afterwards, when all rows have arrived."""
    shard, weights = ones(100, HIDDEN), [ones(32, HIDDEN), ones(64, HIDDEN), ones(64, HIDDEN)]
    site = gather_site(GATHER, monkeypatch)
    found = site.run(shard, Weights([each.t() for each in weights], [None] * 3), 1)
    assert found is not None and [each.shape for each in found[1]] == [(200, 32), (200, 64), (200, 64)]
    begin, multiply, *rest = launches.take()
    assert begin == ("begin", (1, 100, shard.data_ptr(), True, 77, 78)), "the others read own rows where all are"
    assert multiply[0] == "multiply" and multiply[1][2] == weights[1].data_ptr()
    assert [name for name, _ in rest] == ["await_shards", "end"]


def test_the_early_gemm_adds_its_bias(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, b, bias = ones(100, HIDDEN), ones(64, HIDDEN).t(), ones(64)
    site = gather_site(GATHER, monkeypatch)
    for given, copied in ((bias, False), (ones(65)[1:], True)):
        assert site.run(shard, Weights([b], [given]), 1) is not None
        _, (name, values), _ = launches.take()
        assert name == "multiply" and (values[4] != given.data_ptr()) is copied
        assert isinstance(values[4], int) and values[4] % 16 == 0 and values[4]


def test_what_cannot_begin_early_comes_behind_all_rows(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, b = ones(96, HIDDEN), ones(64, HIDDEN).t()
    late = ["begin", "await_shards", "end"]
    site = gather_site(GATHER, monkeypatch)

    def run(weights: Weights, outer: int = 1) -> list[str]:
        found = site.run(shard, weights, outer)
        assert found is not None and [each.shape for each in found[1]] == [(192, 64)] * len(weights.b)
        keeps_own = launches.calls[0][1][3]
        taken = names(launches)
        assert keeps_own == ("await_shards" in taken), "the library's GEMMs read own rows where all are"
        return taken

    assert run(Weights([b], [None]), outer=3) == late
    assert run(Weights([b], [ones(192, 64)])) == late, "rows"
    mixed = Weights([b, b, b], [None, ones(192, 64), None])
    assert run(mixed) == ["begin", "multiply", "await_shards", "end"]
    assert run(Weights([], [])) == ["begin", "end"]
    site = gather_site(replace(GATHER, cut=""), monkeypatch)
    assert run(Weights([b], [None])) == late
    assert run(Weights([], [])) == late
    launches.why_not = "another chip"
    site = gather_site(GATHER, monkeypatch)
    assert run(Weights([b], [None])) == late


def test_gathers_that_launch_nothing_or_cannot(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    site, weights = gather_site(GATHER, monkeypatch), Weights([ones(64, HIDDEN).t()], [None])
    assert site.run(ones(TOKENS // 2 + 1, HIDDEN), weights, 1) is None, "more than the buffer has room for"
    found = site.run(ones(0, HIDDEN), weights, 1)
    assert found is not None and [each.shape for each in found[1]] == [(0, 64)] and not launches.calls
    with pytest.raises(WeaveError, match="are not 3 blocks"):
        site.run(ones(4, HIDDEN), weights, 3)
    with pytest.raises(WeaveError, match="the shard is"):
        site.run(ones(4, HIDDEN, dtype=torch.float16), weights, 1)
    launches.code = 3
    with pytest.raises(WeaveError, match="could not be launched: error 3"):
        site.run(ones(4, HIDDEN), weights, 1)
    assert names(launches) == ["begin", "end"], "streams are joined also where a launch failed"
    with pytest.raises(WeaveError, match="there is no such kernel"):
        gather_site(replace(GATHER, dtype="float32"), monkeypatch)
