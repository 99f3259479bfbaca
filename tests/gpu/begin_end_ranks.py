"""One rank of `test_begin_end_gpu`: calls that are begun and ended, against calls in line. Started by torchrun."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.op_cases import (
    BULK,
    CASES,
    DIRECT,
    LL_PACKET_ONE_SHOT,
    LL_PACKET_TWO_SHOT,
    TIMEOUT_S,
    Case,
    Kernel,
    make_call,
    make_inputs,
    plan_of,
    unsupported,
)
from weaveopt.fabrics import peer, topology
from weaveopt.ops.reduction.buffers import communication_channel
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.peer_flight import communication_stream
from weaveopt.records.norm import Quant

KERNELS = (LL_PACKET_ONE_SHOT, LL_PACKET_TWO_SHOT, replace(BULK, num_ctas=8), DIRECT)
HIDDEN = 4096
TOKENS = (0, 1, 65, 200, 1023)
REPLAYS = 1000
Results = list[Tensor]


@dataclass(frozen=True)
class Begun:
    """A call to be begun, and its operands on this rank."""

    call: ReductionCall
    partial: Tensor
    operands: EpilogueOperands

    def begin(self) -> Results:
        results: Results = torch.ops.weave.all_reduce_norm_begin(self.partial, *self.operands[:8], self.call.encode())
        return results

    def end(self, results: Results) -> None:
        in_use = [self.partial, *(each for each in self.operands if each is not None)]
        torch.ops.weave.all_reduce_norm_end(results, in_use, [], self.call.encode())

    def in_line(self) -> Results:
        call = replace(self.call, begun=False, channel=0)
        if call.quant is not Quant.NONE:
            return list(torch.ops.weave.all_reduce_norm_quant(self.partial, *self.operands[:8], call.encode()))
        normalized, total = torch.ops.weave.all_reduce_norm(self.partial, *self.operands[:7], call.encode())
        return [normalized, total, total.new_empty(0, dtype=torch.float32)]


def begun(kernel: Kernel, case: Case, tokens: int, rank: int, seed: int) -> Begun:
    call = make_call(case, HIDDEN, "bfloat16", dist.get_world_size(), (kernel.row(max(TOKENS)),))
    inputs = make_inputs(case, tokens, HIDDEN, torch.bfloat16, dist.get_world_size(), seed)
    call = replace(call, begun=True, channel=communication_channel(), site=f"{call.site}, half {seed}")
    return Begun(call, inputs.partials[rank], inputs.operands)


def reserve(*calls: ReductionCall) -> peer.PeerArena:
    both = [replace(call, begun=is_begun) for call in calls for is_begun in (False, True)]
    return peer.reserve(topology.discover("0", TIMEOUT_S), plan_of(both), 0, TIMEOUT_S)


def expect_equal(got: Results, want: Results, call: ReductionCall, what: str) -> None:
    """Bit for bit; of a sharded sum this rank's rows."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        if index == 1 and call.sum_out is SumOut.SHARDED and a.numel():
            rows = slice(*call.share(a.shape[0], dist.get_rank()))
            a, b = a[rows], b[rows]
        assert a.shape == b.shape and a.dtype is b.dtype, what
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), what


def grid(rank: int) -> None:
    """Every kernel and form: two calls in flight at once, GEMMs between, a call in line after them."""
    a, b = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    count = 0
    for kernel, case, tokens in itertools.product(KERNELS, CASES, TOKENS):
        if case.product or unsupported(kernel, case, HIDDEN, "bfloat16", dist.get_world_size()):
            continue
        halves = [begun(kernel, case, tokens, rank, seed) for seed in (0, 1)]
        reserve(*(half.call for half in halves))
        for half in halves:
            half.in_line()  # the first call of a site compares what it reads with the other ranks
            half.end(half.begin())
        want = [half.in_line() for half in halves]
        product = a @ b
        flights = [half.begin() for half in halves]
        again = a @ b
        for half, results in zip(halves, flights, strict=True):
            half.end(results)
        after = halves[0].in_line()
        what = f"{tokens} tokens, {kernel.name}, {case}"
        for half, got, expected in zip([*halves, halves[0]], [*flights, after], [*want, want[0]], strict=True):
            expect_equal(got, expected, half.call, what)
        assert torch.equal(product, again), f"a GEMM beside calls in flight: {what}"
        count += 1
    assert count > 100, count


def captured(call: Callable[[], list[Results]]) -> tuple[torch.cuda.CUDAGraph, list[Results]]:
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def replays(rank: int) -> None:
    """Two halves in turns in one CUDA graph: begin A, GEMM, begin B, end A, GEMM, end B. Each replay has the same bits,
    and nothing was allocated on the communication stream."""
    for kernel in KERNELS:
        a, b = (begun(kernel, CASES[0], tokens, rank, seed) for seed, tokens in enumerate((200, 65)))
        arena = reserve(a.call, b.call)
        factors = [torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

        def turn(a: Begun = a, b: Begun = b, factors: list[Tensor] = factors) -> list[Results]:
            first = a.begin()
            product = factors[0] @ factors[1]
            second = b.begin()
            a.end(first)
            product = product @ factors[1]
            b.end(second)
            return [first, second, [product, first[0] + 1, second[0] + 1]]

        want = [a.in_line(), b.in_line()]
        for _ in range(2):
            eager = turn()
        for got, expected, half in zip(eager, want, (a, b), strict=False):
            expect_equal(got, expected, half.call, f"eager, {kernel.name}")
        graph, results = captured(turn)
        assert arena.captured
        wanted = [[each.clone() for each in group] for group in eager]
        for replay in range(REPLAYS):
            for group in results:
                for each in group:
                    each.fill_(-1)
            graph.replay()
            if replay % 50 == 0 or replay == REPLAYS - 1:
                for got, expected, half in zip(results, wanted, (a, b, a), strict=True):
                    expect_equal(got, expected, half.call, f"replay {replay}, {kernel.name}")
        alive.append(graph)
    side = communication_stream("0", torch.cuda.current_device()).handle
    segments = torch.cuda.memory_snapshot()
    assert segments and not [each for each in segments if each["stream"] == side], "memory of the communication stream"


def through_the_library(rank: int) -> None:
    """More tokens than the table has, while another call is in flight."""
    small, large = (begun(LL_PACKET_TWO_SHOT, CASES[0], tokens, rank, seed) for seed, tokens in enumerate((65, 1400)))
    reserve(small.call, large.call)
    want = [small.in_line(), large.in_line()]
    for _ in range(2):
        flights = [small.begin(), large.begin()]
        for half, results, expected in zip((small, large), flights, want, strict=True):
            half.end(results)
            expect_equal(results, expected, half.call, f"{results[0].shape[0]} tokens")


alive: list[object] = []
"""Captured graphs hold addresses of arenas to the end."""


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with torch.no_grad():
        grid(rank)
        through_the_library(rank)
        replays(rank)
    torch.cuda.synchronize()
    dist.barrier()
    print(f"rank {rank}: begun calls agree", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
