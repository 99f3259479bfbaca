"""One rank of `test_gemm_chunks`: chunks on GPUs against the reference, and a compiled block. Started by torchrun.

Uninitialized memory is filled with NaN while chunks are compared with the reference: a row that was never written, or
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
from tests.gpu.op_cases import BULK, LL_PACKET_TWO_SHOT, TIMEOUT_S, Case, Kernel, make_call, make_inputs, unsupported
from tests.graphs import forms
from tests.graphs.tolerances import KERNEL, LIBRARY, assert_close
from weaveopt.fabrics import peer, topology
from weaveopt.ops.gemm_comm.all_reduce.call import ChunkRow, GemmReductionCall, num_chunks
from weaveopt.ops.gemm_comm.all_reduce.reference import reference
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.records.candidate import Fabric

RULE, OTHER = "gemm_all_reduce", "all_reduce_rms_norm"
DEPTH = 512
FEW_CTAS = (replace(BULK, num_ctas=16), replace(BULK, num_ctas=5), LL_PACKET_TWO_SHOT)
CASES = (Case(), Case(norm=None), Case(residual=False, wide_out=True), Case(reduced_bias=True, scale=0.5))
CHUNKS = ((ChunkRow(300, 128), ChunkRow(4096, 512)), ())
"""Chunks by a table, and chunks of a single size."""
Inputs = tuple[list[tuple[Tensor, Tensor]], EpilogueOperands]


def call_of(case: Case, hidden: int, dtype: str, kernel: Kernel, chunks: tuple[ChunkRow, ...]) -> GemmReductionCall:
    reduction = make_call(case, hidden, dtype, dist.get_world_size(), (kernel.row(512),))
    site = f"{reduction.site} in chunks {chunks}"
    return GemmReductionCall(replace(reduction, site=site, in_pieces=True), "chunks", chunks)


def inputs_of(case: Case, tokens: int, hidden: int, dtype: torch.dtype, layout: str, seed: int) -> Inputs:
    """Every rank's factors, and what all ranks share: the same on every rank."""
    random = torch.Generator("cuda").manual_seed(seed)
    world = dist.get_world_size()
    shape = (hidden, DEPTH) if layout == "nk" else (DEPTH, hidden)
    factors = []
    for _ in range(world):
        a = torch.randn(tokens, DEPTH, generator=random, device="cuda").to(dtype)
        factors.append((a, (torch.randn(shape, generator=random, device="cuda") / DEPTH**0.5).to(dtype)))
    return factors, make_inputs(case, tokens, hidden, dtype, world, seed).operands


def run_op(
    factors: tuple[Tensor, Tensor], layout: str, rest: EpilogueOperands, call: GemmReductionCall
) -> tuple[Tensor, ...]:
    return tuple(torch.ops.weave.gemm_all_reduce_norm(*factors, layout, *rest[:7], call.encode()))


