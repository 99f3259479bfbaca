"""`weave::gemm_reduce_scatter_norm`: the kernel's arguments without a GPU, and on spawned CPU ranks what it computes.

Inputs of those are small integers, so products and sums are exact and results equal the reference bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

import weaveopt.ops  # noqa: F401
from tests.graphs import forms
from tests.graphs.executing import executing
from tests.ops.test_scatter_gather_peer_call import Launches, fields, launches, ones, scatter_site  # noqa: F401
from tests.ranks import run_ranks
from weaveopt import _native
from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.errors import AgreementError, WeaveError
from weaveopt.fabrics import shm, topology
from weaveopt.fabrics.rows_call import decode, memory_plan
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterNormCall, Products
from weaveopt.ops.gemm_comm.reduce_scatter.op import SITES
from weaveopt.ops.gemm_comm.reduce_scatter.peer import PeerGemmReduceScatter
from weaveopt.ops.gemm_comm.reduce_scatter.reference import add_and_normalize, reference_norm
from weaveopt.records.candidate import Fabric
from weaveopt.records.report import GraphReport
from weaveopt.rewrites.shard_norm import candidates as lowering
from weaveopt.rewrites.shard_norm import rule

TOKENS, HIDDEN, DEPTH = 512, 256, 64
CUT = TileConfig(256, 2, 16)
CALL = GemmReduceScatterNormCall(
    site="down", group="0", fabric=Fabric.PEER, world=2, hidden=HIDDEN, dtype="bfloat16", max_tokens=TOKENS,
    timeout_s=30.0, cut=str(CUT), eps=1e-5, weight_offset=1.0, cast_before_weight=True,
)  # fmt: skip


def test_a_call_is_encoded() -> None:
    assert decode(GemmReduceScatterNormCall, CALL.encode()) == CALL
    assert CALL.scatter.cut == CALL.cut and (CALL.scatter.scale, CALL.scatter.columns) == (1.0, False)
    with pytest.raises(WeaveError, match="not an encoded GemmReduceScatterNormCall"):
        decode(GemmReduceScatterNormCall, CALL.scatter.encode().replace("}", ',"other":1}'))


def test_shapes_are_known_without_peers() -> None:
    with FakeTensorMode():
        a, b = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(16, HIDDEN, dtype=torch.bfloat16)
        given = torch.empty(4, HIDDEN, dtype=torch.bfloat16), torch.empty(HIDDEN)
        found = torch.ops.weave.gemm_reduce_scatter_norm(a, b, *given, CALL.encode())
        assert [(tuple(each.shape), each.dtype) for each in found] == [((4, HIDDEN), torch.bfloat16)] * 2
        among = replace(CALL, full_size_sum=True)
        found = torch.ops.weave.gemm_reduce_scatter_norm(a, b, *given, among.encode())
        assert [tuple(each.shape) for each in found] == [(4, HIDDEN), (8, HIDDEN)]
        with pytest.raises(WeaveError, match="planned for bfloat16"):
            torch.ops.weave.gemm_reduce_scatter_norm(a.half(), b.half(), *given, CALL.encode())


# --- which kernel gets what -------------------------------------------------------------------------------------------


@pytest.fixture
def site(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerGemmReduceScatter]:  # noqa: F811
    yield scatter_site(CALL.scatter, monkeypatch)


def test_one_kernel_gets_all_of_it(site: PeerGemmReduceScatter, launches: Launches) -> None:  # noqa: F811
    a, weight, residual = ones(300, DEPTH), ones(HIDDEN, 2 * DEPTH), ones(150, HIDDEN)
    products = Products([a], [weight[:, :DEPTH].t()])
    for scale, is_fp32 in ((ones(HIDDEN), False), (ones(HIDDEN, dtype=torch.float32), True), (None, False)):
        made = site.run_norm(products, residual, scale, CALL)
        assert made is not None
        normalized, total = made
        assert normalized.shape == total.shape == (150, HIDDEN) and normalized.data_ptr() != total.data_ptr()
        [(name, values)] = launches.take()
        assert name == "run_tiles_norm"
        tokens, tiles, rows, stride, matrix, added, norm, parameters, *rest = values
        assert (tokens, rows, stride, added) == (300, a.data_ptr(), DEPTH, residual.data_ptr())
        assert rest == [normalized.data_ptr(), total.data_ptr(), 77]
        assert fields(tiles) == (256, 2, 16) and fields(matrix) == (weight.data_ptr(), 2 * DEPTH, DEPTH)
        assert fields(norm) == (_native.NormKind.rms, pytest.approx(1e-5), 1.0, True)
        assert isinstance(parameters, _native.ReductionParameters)
        assert parameters.weight == (0 if scale is None else scale.data_ptr()) and parameters.fp32 == is_fp32 << 3


def test_the_sum_may_lie_among_the_rows_of_all_ranks(site: PeerGemmReduceScatter, launches: Launches) -> None:  # noqa: F811
    products, call = Products([ones(300, DEPTH)], [ones(HIDDEN, DEPTH).t()]), replace(CALL, full_size_sum=True)
    made = site.run_norm(products, ones(150, HIDDEN), None, call)
    assert made is not None and [tuple(each.shape) for each in made] == [(150, HIDDEN), (300, HIDDEN)]
    [(_, values)] = launches.take()
    assert values[-2] == made[1][150:].data_ptr(), "of rank 1"


def test_rows_that_begin_elsewhere_are_copied(site: PeerGemmReduceScatter, launches: Launches) -> None:  # noqa: F811
    products = Products([ones(8, DEPTH)], [ones(HIDDEN, DEPTH).t()])
    residual, scale = ones(HIDDEN, 4).t(), ones(HIDDEN + 1)[1:]
    assert site.run_norm(products, residual, scale, CALL) is not None
    [(_, values)] = launches.take()
    assert isinstance(values[7], _native.ReductionParameters)
    found = (values[5], values[7].weight)
    assert residual.data_ptr() != found[0] and scale.data_ptr() != found[1]
    assert all(isinstance(each, int) and each % 16 == 0 for each in found)


def test_what_the_kernel_does_not_take(
    site: PeerGemmReduceScatter, launches: Launches, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    b, scale = ones(HIDDEN, DEPTH).t(), ones(HIDDEN)
    more = Products([ones(TOKENS + 2, DEPTH)], [b])
    assert site.run_norm(more, ones(TOKENS // 2 + 1, HIDDEN), scale, CALL) is None
    empty = site.run_norm(Products([ones(0, DEPTH)], [b]), ones(0, HIDDEN), scale, CALL)
    assert empty is not None and [each.shape for each in empty] == [(0, HIDDEN)] * 2 and not launches.calls
    products, residual = Products([ones(8, DEPTH)], [b]), ones(4, HIDDEN)
    without = scatter_site(replace(CALL.scatter, cut=""), monkeypatch)
    assert without.run_norm(products, residual, scale, CALL) is None
    launches.why_not = "another chip"
    other = scatter_site(CALL.scatter, monkeypatch)
    assert other.run_norm(products, residual, scale, CALL) is None and not launches.calls
    launches.code, launches.why_not = 3, ""
    with pytest.raises(WeaveError, match="could not be launched: error 3"):
        scatter_site(CALL.scatter, monkeypatch).run_norm(products, residual, scale, CALL)


# --- on CPU ranks -----------------------------------------------------------------------------------------------------


def small(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run_op(
    a: Tensor, b: Tensor, residual: Tensor, weight: Tensor | None, call: GemmReduceScatterNormCall, *same: Tensor
) -> Sequence[Tensor]:
    found: Sequence[Tensor] = torch.ops.weave.gemm_reduce_scatter_norm(a, b, residual, weight, call.encode(), [*same])
    return found


def made(world: int, rows: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Each rank's GEMM operand; the weight; the whole residual."""
    every = [small(rows * world, 24, seed=10 * rows + each, dtype=dtype) for each in range(world)]
    return every, small(24, 64, seed=1, dtype=dtype), small(rows * world, 64, seed=2, dtype=dtype)


