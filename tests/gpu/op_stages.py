"""Parts that `op_ranks` and `host_ranks` share: all kernels in one CUDA graph, and how a rank joins and runs stages."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from tests.gpu.op_cases import (
    Case,
    Inputs,
    Kernel,
    Results,
    check,
    make_inputs,
    plan_of,
    reference_of,
    run_op,
    unsupported,
)
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.variant import KernelRow
from weaveopt.records.memory import MemoryPlan
from weaveopt.records.norm import Quant

REPLAYS, FEW_REPLAYS = 10_000, 200
GRAPH_CASES = ((1, Case()), (40, Case(scale_tensor=True)), (200, Case(quant=Quant.PER_TOKEN)))
"""Tokens and form of the calls in a graph, of each kernel."""
MakeCall = Callable[[Case, int, str, int, tuple[KernelRow, ...]], ReductionCall]
"""The call of (case, hidden, dtype, world, table), on the fabric that is tested."""
_alive: list[object] = []
"""Captured graphs hold addresses of arenas to the end."""


def keep(graph: torch.cuda.CUDAGraph) -> None:
    _alive.append(graph)


def same_on_all_ranks(result: torch.Tensor) -> bool:
    """True if all ranks hold the same bits, compared on the CPU."""
    own = result.reshape(-1).view(torch.uint8).cpu()
    first = own.clone()
    dist.broadcast(first, 0)
    return torch.equal(own, first)


def check_results(kernel: Kernel, case: Case, inputs: Inputs, call: ReductionCall, got: Results, when: str) -> None:
    """Against the reference, and between the ranks."""
    rank, tokens = dist.get_rank(), inputs.partials[0].shape[0]
    what = f"{kernel.name}, {tokens} tokens of {call.hidden} {call.dtype}, {case}{when}"
    check(got, reference_of(inputs, call), call, tokens, rank, what, quant_scale=inputs.operands.quant_scale)
    assert same_on_all_ranks(got[0]), f"normalized rows differ between ranks: {what}"
    if call.sum_out is SumOut.WHOLE:
        assert same_on_all_ranks(got[1]), f"the sum differs between ranks: {what}"


def in_one_graph(
    quick: bool, kernels: Iterable[Kernel], make_call: MakeCall, reserve: Callable[[MemoryPlan], object]
) -> str:
    """All kernels in one CUDA graph: every replay gives the bits of the first."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cases = [
        (kernel, tokens, case)
        for kernel in kernels
        for tokens, case in GRAPH_CASES
        if not unsupported(kernel, case, 4096, "bfloat16", world)
    ]
    calls = [make_call(case, 4096, "bfloat16", world, (kernel.row(256),)) for kernel, _, case in cases]
    inputs = [make_inputs(case, tokens, 4096, torch.bfloat16, world, seed=tokens) for _, tokens, case in cases]
    reserve(plan_of(calls))

    def step() -> list[Results]:
        return [run_op(values, rank, call) for values, call in zip(inputs, calls, strict=True)]

    def check_all(every: Sequence[Results], when: str) -> None:
        for (kernel, _, case), call, values, got in zip(cases, calls, inputs, every, strict=True):
            check_results(kernel, case, values, call, got, when)

    check_all(step(), ", before the capture")
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        captured = step()
        flat = [result.reshape(-1).view(torch.uint8) for results in captured for result in results if result.numel()]
        first = [torch.empty_like(values) for values in flat]
        for found, expected in zip(flat, first, strict=True):
            differing += (found != expected).sum()
    dist.barrier()
    graph.replay()
    for found, expected in zip(flat, first, strict=True):
        expected.copy_(found)
    check_all(captured, ", first replay")
    differing.zero_()
    replays = FEW_REPLAYS if quick else REPLAYS
    for _ in range(replays):
        graph.replay()
    assert int(differing) == 0, f"{int(differing)} bytes differ from the first replay"
    assert all(same_on_all_ranks(results[0]) for results in captured), "ranks differ after the last replay"
    keep(graph)
    return f"{len(calls)} calls, {replays} replays"


def parser_of(stages: Iterable[str]) -> argparse.ArgumentParser:
    """Options of a rank: `--quick`, and which stages run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", choices=sorted(stages), default=list(stages))
    return parser


def join() -> None:
    """Join the ranks that torchrun started, each with a GPU of its own."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:nccl")


def run_and_exit(only: Sequence[str], stages: Mapping[str, Callable[[], str]]) -> None:
    """Run the stages, and end the process: NCCL's communicator cannot be destroyed while captured graphs hold it."""
    rank = dist.get_rank()
    for name in only:
        started = time.monotonic()
        told = stages[name]()
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 0:
            print(f"stage {name}: {told} ({time.monotonic() - started:.1f} s)", flush=True)
    print(f"rank {rank}: every stage passed", flush=True)
    sys.stdout.flush()
    os._exit(0)
