"""One rank of `test_hosts`: `all_reduce_norm` between GPUs that take themselves for hosts, over NVSHMEM.

WEAVE_HOST is set here: ranks of one machine count as ranks of several. `--fault` has the last rank leave a call out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import replace

import torch
import torch.distributed as dist

import weaveopt.ops  # noqa: F401
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.errors import WeaveError
from weaveopt.fabrics import nvshmem, topology
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.reference import reference
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

MOST = 300
COUNTS = (1, 5, MOST, 2, 64, 1)
HIDDENS = (512, 4096, 8192)
LONGEST = 16384
"""Longest row at 2 bytes an element; longer ones do not fit a CTA."""
PACKET = KernelRow(MOST, Algorithm.DOUBLING, Transfer.PACKET)
FLAGGED = KernelRow(MOST, Algorithm.DOUBLING, Transfer.FLAGGED_ROW)
TABLES = {"packets": (PACKET,), "flagged rows": (FLAGGED,), "both": (replace(PACKET, max_tokens=4), FLAGGED)}
DTYPES = ("bfloat16", "float16", "float32")
REPLAYS = 10_000
Tensor = torch.Tensor


def make_call(world: int, hidden: int, dtype: str, table: str = "packets", timeout_s: float = 30.0) -> ReductionCall:
    return ReductionCall(
        site=f"hosts {hidden} {dtype} {table}", group="0", fabric=Fabric.NVSHMEM, world=world, hosts=world,
        hidden=hidden, dtype=dtype, out_dtype=dtype, max_tokens=MOST, table=TABLES[table],
        post=None, norm=NormSpec(NormKind.RMS, 1e-5), sum_out=SumOut.WHOLE, timeout_s=timeout_s,
    )  # fmt: skip


def rows(tokens: int, hidden: int, dtype: str, seed: int) -> Tensor:
    made = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))
    return made.to(getattr(torch, dtype)).cuda()


def run_op(partial: Tensor, operands: EpilogueOperands, call: ReductionCall) -> tuple[Tensor, Tensor]:
    normalized, total = torch.ops.weave.all_reduce_norm(partial, *operands[:7], call.encode())
    return normalized, total


def compare(rank: int, world: int) -> None:
    seed = 0
    for dtype in DTYPES:
        for hidden in (*HIDDENS, *((LONGEST,) if dtype != "float32" else ())):
            weight = rows(1, hidden, dtype, 1)[0]
            for tokens, table in itertools.product(COUNTS, TABLES):
                call = make_call(world, hidden, dtype, table)
                seed += 100
                partials = [rows(tokens, hidden, dtype, seed + each) for each in range(world)]
                residual = rows(tokens, hidden, dtype, seed + 99) if tokens != 5 else None
                operands = EpilogueOperands(residual=residual, weight=weight)
                got = run_op(partials[rank].clone(), operands, call)
                want = reference(partials, operands, call)
                for mine, expected, what in zip(got, want, ("normalized", "sum"), strict=True):
                    assert_close(mine, expected, KERNEL, f"{call.site}, {tokens} tokens, {what}")
                    theirs = [torch.empty_like(mine) for _ in range(world)]
                    dist.all_gather(theirs, mine)
                    assert all(torch.equal(mine, other) for other in theirs), f"{call.site}: ranks differ in {what}"


def replay(rank: int, world: int) -> None:
    """Captured calls count on the device: every replay sends new numbers. Both transfers in turn, few and many rows."""
    calls = [make_call(world, 4096, "bfloat16", table) for table in ("packets", "flagged rows", "flagged rows")]
    weight = rows(1, 4096, "bfloat16", 1)[0]
    for tokens in (8, MOST):
        partials = [rows(tokens, 4096, "bfloat16", 7 + each) for each in range(world)]
        operands = EpilogueOperands(residual=rows(tokens, 4096, "bfloat16", 5), weight=weight)
        own = partials[rank].clone()
        graph = torch.cuda.CUDAGraph()
        for call in calls:
            run_op(own, operands, call)
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            got = [run_op(own, operands, call) for call in calls]
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        want = reference(partials, operands, calls[0])
        for each in got:
            assert_close(each[0], want[0], KERNEL, f"{tokens} tokens, after replays")
            assert torch.equal(each[0], got[0][0]), f"{tokens} tokens, after replays: transfers differ"


def leave_out(rank: int, world: int, table: str) -> None:
    call = make_call(world, 512, "bfloat16", table, timeout_s=2.0)
    operands = EpilogueOperands(residual=None, weight=rows(1, 512, "bfloat16", 1)[0])
    partial = rows(4, 512, "bfloat16", rank)
    run_op(partial, operands, call)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == world - 1:
        time.sleep(3 * call.timeout_s)  # there, but silent
        return
    try:
        run_op(partial, operands, call)
        torch.cuda.synchronize()
    except WeaveError as error:
        print(f"rank {rank} raised: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=TABLES, help="how the rows travel of the call that is left out")
    fault = parser.parse_args().fault
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["WEAVE_HOST"] = f"host{rank}"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    calls = [make_call(world, hidden, "bfloat16", table) for hidden in (*HIDDENS, LONGEST) for table in TABLES]
    nvshmem.reserve(topology.discover("0", 60.0), memory_plan("0", calls), 0, 60.0)
    if fault:
        leave_out(rank, world, fault)
        os._exit(0)  # nothing on the device can be given back after a kernel gave up
    compare(rank, world)
    replay(rank, world)
    print("every stage passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
