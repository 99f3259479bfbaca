"""One rank of `test_gemm_tiles`: the kernel that computes the product against the reference. Started by torchrun.

Uninitialized memory is filled with NaN: a row that nobody wrote, or that was sent before it was made, shows.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.gemm_ranks import DEPTH, inputs_of, run_op
from tests.gpu.op_cases import TIMEOUT_S, Case, make_call
from tests.tolerances import KERNEL, assert_close
from weaveopt import _native
from weaveopt.fabrics import peer, topology
from weaveopt.ops.gemm_all_reduce.call import TILES, Cut, GemmReductionCall
from weaveopt.ops.gemm_all_reduce.reference import reference
from weaveopt.reductions.buffers import memory_plan
from weaveopt.reductions.variant import Algorithm, KernelRow, Transfer

CASES = (Case(), Case(norm=None), Case(residual=False), Case(reduced_bias=True, scale=0.5))
CUTS = (Cut(256, 4), Cut(128, 1))
TOKENS = (0, 1, 2, 127, 129, 300, 513, 1000)
MAX_TOKENS = 1024


def call_of(case: Case, hidden: int, dtype: str, cut: Cut) -> GemmReductionCall:
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
    """What plans take for granted is what the device says."""
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


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with torch.no_grad():
        limits()
        grid(rank)
        shifted(rank)
        replayed(rank)
    torch.cuda.synchronize()
    dist.barrier()
    print(f"rank {rank}: tiles agree", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