def run_grid(rank: int, world: int) -> int:
    torch.use_deterministic_algorithms(True)  # new tensors start as NaN
    call = replace(CALL, fabric=Fabric.SHM, world=world, hidden=64, dtype="float32", max_tokens=7 * world, cut="")
    plan = memory_plan("0", [(call, SITES[Fabric.SHM].buffers(call.scatter))])
    shm.reserve(topology.discover("0", 30.0), plan, 0, 30.0)
    count = 0
    for rows, name, cast in itertools.product((0, 1, 7, 9), ("bfloat16", "float16", "float32"), (False, True)):
        dtype = getattr(torch, name)
        every, b, residual = made(world, rows, dtype)
        own = residual[rank * rows : (rank + 1) * rows]
        for weight in (None, small(64, seed=3, dtype=dtype), small(64, seed=4, dtype=torch.float32) / 3):
            known = replace(call, dtype=name, cast_before_weight=cast, weight_offset=float(cast))
            for each in (known, replace(known, fabric=Fabric.LIBRARY)):
                got = run_op(every[rank], b, own, weight, each)
                want = reference_norm([a @ b for a in every], residual, weight, each)[rank]
                for found, expected in zip(got, want, strict=True):
                    assert found.dtype is dtype and found.is_contiguous()
                    assert torch.equal(found, expected), f"{rows} rows of {each}"
                _, among = run_op(every[rank], b, own, weight, replace(each, full_size_sum=True))
                assert among.shape == residual.shape
                assert torch.equal(among[rank * rows : (rank + 1) * rows], want[1]), f"{rows} rows of {each}"
                count += 1
    return count


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_their_rows_of_the_reference(world: int) -> None:
    assert run_ranks(run_grid, world, world, timeout_s=240) == [4 * 3 * 2 * 3 * 2] * world


