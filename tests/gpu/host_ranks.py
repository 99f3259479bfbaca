"""One rank of `test_host_gpu`: the fused op through memory of the host. Started by torchrun; `--quick`: a few cases,
`--only`: some of the stages, `--transfers`: some of the kernels.

Nothing here asks for peer access, and neither does the library.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.op_cases import (
    CASES,
    DTYPES,
    HIDDENS,
    HOST_KERNELS,
    LL_PACKET_TWO_SHOT,
    TIMEOUT_S,
    Case,
    Inputs,
    Kernel,
    check,
    make_call,
    make_inputs,
    own_rows,
    plan_of,
    reference_of,
    run_op,
    unsupported,
)
from tests.gpu.op_stages import check_results, in_one_graph, join, parser_of, run_and_exit
from weaveopt.fabrics import host, topology
from weaveopt.fabrics.host import HostArena
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.variant import Algorithm, KernelRow
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import MemoryPlan


def call_of(case: Case, hidden: int, dtype: str, world: int, table: tuple[KernelRow, ...]) -> ReductionCall:
    return replace(make_call(case, hidden, dtype, world, table), fabric=Fabric.HOST)


def reserve(plan: MemoryPlan) -> HostArena:
    return host.reserve(topology.discover("0", TIMEOUT_S), plan, 0, TIMEOUT_S)


def run_checked(kernel: Kernel, case: Case, inputs: Inputs, call: ReductionCall) -> None:
    check_results(kernel, case, inputs, call, run_op(inputs, dist.get_rank(), call), "")


def grid(quick: bool, kernels: Sequence[Kernel]) -> str:
    """Every kernel, dtype and case, at sizes of one row and of many units."""
    world, count = dist.get_world_size(), 0
    hiddens, tokens_of = (HIDDENS[1:2], slice(1, 4)) if quick else (HIDDENS, slice(None))
    for kernel, hidden, dtype in itertools.product(kernels, hiddens, DTYPES):
        cases = [case for case in CASES if not unsupported(kernel, case, hidden, dtype, world)]
        for index, case in enumerate(cases):
            call = call_of(case, hidden, dtype, world, (kernel.row(),))
            reserve(plan_of([call]))
            every = kernel.tokens[tokens_of]
            # All sizes of the first case, one of each other.
            for tokens in every if index == 0 else every[index % len(every) :][:1]:
                if tokens * hidden > 1 << 25:
                    continue
                inputs = make_inputs(case, tokens, hidden, getattr(torch, dtype), world, seed=tokens + index)
                run_checked(kernel, case, inputs, call)
                count += 1
    return f"{count} calls"


def chain(quick: bool, kernels: Sequence[Kernel]) -> str:
    """Calls back to back whose residual and sum stay sharded, by all two-shot kernels in turn; ranks fall behind."""
    rank, world, hidden = dist.get_rank(), dist.get_world_size(), 4096
    case = Case(sum_out=SumOut.SHARDED)
    kernels = [
        kernel
        for kernel in kernels
        if kernel.algorithm is Algorithm.TWO_SHOT and not unsupported(kernel, case, hidden, "bfloat16", world)
    ]
    calls = [
        replace(call_of(case, hidden, "bfloat16", world, (kernel.row(256),)), residual_sharded=True)
        for kernel in kernels
    ]
    reserve(plan_of(calls))
    rounds = 4 if quick else 40
    for seed in range(rounds):
        tokens = 1 + 37 * seed % 256
        residual: torch.Tensor | None = None
        want: torch.Tensor | None = None
        for index, call in enumerate(calls):
            values = make_inputs(case, tokens, hidden, torch.bfloat16, world, seed=100 * seed + index)
            want = values.operands.residual if want is None else want
            assert want is not None
            rows = own_rows(call, tokens, rank)
            if residual is None:
                residual = torch.full_like(want, float("nan"))
                residual.view(tokens, -1)[rows] = want.view(tokens, -1)[rows]
            if (seed + rank) % world == 0:
                torch.cuda._sleep(200_000)
            got = run_op(values, rank, call, residual)
            expected = reference_of(values, call, want)
            check(got, expected, call, tokens, rank, f"round {seed}, {call.site}")
            # Rows that a rank does not own are poisoned: a kernel that read them would spread them.
            residual, want = torch.full_like(got[1], float("nan")), expected[1]
            residual.view(tokens, -1)[rows] = want.view(tokens, -1)[rows]
    return f"{rounds * len(calls)} calls"


def graphs(quick: bool, kernels: Sequence[Kernel]) -> str:
    return in_one_graph(quick, kernels, call_of, reserve)


def one_token(quick: bool, _: Sequence[Kernel]) -> str:
    """One token, no norm, a sum that stays sharded: only its owner gets data, and tags alone keep ranks in step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case = Case(sum_out=SumOut.SHARDED, norm=None)
    call = call_of(case, 4096, "bfloat16", world, (LL_PACKET_TWO_SHOT.row(1),))
    reserve(plan_of([call]))
    rounds = 64 if quick else 640
    for seed in range(rounds):
        inputs = make_inputs(case, 1, 4096, torch.bfloat16, world, seed)
        if seed % 7 == rank:
            torch.cuda._sleep(30_000)
        check(run_op(inputs, rank, call), reference_of(inputs, call), call, 1, rank, f"call {seed} of one token")
    return f"{rounds} calls"


def nothing_grows(quick: bool, _: Sequence[Kernel]) -> str:
    """Arenas that are made, outgrown and released leave no memory, mapping, descriptor or name behind."""
    world = dist.get_world_size()

    def state() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped = sum("memfd:weaveopt" in line for line in maps)
        return mapped, len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))

    host.release("0")
    dist.barrier()
    before = state()
    for turn in range(3 if quick else 20):
        call = call_of(Case(), 4096, "bfloat16", world, (LL_PACKET_TWO_SHOT.row(64 << turn % 3),))
        reserve(plan_of([call]))
        inputs = make_inputs(Case(), 7, 4096, torch.bfloat16, world, seed=turn)
        run_checked(LL_PACKET_TWO_SHOT, Case(), inputs, call)
        host.release("0")
        dist.barrier()
    after = state()
    assert after[0] == before[0] and after[2] == before[2], (before, after)
    assert after[1] <= before[1] + world, "a pidfd of each peer at most"
    return f"{after[0]} segments mapped"


STAGES: dict[str, Callable[[bool, Sequence[Kernel]], str]] = {
    "nothing_grows": nothing_grows, "grid": grid, "chain": chain, "one_token": one_token, "graphs": graphs,
}  # fmt: skip


def main() -> None:
    parser = parser_of(STAGES)
    transfers = sorted({kernel.transfer.value for kernel in HOST_KERNELS})
    parser.add_argument("--transfers", nargs="*", choices=transfers, default=transfers)
    arguments = parser.parse_args()
    kernels = [kernel for kernel in HOST_KERNELS if kernel.transfer.value in arguments.transfers]
    os.environ["NCCL_P2P_DISABLE"] = "1"
    join()
    run_and_exit(arguments.only, {name: partial(stage, arguments.quick, kernels) for name, stage in STAGES.items()})


if __name__ == "__main__":
    main()
