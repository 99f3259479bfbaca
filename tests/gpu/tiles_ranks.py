"""One rank of `test_gemm_tiles`: the kernel whose tiles leave while it runs, against the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import Place, barrier, run_and_exit
from benchmarks.timing import capture as captured
from tests.gpu.op_cases import BULK, GEMMA, TIMEOUT_S, Case, make_call, make_inputs
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt import _native
from weaveopt.fabrics import peer, topology
from weaveopt.fabrics.peer import PeerArena
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.peer import native_site
from weaveopt.ops.reduction.reference import reference

CASES = (
    Case(sum_out=SumOut.SHARDED),
    Case(),
    Case(norm=GEMMA, wide_weights=True, sum_out=SumOut.NONE),
    Case(norm=None),
    Case(residual=False, sum_out=SumOut.NONE),
    Case(reduced_bias=True, scale=0.125, scale_tensor=True, sum_out=SumOut.SHARDED),
)
SHAPES = ((1, 1024, 64), (37, 2880, 520), (300, 4096, 1000), (1000, 8192, 512), (2100, 1032, 72))
"""Tokens, columns, depth."""
CUTS = ((256, 1, 4), (128, 2, 2), (256, 4, 0))
"""Columns of a tile, pairs of panels in a wave group, CTAs that finish rows."""
REPLAYS = 2000


class Site:
    """A call bound to the arena, whose buffers are those of the bulk kernel for twice the tokens."""

    def __init__(self, memory: PeerArena, call: ReductionCall) -> None:
        self.native = _native.GpuAllReduceNorm(memory.native, native_site(call, 77, memory.layout))
        self.call, self.index = call, memory.device

    def run(
        self, a: Tensor, weight: Tensor, operands: EpilogueOperands, cut: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        call, tokens = self.call, a.shape[0]
        normalized, total = (
            torch.full((tokens, call.hidden), float("nan"), device=a.device, dtype=a.dtype) for _ in range(2)
        )
        vectors = (*operands.vectors, operands.scale)
        fp32 = sum(1 << i for i, x in enumerate(vectors) if x is not None and x.dtype is torch.float32)
        pointers = [0 if x is None else x.data_ptr() for x in vectors]
        residual = 0 if operands.residual is None else operands.residual.data_ptr()
        code = self.native.run_product(
            tokens, _native.TileConfig(*cut), torch.cuda.current_stream().cuda_stream, a.data_ptr(), a.stride(0),
            _native.GemmMatrix(weight.data_ptr(), weight.stride(0), a.shape[1]), residual,
            _native.ReductionParameters(*[*pointers, 0, fp32]),
            0 if call.norm is None else normalized.data_ptr(),
            0 if call.sum_out is SumOut.NONE else total.data_ptr(),
        )  # fmt: skip
        assert code == 0, _native.cuda_error_text(code)
        return normalized, total


def bound(case: Case, hidden: int, dtype: str, tokens: int) -> Site:
    call = make_call(case, hidden, dtype, dist.get_world_size(), (BULK.row(2 * tokens + 2),))
    call = replace(call, residual_sharded=case.sum_out is SumOut.SHARDED)
    memory = peer.reserve(topology.discover("0", TIMEOUT_S), memory_plan("0", [call]), 0, TIMEOUT_S)
    return Site(memory, call)


def factors_of(world: int, tokens: int, hidden: int, k: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator("cuda").manual_seed(tokens + k)
    return [
        (
            torch.randn(tokens, k, generator=random, device="cuda").to(dtype),
            (torch.randn(hidden, k, generator=random, device="cuda") / k**0.5).to(dtype),
        )
        for _ in range(world)
    ]


def grid(place: Place) -> None:
    for (index, case), (tokens, hidden, k), dtype in itertools.product(
        enumerate(CASES), SHAPES, ("bfloat16", "float16")
    ):
        site, cut = bound(case, hidden, dtype, tokens), CUTS[(index + tokens) % len(CUTS)]
        kind = getattr(torch, dtype)
        factors = factors_of(place.world, tokens, hidden, k, kind)
        operands = make_inputs(case, tokens, hidden, kind, place.world, seed=tokens).operands
        want = reference([a @ w.t() for a, w in factors], operands, site.call)
        rows = slice(None)
        if case.sum_out is SumOut.SHARDED:
            rows = slice(*(tokens * (place.rank + step) // place.world for step in (0, 1)))
        what = f"{tokens} x {hidden} x {k} {dtype}, cut {cut}, {case}, rank {place.rank}"
        barrier()
        for _ in range(2):
            normalized, total = site.run(*factors[place.rank], operands, cut)
            if case.norm is not None:
                assert_close(normalized, want[0], KERNEL, f"{what}, normalized", kind)
            if case.sum_out is not SumOut.NONE:
                assert_close(total[rows], want[1][rows], KERNEL, f"{what}, sum", kind)
        barrier()


def replays(place: Place, tokens: int, hidden: int, k: int, count: int = REPLAYS) -> None:
    """A graph of several calls, again and again: the bits of the first time."""
    site = bound(CASES[0], hidden, "bfloat16", tokens)
    factors = factors_of(place.world, tokens, hidden, k, torch.bfloat16)[place.rank]
    operands = make_inputs(CASES[0], tokens, hidden, torch.bfloat16, place.world, seed=1).operands
    pool = torch.cuda.graph_pool_handle()
    found: list[Tensor] = []

    def step() -> None:
        found[:] = [site.run(*factors, operands, cut)[0] for cut in CUTS]

    graph = captured(step, pool)
    graph.replay()
    torch.cuda.synchronize()
    first = [each.clone() for each in found]
    for _ in range(count):
        graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(found, first, strict=True):
        assert torch.equal(got, want), "a replay gives other bits"
        assert torch.equal(got, found[0]), "cuts give other bits"
    barrier()


def program(place: Place) -> None:
    with torch.no_grad():
        grid(place)
        replays(place, 700, 2048, 512)
        # Rows so wide that the ring has an odd number of slots, which both teams use in turn.
        replays(place, 1024, 8192, 256)
        # The most tiles that a benchmark has, over many waves.
        replays(place, 16384, 8192, 14336, count=20)
    print("tiles agree", flush=True)


if __name__ == "__main__":
    run_and_exit(program)