@pytest.mark.parametrize("seed", range(20))
def test_the_reference_is_what_models_compute(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((60, 64), (60, 64), (64,))
    x, residual, weight = (torch.randn(*size, generator=generator).bfloat16() for size in sizes)
    call = replace(CALL, hidden=64, eps=1e-6, weight_offset=0.0)
    normalized, total = add_and_normalize(x.float(), residual, weight, call)
    assert torch.equal(total, x + residual) and torch.equal(normalized, forms.rms(x + residual, weight))
    gemma = replace(call, weight_offset=1.0, cast_before_weight=False)
    normalized, _ = add_and_normalize(x.float(), residual, weight, gemma)
    assert torch.equal(normalized, forms.rms_plus_one(x + residual, weight, call.eps))


def run_misuse(rank: int) -> str:
    call = replace(CALL, fabric=Fabric.LIBRARY, hidden=64, cut="", replicated="norm_weight")
    a, b, residual, weight = (
        small(*size, seed=1, dtype=torch.bfloat16) for size in ((8, 24), (24, 64), (4, 64), (64,))
    )
    for change, said in (
        ({"residual": residual[:3]}, "the residual is"),
        ({"residual": residual.float()}, "expected this rank's rows"),
        ({"weight": weight[:32]}, "the norm's weight is"),
        ({"weight": weight.double()}, "or fp32"),
        ({"a": a[:7]}, "are not 1 block"),
    ):
        given = {"a": a, "b": b, "residual": residual, "weight": weight, **change}
        with pytest.raises(WeaveError, match=said):
            run_op(*given.values(), call)
    run_op(a, b, residual, weight, call, weight)
    try:
        run_op(a, b, residual, weight, replace(call, site="other"), weight + rank)
    except AgreementError as error:
        return str(error)
    return ""


def test_misuse_and_ranks_that_differ() -> None:
    for said in run_ranks(run_misuse, 2):
        assert "weave::gemm_reduce_scatter_norm at site other" in said and "norm_weight" in said


# --- in compiled graphs -----------------------------------------------------------------------------------------------


def as_on_gpus(
    chain: lowering.Chain, at: Topology, machine: Machine, usable_only: bool = False
) -> tuple[lowering.Found, ...]:
    """Candidates of CPU ranks as if their operation held the norm, wherever the kernel on GPUs would."""
    refused = bool(chain.norm_refused) or chain.is_padded
    return tuple(
        (candidate, None if lowered is None else replace(lowered, takes_norm=not refused))
        for candidate, lowered in lowering.candidates(chain, at, machine, usable_only)
    )


def run_compiled(rank: int) -> list[int]:
    """Three layers whose sums stay sharded, node by node and by Inductor; of each graph, whether norms are inside."""
    rule.candidates = as_on_gpus  # type: ignore[assignment]
    same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    x, residual = torch.randn(2, 8, 24, generator=own), torch.randn(2, 8, 48, generator=same)
    downs = [torch.randn(48, 24, generator=own) for _ in range(3)]
    ups = [torch.randn(24, 48, generator=own) for _ in range(3)]
    norms = [torch.randn(48, generator=same) for _ in range(3)]

    def layers(x: Tensor, residual: Tensor) -> Tensor:
        total = residual
        for down, up, norm in zip(downs, ups, norms, strict=True):
            total = total + forms.all_reduce(linear(x, down))
            x = linear(forms.rms(total, norm), up)
        return x.sum() + total

    reports: list[GraphReport] = []
    config = Config(force=("shard_norm",), strict=True, timeout_s=30.0, compile_timeout_s=60.0)
    options = {"force": ["shard_norm"], "strict": True, "timeout_s": 30.0}
    counts = []
    with torch.no_grad():
        want = layers(x, residual)
        for backend in (executing(config, reports), "weave"):
            torch._dynamo.reset()
            more = {"options": options} if backend == "weave" else {}
            run = torch.compile(layers, backend=backend, dynamic=False, fullgraph=True, **more)
            for _ in range(2):
                torch.testing.assert_close(run(x, residual), want, rtol=1e-4, atol=1e-3)
    for report in reports:
        assert [d.chosen.choice for d in report.decisions] == ["shard_norm"] * 3, report.decisions
        counts.append(sum("with the residual in them" in line for line in report.rounding))
    return counts


def test_compiled_layers_compute_as_eager() -> None:
    first, second = run_ranks(run_compiled, 2, timeout_s=240)
    assert first == second and first[0] >= 1
