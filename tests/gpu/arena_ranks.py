"""One rank of `test_arena_bytes`: static prefills of 1K to 8K tokens, and the symmetric memory that they keep."""

from __future__ import annotations

import os
import sys

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import weaveopt
from tests.graphs import forms
from tests.graphs.tolerances import LIBRARY, assert_close
from weaveopt.fabrics import peer

HIDDEN = 4096
STEPS = tuple(range(1024, 8193, 1024))
SLACK_BYTES = 96 << 20
"""Memory other than the arena: torch's signal pads, rounding to 2 MiB, code of new kernels, buffers of NCCL
and cuBLAS."""


def outside_torch() -> int:
    """Bytes of this GPU that are in use and are not of torch's caching allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def check(rank: int, mode: str, arena_bytes: int) -> list[int]:
    """The sizes of the arenas that were made."""
    generator = torch.Generator("cuda").manual_seed(3)
    product = torch.randn(256, HIDDEN, generator=generator, device="cuda").bfloat16() / 16
    norm = torch.rand(HIDDEN, generator=generator, device="cuda").bfloat16()
    group = dist.new_group(list(range(dist.get_world_size())))

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + functional.all_reduce(x @ product, "sum", group)
        return forms.rms(total, norm), total

    def inputs(tokens: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator("cuda").manual_seed(100 * tokens + rank)
        x = torch.randn(tokens, 256, generator=own, device="cuda").bfloat16()
        return x, torch.randn(tokens, HIDDEN, generator=generator, device="cuda").bfloat16()

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 2 * len(STEPS)
    inductor_config.compile_threads = 1  # no pool of processes, each of which would have memory of this GPU
    for tokens in STEPS:
        block(*inputs(tokens))  # NCCL's and cuBLAS's buffers
    before = outside_torch()
    options = {"machine": "h200x4", "force": ["all_reduce_rms_norm"], "strict": True, "arena_bytes": arena_bytes}
    options["cuda_graphs"] = mode == "captured"
    compiled = torch.compile(block, backend="weave", dynamic=False, options=options)  # type: ignore[call-overload]
    made: list[int] = []
    graphs = []
    for tokens in STEPS:
        x, residual = inputs(tokens)
        for _ in range(3):
            want = block(x, residual)
            for got, expected in zip(compiled(x, residual), want, strict=True):
                assert_close(got, expected, LIBRARY, f"{mode}: {tokens} tokens")
        size = peer.of(group.group_name).num_bytes
        if size not in made:
            made.append(size)
        if mode == "by hand":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = compiled(x, residual)
            graphs.append((graph, result, want, (x, residual)))
    for graph, result, want, _ in graphs:  # in arenas that were outgrown since
        graph.replay()
        for got, expected in zip(result, want, strict=True):
            assert_close(got, expected, LIBRARY, "replayed")
    kept = peer.kept(group.group_name)
    used = outside_torch() - before
    expected_bytes = sum(arena.num_bytes for arena in kept)
    assert [arena.num_bytes for arena in kept] == (made[-1:] if mode == "eager" else made), (mode, made)
    assert used < expected_bytes + SLACK_BYTES, (mode, used, expected_bytes)
    num_kept = len(kept)
    peer.release(group.group_name)
    if rank == 0:
        what = (
            f"{len(made)} arenas made, {num_kept} kept, {used >> 20} MiB in use for {expected_bytes >> 20} MiB of them"
        )
        print(f"{mode}, arena_bytes={arena_bytes}: {what}", flush=True)
    return made


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with torch.no_grad():
        for mode in ("eager", "by hand", "captured"):
            made, with_floor = check(rank, mode, 0), check(rank, mode, 512 << 20)
            assert len(with_floor) <= len(made) <= 5, (made, with_floor)
            assert with_floor[0] == 512 << 20
    decisions = [d for report in weaveopt.report().graphs for d in report.decisions]
    assert all(d.rewritten for d in decisions), decisions
    print(f"rank {rank}: arenas as expected", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
