"""One rank of `test_gemm_tiles`: the operation's variant `tiles`, called as graphs call it, and by compiled blocks.

Uninitialized memory is filled with NaN while calls are compared with the reference: a row that was never written, or
that was sent before it was made, shows.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import weaveopt
from tests.gpu.gemm_ranks import DEPTH, inputs_of, run_op
from tests.gpu.op_cases import BULK, TIMEOUT_S, Case, make_call
from tests.gpu.profiles import with_curves, written_once
from tests.graphs import forms
from tests.graphs.tolerances import KERNEL, LIBRARY, assert_close
from weaveopt import _native, cost_model
from weaveopt.cost_model.machine import Curve, Point
from weaveopt.cost_model.tile_config import TILES, TileConfig
from weaveopt.fabrics import peer, topology
from weaveopt.ops.gemm_comm.all_reduce.call import ALL_REDUCE, GemmReductionCall, TileOutput
from weaveopt.ops.gemm_comm.all_reduce.reference import reference
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import SumOut
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer

RULE, OTHER = "gemm_all_reduce", "all_reduce_rms_norm"
CASES = (Case(), Case(norm=None), Case(residual=False), Case(reduced_bias=True, scale=0.5))
CUTS = (TileConfig(256, 1, 4), TileConfig(128, 2, 0))
TOKENS = (0, 1, 2, 127, 129, 300, 513, 1000)
MAX_TOKENS = 1024
POINTS = (Point(1 << 10, 1.0), Point(1 << 30, 2.0))


def call_of(case: Case, hidden: int, dtype: str, cut: TileConfig) -> GemmReductionCall:
    row = KernelRow(MAX_TOKENS, Algorithm.TWO_SHOT, Transfer.TILES)
    reduction = make_call(case, hidden, dtype, dist.get_world_size(), (row,))
    return GemmReductionCall(replace(reduction, site=f"{reduction.site} {cut}", in_pieces=False), TILES, (), cut)


def reserve(call: GemmReductionCall) -> None:
    peer.reserve(topology.discover("0", TIMEOUT_S), memory_plan("0", [call.reduction]), 0, TIMEOUT_S)


def grid(rank: int) -> None:
    """Dtypes, forms, cuts and ragged token counts, each twice; ranks hold the same bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for dtype, (index, case), cut, hidden in itertools.product(
        ("bfloat16", "float16"), enumerate(CASES), CUTS, (4096, 1000)
    ):
        call = call_of(case, hidden, dtype, cut)
        reserve(call)
        for tokens in TOKENS:
            factors, rest = inputs_of(case, tokens, hidden, getattr(torch, dtype), "nk", seed=tokens + index)
            want = reference(factors, "nk", rest, call)
            what = f"{tokens} tokens, {call}"
            first, again = (run_op(factors[rank], "nk", rest, call) for _ in range(2))
            for got, repeated, expected in zip(first, again, want, strict=True):
                assert got.shape == expected.shape, what
                assert_close(got, expected, KERNEL, what, getattr(torch, dtype))
                assert torch.equal(got, repeated), f"two runs differ: {what}"
                everyone = [torch.empty_like(got) for _ in range(dist.get_world_size())]
                dist.all_gather(everyone, got)
                assert all(torch.equal(got, other) for other in everyone), f"ranks differ: {what}"
    torch.use_deterministic_algorithms(False)


def limits() -> None:
    """Limits that plans assume agree with those that the device reports."""
    dtype, world, device = _native.DType.bfloat16, dist.get_world_size(), torch.cuda.current_device()
    most = _native.PRODUCT_MOST_HIDDEN
    assert not _native.product_unsupported(dtype, most, DEPTH, world, device)
    assert _native.product_unsupported(dtype, most + 8, DEPTH, world, device)
    assert _native.product_unsupported(dtype, most, DEPTH + 4, world, device)


def shifted(rank: int) -> None:
    """Rows that begin at odd places are copied, on one rank alone if need be."""
    case, hidden, tokens = Case(), 1024, 300
    call = call_of(case, hidden, "bfloat16", CUTS[0])
    reserve(call)
    factors, rest = inputs_of(case, tokens, hidden, torch.bfloat16, "nk", seed=5)
    a, weight = factors[rank]
    if rank == 0:
        wide = torch.empty(tokens, DEPTH + 3, device="cuda", dtype=torch.bfloat16)
        wide[:, 1:-2] = a
        a = wide[:, 1:-2]
    for got, expected in zip(run_op((a, weight), "nk", rest, call), reference(factors, "nk", rest, call), strict=True):
        assert_close(got, expected, KERNEL, "shifted rows", torch.bfloat16)


