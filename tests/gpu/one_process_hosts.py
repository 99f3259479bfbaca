"""GPUs of several hosts, several of each: their kernels among ranks of one process on one GPU, as in `one_process`.

`python -m tests.gpu.one_process_hosts` runs calls one after the other on every rank, each of other tokens, again and
again from graphs, and compares with the reference and between ranks. All arenas are mapped: nothing is put. Each rank
has one stream of few CTAs, so that all ranks' kernels are on the GPU together; more than 8 streams would share its
queues, and a kernel could be queued after one that waits for it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
from dataclasses import replace
from functools import partial

import torch

from tests.gpu.hosts_ranks import make_call
from tests.gpu.one_process import HEADER_BYTES, Gpu, bits
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt import _native
from weaveopt.fabrics import nvshmem
from weaveopt.fabrics.layout import Layout
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.native import host_transfer
from weaveopt.ops.reduction.nvshmem import native_site
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.reference import reference

Tensor = torch.Tensor
GROUPS = ((2, 1), (3, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2))
"""Hosts, and ranks of each."""
TOKENS = (1, 5, 37, 2, 8)
SHAPES = (("bfloat16", 512), ("float16", 4096), ("float32", 4096), ("bfloat16", 8192))
TABLES = ("packets", "flagged rows", "both")
NUM_CTAS = 8
ROUNDS = 20


def hosts_of(hosts: int, ranks_of_host: int, mixed: bool) -> list[list[int]]:
    """The ranks of each host: one after the other, or through the hosts in turn."""
    if mixed:
        return [list(range(host, hosts * ranks_of_host, hosts)) for host in range(hosts)]
    return [list(range(host * ranks_of_host, (host + 1) * ranks_of_host)) for host in range(hosts)]


def run_group(gpu: Gpu, streams: list[int], hosts: int, ranks_of_host: int, table: str, dtype: str, hidden: int) -> int:
    """How many calls were made."""
    world, owned = hosts * ranks_of_host, gpu.num_owned
    streams = streams[:world]
    call = replace(make_call(world, hidden, dtype, table), hosts=hosts, max_tokens=max(TOKENS))
    call = replace(call, table=tuple(replace(row, max_tokens=min(row.max_tokens, max(TOKENS))) for row in call.table))
    layout = Layout.of(memory_plan("0", [call]))
    num_bytes = HEADER_BYTES + layout.num_bytes
    bases = [gpu.memory(num_bytes) for _ in range(world)]
    for base in bases:
        gpu.call("cudaMemset", ctypes.c_void_p(base), 0, ctypes.c_size_t(num_bytes))
    groups = [nvshmem.module().NvshmemGroup.of_one_process(0, num_bytes, rank, bases) for rank in range(world)]
    sites = hosts_of(hosts, ranks_of_host, mixed=hidden == 4096)
    bound = [nvshmem.module().HostsAllReduceNorm(group, native_site(call, 7, layout, sites)) for group in groups]
    numbers = torch.Generator().manual_seed(hosts * 100 + ranks_of_host)

    def rows(tokens: int) -> Tensor:
        return torch.randn(tokens, hidden, generator=numbers).to(getattr(torch, dtype))

    weight = rows(1)[0]
    own_weight = gpu.copy(weight)
    steps = []
    for at, tokens in enumerate(TOKENS):
        partials, residual = [rows(tokens) for _ in range(world)], rows(tokens) if at != 1 else None
        want = reference(partials, EpilogueOperands(residual=residual, weight=weight), call)
        row = next(row for row in call.table if tokens <= row.max_tokens)
        graphs, outputs = [], []
        for rank in range(world):
            out = [gpu.poisoned(partials[0].nbytes) for _ in range(2)]
            arguments = [
                tokens, int(host_transfer(row)), NUM_CTAS, streams[rank], gpu.copy(partials[rank]), 0,
                gpu.copy(residual), _native.ReductionParameters(weight=own_weight), out[0], out[1], 0,
            ]  # fmt: skip
            gpu.finish()
            graphs.append(gpu.captured(streams[rank], partial(bound[rank].run, *arguments)))
            outputs.append(out)
        steps.append((tokens, graphs, outputs, want))
    for _ in range(ROUNDS):
        for rank, stream in enumerate(streams):
            for _, graphs, _, _ in steps:
                gpu.call("cudaGraphLaunch", graphs[rank], ctypes.c_void_p(stream))
    gpu.finish()
    for tokens, graphs, outputs, want in steps:
        what = f"{hosts} hosts of {ranks_of_host}, {table}, {tokens} tokens of {hidden} {dtype}"
        for out_index, expected in enumerate(want[:2]):
            got = [gpu.read(out[out_index], expected) for out in outputs]
            for rank, mine in enumerate(got):
                assert_close(mine, expected, KERNEL, f"{what}, rank {rank}")
                assert torch.equal(bits(mine), bits(got[0])), f"{what}: rank {rank} differs from rank 0"
        for graph in graphs:
            gpu.call("cudaGraphExecDestroy", graph)
    gpu.free(owned)
    return ROUNDS * len(TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", nargs="*", choices=[f"{h}x{r}" for h, r in GROUPS], help="hosts x ranks of each")
    asked = parser.parse_args()
    gpu, count = Gpu(), 0
    streams = [gpu.stream() for _ in range(8)]
    for (hosts, of_host), table, (dtype, hidden) in itertools.product(GROUPS, TABLES, SHAPES):
        if asked.groups and f"{hosts}x{of_host}" not in asked.groups:
            continue
        count += run_group(gpu, streams, hosts, of_host, table, dtype, hidden)
    print(f"{count} calls agree with the reference and on all ranks")


if __name__ == "__main__":
    main()