def grid(rank: int) -> None:
    """Kernels, forms and numbers of chunks, each twice; ranks hold the same bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kernel, dtype, (index, case), chunks in itertools.product(
        FEW_CTAS, ("bfloat16", "float32"), enumerate(CASES), CHUNKS
    ):
        hidden, layout = 4096, "nk" if index % 2 else "kn"
        if unsupported(kernel, case, hidden, dtype, dist.get_world_size()):
            continue
        call = call_of(case, hidden, dtype, kernel, chunks)
        peer.reserve(topology.discover("0", TIMEOUT_S), memory_plan("0", [call.reduction]), 0, TIMEOUT_S)
        for tokens in (0, 1, 128, 300, 513, 1400):
            factors, rest = inputs_of(case, tokens, hidden, getattr(torch, dtype), layout, seed=tokens + index)
            want = reference(factors, layout, rest, call)
            what = f"{tokens} tokens in {num_chunks(call, tokens)} chunks, {call}"
            first, again = (run_op(factors[rank], layout, rest, call) for _ in range(2))
            for got, repeated, expected in zip(first, again, want, strict=True):
                assert got.is_contiguous() and got.shape == expected.shape, what
                assert_close(got, expected, KERNEL, what, getattr(torch, dtype))
                assert torch.equal(got, repeated), f"two runs differ: {what}"
                everyone = [torch.empty_like(got) for _ in range(dist.get_world_size())]
                dist.all_gather(everyone, got)
                assert all(torch.equal(got, other) for other in everyone), f"ranks differ: {what}"
    torch.use_deterministic_algorithms(False)


def back_to_back(rank: int) -> None:
    """Calls in chunks between calls of the whole op, with nothing that waits in between; then from CUDA graphs."""
    case, hidden, tokens = Case(), 4096, 1400
    call = call_of(case, hidden, "bfloat16", FEW_CTAS[0], ())
    whole = make_call(case, hidden, "bfloat16", dist.get_world_size(), (LL_PACKET_TWO_SHOT.row(64), BULK.row(2048)))
    peer.reserve(topology.discover("0", TIMEOUT_S), memory_plan("0", [call.reduction, whole]), 0, TIMEOUT_S)
    steps = [inputs_of(case, tokens, hidden, torch.bfloat16, "nk", seed) for seed in range(4)]

    def run() -> list[tuple[Tensor, ...]]:
        results = []
        for factors, rest in steps:
            chunked = run_op(factors[rank], "nk", rest, call)
            partial = torch.mm(factors[rank][0], factors[rank][1].t())
            more = rest._replace(residual=chunked[1])
            results += [chunked, tuple(torch.ops.weave.all_reduce_norm(partial, *more[:7], whole.encode()))]
        return results

    def check(results: list[tuple[Tensor, ...]], what: str) -> None:
        for index, (factors, rest) in enumerate(steps):
            chunked, after = results[2 * index : 2 * index + 2]
            more = rest._replace(residual=chunked[1])
            for got, known in ((chunked, rest), (after, more)):
                for result, expected in zip(got, reference(factors, "nk", known, call), strict=True):
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


def compiled(rank: int) -> None:
    """A block whose GEMM the rule takes in, with and without CUDA graphs."""
    tokens, hidden = 2048, 4096
    shared = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int, generator: torch.Generator = shared) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") / shape[-1] ** 0.5).bfloat16()

    own = torch.Generator("cuda").manual_seed(7 + rank)
    weight, out_of = random(hidden, DEPTH, generator=own), random(DEPTH, hidden)
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        product = torch.nn.functional.linear(x, weight)
        total = residual + functional.all_reduce(product, "sum", dist.group.WORLD)
        return forms.rms(total, norm) @ out_of.t(), total

    for cuda_graphs in (False, True):
        torch._dynamo.reset()
        options = {
            "machine": "h200x4", "strict": True, "timeout_s": 30.0, "cuda_graphs": cuda_graphs, "force": [RULE],
            "disable": [OTHER],
        }  # fmt: skip
        run = torch.compile(block, backend="weave", options=options)  # type: ignore[call-overload]
        for _ in range(4):
            x = random(tokens, DEPTH, generator=own)
            residual = random(tokens, hidden)
            for got, want in zip(run(x, residual), block(x, residual), strict=True):
                assert_close(got, want, LIBRARY, f"cuda_graphs={cuda_graphs}")
        (decision,) = weaveopt.report().graphs[-1].decisions
        assert decision.chosen.choice == RULE and decision.chosen.fabric is Fabric.PEER, decision


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with torch.no_grad():
        grid(rank)
        back_to_back(rank)
        compiled(rank)
    torch.cuda.synchronize()
    dist.barrier()
    print(f"rank {rank}: chunks agree", flush=True)
    sys.stdout.flush()
    # NCCL's communicator cannot be destroyed while captured graphs hold it.
    os._exit(0)


if __name__ == "__main__":
    main()
