"""Variant `tiles` of `weave::gemm_all_reduce_norm` as far as no GPU is needed: its calls, its buffers, its operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import weaveopt.ops  # noqa: F401
from tests.ops.test_all_reduce_norm_peer import Launches, MadeUpArena
from weaveopt import _native
from weaveopt.cost_model.tile_config import TILES, TileConfig
from weaveopt.errors import WeaveError
from weaveopt.fabrics import peer as transport
from weaveopt.fabrics.layout import Layout
from weaveopt.ops.gemm_comm.all_reduce.call import ChunkRow, GemmReductionCall, decode, results_in_arena
from weaveopt.ops.gemm_comm.all_reduce.operands import gemm_of
from weaveopt.ops.gemm_comm.all_reduce.peer import PeerTiles, aligned_rows, bind
from weaveopt.ops.gemm_comm.all_reduce.shm import ShmGemm
from weaveopt.ops.reduction import peer
from weaveopt.ops.reduction.buffers import buffers_of_call, memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Lifetime
from weaveopt.records.norm import NormKind, NormSpec, Quant

LLAMA, LAYER = (NormSpec(kind, 1e-5) for kind in (NormKind.RMS, NormKind.LAYER))
TOKENS, HIDDEN, DEPTH = 1000, 1024, 64


def make_call(**change: object) -> GemmReductionCall:
    table = (KernelRow(TOKENS, Algorithm.TWO_SHOT, Transfer.TILES),)
    reduction = ReductionCall(
        site="tiles", group="0", fabric=Fabric.PEER, world=4, hidden=HIDDEN, dtype="bfloat16", out_dtype="bfloat16",
        max_tokens=TOKENS, post=None, norm=LLAMA, timeout_s=30.0, table=table,
    )  # fmt: skip
    return GemmReductionCall(replace(reduction, **change), TILES, (), TileConfig(256, 1, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"residual_sharded": True, "sum_out": SumOut.SHARDED, "normalized_aliases_arena": True},
        {"norm": None},
        {"dtype": "float16", "out_dtype": "float16"},
    ],
)
def test_calls_are_encoded(change: dict[str, object]) -> None:
    call = make_call(**change)
    assert decode(call.encode()) == call
    assert results_in_arena((call.encode(),)) == ((0,) if call.reduction.normalized_aliases_arena else ())


@pytest.mark.parametrize(
    "change",
    [
        {"post": LLAMA},
        {"norm": LAYER},
        {"out_dtype": "float32"},
        {"dtype": "float32", "out_dtype": "float32"},
        {"in_pieces": True},
        {"quant": Quant.STATIC, "out_dtype": "float8_e4m3fn"},
    ],
)
def test_what_the_kernel_does_not_do_is_an_error(change: dict[str, object]) -> None:
    with pytest.raises(WeaveError, match="site tiles"):
        decode(make_call(**change).encode())


@pytest.mark.parametrize(
    "cut", [None, TileConfig(64, 1, 4), TileConfig(256, 0, 4), TileConfig(256, 1, 3), TileConfig(256, 1, -2)]
)
def test_a_cut_that_no_kernel_makes_is_an_error(cut: TileConfig | None) -> None:
    with pytest.raises(WeaveError, match="no such kernel"):
        decode(replace(make_call(), cut=cut).encode())


def test_tiles_do_not_go_in_chunks_nor_chunks_in_tiles() -> None:
    call = make_call()
    with pytest.raises(WeaveError, match="chunks"):
        decode(replace(call, chunks=(ChunkRow(TOKENS, 128),)).encode())
    with pytest.raises(WeaveError, match="not cut into tiles"):
        decode(replace(call, variant="chunks").encode())
    with pytest.raises(WeaveError, match="no variant 'tiles'"):
        ShmGemm.bind(call, call.encode(), "op", lambda: None)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_buffers_have_room_for_the_tiles_of_every_source(world: int) -> None:
    call = replace(make_call().reduction, world=world)
    (output, staging) = buffers_of_call(call)
    share = -(-TOKENS // world)
    assert (staging.name, output.name) == ("staging", "output")
    assert (
        staging.num_bytes
        >= world * share * HIDDEN * 2
        == _native.product_staging_bytes(TOKENS, HIDDEN, _native.DType.bfloat16, world)
    )
    assert output.num_bytes >= 2 * TOKENS * HIDDEN * 2, "normalized rows, and rows of the sum"
    assert {output.lifetime, staging.lifetime} == {Lifetime.ARENA}
    bulk = replace(call, table=(KernelRow(TOKENS, Algorithm.TWO_SHOT, Transfer.BULK, 16),))
    assert output in buffers_of_call(bulk), "the two kernels hand rows out in one buffer"


def test_waves_are_those_of_the_launch() -> None:
    def waves(
        tokens: int, hidden: int = 8192, columns: int = 256, ctas: int = 4, world: int = 4, sms: int = 132
    ) -> int:
        return _native.product_waves(tokens, hidden, columns, ctas, world, sms)

    # A cluster's tile has 256 rows of one owner; of 66 clusters two compute none.
    assert [waves(tokens) for tokens in (1, 1024, 1025, 4096, 4097)] == [2, 2, 4, 8, 10]
    assert waves(1024, columns=128) == 4 and waves(1024, hidden=8200) == 3
    assert waves(4096, world=2) == waves(4096) and waves(4096, ctas=16) == 9
    assert waves(4096, ctas=1000) == 512, "one cluster is left"
    assert waves(4096, sms=1) == 0
    assert _native.product_most_tokens(2) == 2 * 256 * 128


def test_fake_results_are_of_the_residuals_shape() -> None:
    call = make_call(sum_out=SumOut.SHARDED, residual_sharded=True)
    with FakeTensorMode():
        a, weight = (torch.empty(rows, DEPTH, dtype=torch.bfloat16) for rows in (TOKENS, HIDDEN))
        residual = torch.empty(2, TOKENS // 2, HIDDEN, dtype=torch.bfloat16)
        results = torch.ops.weave.gemm_all_reduce_norm(
            a, weight, "nk", None, None, residual, None, None, weight.new_empty(HIDDEN), None, call.encode()
        )
    assert [(each.shape, each.dtype) for each in results] == [(residual.shape, torch.bfloat16)] * 2


def test_rows_are_copied_where_the_kernel_could_not_read_them() -> None:
    x = torch.arange(64 * 64, dtype=torch.float32).view(64, 64).bfloat16()
    for same in (x, x[3:], x[:, 8:], x[1:2]):
        assert aligned_rows(same) is same
    for other in (x[:, 1:], x.t(), x.view(-1)[: 63 * 60].view(63, 60)[1:], x[0].expand(4, 64)):
        copied = aligned_rows(other)
        assert copied is not other and torch.equal(copied, other)
        assert copied.is_contiguous()


FIELDS = (
    "tokens", "tiles", "stream", "a", "a_stride", "matrix", "residual", "parameters", "normalized", "sum",
)  # fmt: skip


@dataclass
class TileLaunches(Launches):
    """Stands for the native module; `why_not`: the device cannot compute such a GEMM."""

    products: list[SimpleNamespace] = field(default_factory=list)

    def module(self) -> SimpleNamespace:
        known = super().module()
        known.product_unsupported = lambda *of: self.why_not
        return known

    def bind(self, group: object, site: SimpleNamespace) -> SimpleNamespace:
        self.sites.append(site)
        return SimpleNamespace(run_product=self.run_product)

    def run_product(self, *values: object) -> int:
        self.products.append(SimpleNamespace(**dict(zip(FIELDS, values, strict=True))))
        return self.code


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[TileLaunches]:
    made = TileLaunches()
    monkeypatch.setattr(peer, "_native", made.module())
    monkeypatch.setattr(peer.Replication, "holds", lambda *of: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda index: -1)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda index: -1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    yield made


def bound(call: GemmReductionCall, monkeypatch: pytest.MonkeyPatch) -> PeerTiles:
    arena = MadeUpArena(Layout.of(memory_plan("0", [call.reduction])))
    monkeypatch.setattr(transport, "of", lambda name: arena)
    site = bind(call, call.encode(), "op", lambda: None)
    assert isinstance(site, PeerTiles)
    return site


def test_what_is_handed_to_the_kernel(launches: TileLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(world=2, residual_sharded=True, sum_out=SumOut.SHARDED)
    site = bound(call, monkeypatch)
    a, weight = torch.ones(300, DEPTH, dtype=torch.bfloat16), torch.ones(HIDDEN, 2 * DEPTH, dtype=torch.bfloat16)
    residual, scale = torch.ones(3, 100, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN)
    gemm = gemm_of(a, weight[:, :DEPTH], "nk", call)
    results = site.run(gemm, EpilogueOperands(residual=residual, weight=scale))
    assert results is not None and [each.shape for each in results] == [residual.shape] * 2
    (seen,) = launches.products
    tiles, matrix, given = seen.tiles, seen.matrix, seen.parameters
    assert (seen.tokens, seen.stream, seen.a, seen.a_stride) == (300, 77, a.data_ptr(), DEPTH)
    assert (tiles.tile_columns, tiles.group_pairs, tiles.reducer_ctas) == (256, 1, 4)
    assert (matrix.data, matrix.stride, matrix.k) == (weight.data_ptr(), 2 * DEPTH, DEPTH)
    assert (seen.residual, given.weight, given.fp32) == (residual.data_ptr(), scale.data_ptr(), 1 << 3)
    assert (seen.normalized, seen.sum) == tuple(each.data_ptr() for each in results)
    assert (given.reduced_bias, given.post_weight, given.post_bias, given.bias) == (0,) * 4
    (made,) = launches.sites
    assert made.staging_bytes >= 2 * TOKENS // 2 * HIDDEN * 2 and not made.sum_whole


def test_the_library_runs_what_the_device_or_the_plan_does_not_take(
    launches: TileLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(world=2)
    site = bound(call, monkeypatch)

    def run(tokens: int, depth: int = DEPTH) -> object:
        a, weight = (torch.ones(rows, depth, dtype=torch.bfloat16) for rows in (tokens, HIDDEN))
        return site.run(gemm_of(a, weight, "nk", call), EpilogueOperands(weight=torch.ones(HIDDEN)))

    assert run(TOKENS + 1) is None, "more than the buffers have room for"
    assert run(TOKENS) is not None and len(launches.products) == 1
    launches.why_not = "another chip"
    assert run(TOKENS) is not None, "what a device can compute at one depth does not change"
    assert run(TOKENS, DEPTH + 8) is None
    results = run(0)
    assert results is not None and len(launches.products) == 2, "no rows launch nothing"
