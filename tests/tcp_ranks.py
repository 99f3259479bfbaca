"""Calls of the fused op among CPU ranks that take themselves for several hosts, compared with the reference."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

import weaveopt.ops  # noqa: F401
from tests.tolerances import KERNEL, assert_close
from weaveopt.fabrics import tcp, topology
from weaveopt.fabrics.tcp import TcpArena
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec
from weaveopt.reductions.buffers import memory_plan
from weaveopt.reductions.call import ReductionCall, SumOut
from weaveopt.reductions.operands import Operands
from weaveopt.reductions.reference import reference

HIDDEN = 64
MAX_TOKENS = 40


def become_host(rank: int, world: int, hosts: int) -> None:
    """Before the group's topology is asked for."""
    os.environ["WEAVE_HOST"] = f"host{rank * hosts // world}"
    os.environ["LOCAL_WORLD_SIZE"] = str(world)


def make_call(world: int, hosts: int, one_shot: bool, dtype: str = "float32", timeout_s: float = 30.0) -> ReductionCall:
    return ReductionCall(
        site=f"site {one_shot} {dtype}", group="0", fabric=Fabric.TCP, world=world, hosts=hosts, hidden=HIDDEN,
        dtype=dtype, out_dtype=dtype, max_tokens=MAX_TOKENS, one_shot_max_tokens=MAX_TOKENS if one_shot else 0,
        post=None, norm=NormSpec(NormKind.RMS, 1e-5), timeout_s=timeout_s,
    )  # fmt: skip


def reserve(world: int, hosts: int, timeout_s: float = 30.0) -> TcpArena:
    plan = memory_plan("0", [make_call(world, hosts, one_shot=False)])
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
        for one_shot in (True, False):
            for call, operands in (
                (make_call(world, hosts, one_shot, str(dtype)[6:]), Operands(residual=residual, weight=weight)),
                (
                    replace(make_call(world, hosts, one_shot, str(dtype)[6:]), sum_out=SumOut.NONE),
                    Operands(weight=weight),
                ),
                (replace(make_call(world, hosts, one_shot, str(dtype)[6:]), norm=None), Operands(residual=residual)),
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
