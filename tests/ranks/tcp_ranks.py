"""Calls of the fused op among CPU ranks that take themselves for several hosts, compared with the reference."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

import weaveopt.ops  # noqa: F401
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.fabrics import tcp, topology
from weaveopt.fabrics.tcp import TcpArena
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.reference import reference
from weaveopt.ops.reduction.variant import ALGORITHMS, Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

HIDDEN = 64
MAX_TOKENS = 40
NUM_RESULTS = 12 * 4 * 3 * 2
"""Number of results of `check`: counts and dtypes, paths, forms, tensors."""


def become_host(rank: int, world: int, hosts: int) -> None:
    """Before the group's topology is asked for."""
    os.environ["WEAVE_HOST"] = f"host{rank * hosts // world}"
    os.environ["LOCAL_WORLD_SIZE"] = str(world)


def make_call(
    world: int,
    hosts: int,
    algorithm: Algorithm = Algorithm.TWO_SHOT,
    dtype: str = "float32",
    timeout_s: float = 30.0,
) -> ReductionCall:
    return ReductionCall(
        site=f"site {algorithm} {dtype}", group="0", fabric=Fabric.TCP, world=world, hosts=hosts,
        hidden=HIDDEN, dtype=dtype, out_dtype=dtype, max_tokens=MAX_TOKENS,
        table=(KernelRow(MAX_TOKENS, algorithm, Transfer.MESSAGE),),
        post=None, norm=NormSpec(NormKind.RMS, 1e-5), timeout_s=timeout_s,
    )  # fmt: skip


def reserve(world: int, hosts: int, timeout_s: float = 30.0, *algorithms: Algorithm) -> TcpArena:
    """For all algorithms, unless some are named."""
    asked = algorithms or ALGORITHMS[Transfer.MESSAGE]
    plan = memory_plan("0", [make_call(world, hosts, each) for each in asked])
    return tcp.reserve(topology.discover("0", timeout_s), plan, 0, timeout_s)


def partial_of(rank: int, tokens: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def check(rank: int, world: int, hosts: int, as_launched: bool = False) -> list[bytes]:
    """Every count of tokens, both ways, with and without residual and sum; the results' bytes."""
    if not as_launched:
        become_host(rank, world, hosts)
    reserve(world, hosts)
    found = []
    for step, (tokens, dtype) in enumerate(
        (tokens, dtype) for tokens in (5, 1, 0, 3, 40, 17) for dtype in (torch.float32, torch.bfloat16)
    ):
        residual = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(step)).to(dtype)
        weight = torch.linspace(0.5, 1.5, HIDDEN).to(dtype)
        for algorithm in ALGORITHMS[Transfer.MESSAGE]:
            made = make_call(world, hosts, algorithm, str(dtype)[6:])
            for call, operands in (
                (made, EpilogueOperands(residual=residual, weight=weight)),
                (replace(made, sum_out=SumOut.NONE), EpilogueOperands(weight=weight)),
                (replace(made, norm=None), EpilogueOperands(residual=residual)),
            ):
                want = reference([partial_of(r, tokens, step, dtype) for r in range(world)], operands, call)
                got = torch.ops.weave.all_reduce_norm(
                    partial_of(rank, tokens, step, dtype), *operands[:7], call.encode()
                )
                for each, expected in zip(got, want, strict=True):
                    assert_close(
                        each, expected, KERNEL, f"{call.site}, {tokens} tokens, {world} ranks on {hosts} hosts"
                    )
                    found.append(each.view(torch.uint8).numpy().tobytes())
    return found


def main() -> None:
    """A rank on an emulated host."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = check(rank, world, world // int(os.environ["LOCAL_WORLD_SIZE"]), as_launched=True)
    print(f"{len(found)} results", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