def replayed(rank: int) -> None:
    """Several calls in a row, then from a CUDA graph with other inputs."""
    case, hidden, tokens = Case(), 4096, 1000
    call = call_of(case, hidden, "bfloat16", CUTS[0])
    reserve(call)
    steps = [inputs_of(case, tokens, hidden, torch.bfloat16, "nk", seed) for seed in range(3)]

    def run() -> list[tuple[Tensor, ...]]:
        return [run_op(factors[rank], "nk", rest, call) for factors, rest in steps]

    def check(results: list[tuple[Tensor, ...]], what: str) -> None:
        for index, ((factors, rest), got) in enumerate(zip(steps, results, strict=True)):
            for result, expected in zip(got, reference(factors, "nk", rest, call), strict=True):
                assert_close(result, expected, KERNEL, f"{what}, step {index}", torch.bfloat16)

    for turn in range(3):  # the first one binds, and so meets in the store
        check(run(), f"turn {turn}")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for turn in range(3):
        random = torch.Generator("cuda").manual_seed(100 + turn)
        for factors, _ in steps:
            for a, _ in factors:  # of every rank, so that all draw the same numbers
                a.copy_(torch.randn(a.shape, generator=random, device="cuda"))
        graph.replay()
        check(captured, f"replay {turn}")
    _alive.append(graph)


_alive: list[object] = []
"""Captured graphs hold addresses of arenas to the end."""


def sharded(rank: int) -> None:
    """Three calls in a chain whose sums stay sharded; the second in bulk."""
    hidden, tokens, world = 4096, 1000, dist.get_world_size()
    first = call_of(Case(sum_out=SumOut.SHARDED), hidden, "bfloat16", CUTS[0])
    last = replace(first, reduction=replace(first.reduction, site="last", residual_sharded=True, sum_out=SumOut.WHOLE))
    bulk = make_call(Case(sum_out=SumOut.SHARDED), hidden, "bfloat16", world, (BULK.row(MAX_TOKENS),))
    bulk = replace(bulk, residual_sharded=True)
    plan = memory_plan("0", [first.reduction, bulk, last.reduction])
    peer.reserve(topology.discover("0", TIMEOUT_S), plan, 0, TIMEOUT_S)
    factors, rest = inputs_of(Case(), tokens, hidden, torch.bfloat16, "nk", seed=11)
    whole = call_of(Case(), hidden, "bfloat16", CUTS[0])
    known = rest
    for _ in range(3):
        normalized, want = reference(factors, "nk", known, whole)
        known = rest._replace(residual=want)
    for _ in range(3):
        _, total = run_op(factors[rank], "nk", rest, first)
        partial = torch.mm(factors[rank][0], factors[rank][1].t())
        more = rest._replace(residual=total)
        _, total = torch.ops.weave.all_reduce_norm(partial, *more[:7], bulk.encode())
        got = run_op(factors[rank], "nk", rest._replace(residual=total), last)
        for result, expected in zip(got, (normalized, want), strict=True):
            assert_close(result, expected, LIBRARY, "sums that stay sharded", torch.bfloat16)


def profile() -> str:
    """h200x4 with times of the kernel in place of those measured: so short that it is chosen wherever it can run."""
    base, world = cost_model.load("h200x4"), dist.get_world_size()
    curves = (
        Curve("fused", RULE, ALL_REDUCE.name_of(CUTS[0], depth, output.variant), world, POINTS, 4096)
        for output in TileOutput
        for depth in (64, 8192)
    )
    return written_once(with_curves(base, "short", curves))


def compiled(rank: int) -> None:
    """Two layers that the rule rewrites with tiles, with and without CUDA graphs, against eager."""
    tokens, hidden = 2048, 4096
    shared, own = (torch.Generator("cuda").manual_seed(seed) for seed in (3, 7 + rank))

    def random(*shape: int, generator: torch.Generator) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") / shape[-1] ** 0.5).bfloat16()

    down, up = random(hidden, DEPTH, generator=own), random(DEPTH, hidden, generator=own)
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        for _ in range(2):
            product = torch.nn.functional.linear(x, down)
            residual = residual + functional.all_reduce(product, "sum", dist.group.WORLD)
            x = forms.rms(residual, norm) @ up.t()
        return x, residual

    machine = profile()
    for cuda_graphs in (False, True):
        torch._dynamo.reset()
        options = {
            "machine": machine, "strict": True, "timeout_s": 30.0, "cuda_graphs": cuda_graphs, "disable": [OTHER],
        }  # fmt: skip
        run = torch.compile(block, backend="weave", options=options)  # type: ignore[call-overload]
        for _ in range(4):
            x, residual = random(tokens, DEPTH, generator=own), random(tokens, hidden, generator=shared)
            for got, want in zip(run(x, residual), block(x, residual), strict=True):
                assert_close(got, want, LIBRARY, f"cuda_graphs={cuda_graphs}")
        first, second = (each.chosen for each in weaveopt.report().graphs[-1].decisions)
        assert first.choice == second.choice == RULE
        # The second sum is read whole: its norm may stay in the graph.
        assert first.variant == TILES and second.variant.startswith(TILES), (first.variant, second.variant)


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with torch.no_grad():
        limits()
        grid(rank)
        shifted(rank)
        replayed(rank)
        sharded(rank)
        compiled(rank)
    torch.cuda.synchronize()
    dist.barrier()
    print(f"rank {rank}: the operation agrees", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
