"""One rank of `test_l2_prefetch_gpu`: the operation that loads weights, called by itself and in compiled blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import weaveopt
from benchmarks import gpu_ranks
from benchmarks.gpu_ranks import Place
from tests import forms
from tests.gpu.op_cases import (
    BULK,
    GEMMA,
    LL_PACKET_ONE_SHOT,
    LL_PACKET_TWO_SHOT,
    TIMEOUT_S,
    Case,
    make_call,
    make_inputs,
    reference_of,
)
from tests.gpu.profiles import written_once
from tests.tolerances import KERNEL, LIBRARY, assert_close
from weaveopt import cost_model
from weaveopt.cost_model.l2_prefetch import OPERATION, Order, variant_of
from weaveopt.cost_model.machine import KernelCurve, SizePoint
from weaveopt.fabrics import peer, topology
from weaveopt.reductions.buffers import memory_plan
from weaveopt.reductions.call import Prefetch, ReductionCall, SumOut

RULE = "all_reduce_rms_norm"
CASES = (Case(), Case(norm=GEMMA, wide_weights=True, sum_out=SumOut.NONE), Case(residual=False, reduced_bias=True))
MOST, LOADED = 96, 64
"""Tokens of the LL packets' row of the table, and up to which weights are loaded."""
REPLAYS = 300
PREFETCHES = (
    Prefetch(1 << 20, Order.FRONT, LOADED),
    Prefetch(3_000_001, Order.COLUMNS, LOADED),
    Prefetch(1 << 30, Order.FRONT, LOADED),
    Prefetch(1 << 30, Order.COLUMNS, LOADED),
)


def weights_of(hidden: int, dtype: torch.dtype) -> list[Tensor]:
    """As models have them, and as they do not: at odd addresses, strided, of another dtype, on the host."""
    odd = torch.randn(77 * hidden + 1, device="cuda").to(dtype)[1:].view(77, hidden)
    plain = torch.randn(512, hidden, device="cuda").to(dtype)
    return [plain, odd, torch.randn(hidden, 64, device="cuda").t(), torch.randn(8, hidden)]


def reserve(*calls: ReductionCall) -> None:
    peer.reserve(topology.discover("0", TIMEOUT_S), memory_plan("0", list(calls)), 0, TIMEOUT_S)


def grid(place: Place) -> None:
    """The bits of the operation that loads nothing, at all token counts; and the reference's numbers."""
    kernels = (LL_PACKET_ONE_SHOT, LL_PACKET_TWO_SHOT)
    settings = itertools.product(enumerate(CASES), kernels, ((1024, "float16"), (8192, "bfloat16"), (4096, "float32")))
    for (index, case), kernel, (hidden, dtype) in settings:
        call = make_call(case, hidden, dtype, place.world, (kernel.row(MOST), BULK.row(256)))
        loading = replace(call, site=f"{call.site} loading", prefetch=PREFETCHES[index % len(PREFETCHES)])
        reserve(call, loading)
        weights = weights_of(hidden, getattr(torch, dtype))
        for tokens in (0, 1, 7, LOADED, LOADED + 1, 200):
            inputs = make_inputs(case, tokens, hidden, getattr(torch, dtype), place.world, seed=tokens)
            partial, operands = inputs.partials[place.rank], inputs.operands[:7]
            plain = torch.ops.weave.all_reduce_norm(partial, *operands, call.encode())
            found = torch.ops.weave.all_reduce_norm_prefetch(partial, *operands, weights, loading.encode())
            want = reference_of(inputs, call)
            what = f"{tokens} tokens, {loading}, rank {place.rank}"
            for got, expected, numbers in zip(found, plain, want, strict=False):
                assert torch.equal(got, expected), f"other bits: {what}"
                if got.numel():
                    assert_close(got, numbers, KERNEL, what, getattr(torch, dtype))
        gpu_ranks.barrier()


def replayed(place: Place) -> None:
    """A graph of calls and of the GEMMs behind them, again and again: the bits of the first time, on all ranks."""
    hidden, tokens = 8192, 8
    call = make_call(Case(), hidden, "bfloat16", place.world, (LL_PACKET_ONE_SHOT.row(MOST),))
    calls = [replace(call, site=f"{index}", prefetch=each) for index, each in enumerate(PREFETCHES)]
    reserve(*calls)
    inputs = make_inputs(Case(), tokens, hidden, torch.bfloat16, place.world, seed=1)
    weights = [torch.randn(1536, hidden, device="cuda", dtype=torch.bfloat16) for _ in calls]
    found: list[Tensor] = []

    def step() -> None:
        found.clear()
        for each, weight in zip(calls, weights, strict=True):
            partial, operands = inputs.partials[place.rank], inputs.operands[:7]
            rows, total = torch.ops.weave.all_reduce_norm_prefetch(partial, *operands, [weight], each.encode())
            found.extend((rows, total, rows @ weight.t()))

    graph = gpu_ranks.capture(step, torch.cuda.graph_pool_handle())
    graph.replay()
    torch.cuda.synchronize()
    first = [each.clone() for each in found]
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(found, first, strict=True):
        assert torch.equal(got, want), "a replay gives other bits"
    for step_index in range(0, len(found), 3):
        everyone: list[Tensor | None] = [None] * place.world
        dist.all_gather_object(everyone, found[step_index].cpu())
        assert all(each is not None and torch.equal(each, found[step_index].cpu()) for each in everyone)
    gpu_ranks.barrier()
    _alive.append(graph)


_alive: list[object] = []
"""Captured graphs hold addresses of arenas to the end."""


def profile(world: int) -> str:
    """h200x4 with savings that nobody measured: so large that weights are loaded wherever that can be done."""
    base = cost_model.load("h200x4")
    points = (SizePoint(128, 1.0), SizePoint(16 << 20, 4.0))
    curves = tuple(
        KernelCurve(base.memory.origin, OPERATION, variant_of(order, 64, world), "bytes", points) for order in Order
    )
    return written_once(replace(base, name="prefetching", kernels=(*base.kernels, *curves)))


def compiled(place: Place) -> None:
    """Blocks whose weights are inputs of the graph, through Inductor, with and without CUDA graphs."""
    hidden, inner, tokens, machine = 4096, 512, 8, profile(place.world)
    shared = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int, generator: torch.Generator = shared) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16() / shape[-1] ** 0.5

    down, norm = random(hidden, inner), random(1, hidden)[0].abs()
    q, k, gate = random(1024, hidden), random(256, hidden), random(2048, hidden)
    linear = torch.nn.functional.linear

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = residual + functional.all_reduce(linear(x, down), "sum", dist.group.WORLD)
        rows = forms.rms(total, norm)
        return linear(rows, q), linear(rows, k), linear(rows, gate)

    for cuda_graphs in (False, True):
        torch._dynamo.reset()
        options = {"machine": machine, "strict": True, "timeout_s": 30.0, "cuda_graphs": cuda_graphs, "force": [RULE]}
        run = torch.compile(block, backend="weave", options=options)  # type: ignore[call-overload]
        own = torch.Generator("cuda").manual_seed(10 + place.rank)
        for _ in range(4):
            x, residual = random(tokens, inner, generator=own), random(tokens, hidden)
            for got, want in zip(run(x, residual), block(x, residual), strict=True):
                assert_close(got, want, LIBRARY, f"cuda_graphs={cuda_graphs}")
        (decision,) = weaveopt.report().graphs[-1].decisions
        assert decision.chosen.choice == RULE and "prefetch_bytes" in dict(decision.chosen.parameters), decision


def program(place: Place) -> None:
    with torch.no_grad():
        grid(place)
        replayed(place)
        compiled(place)
    print("prefetching changes nothing", flush=True)


if __name__ == "__main__":
    gpu_ranks.run_and_exit(program)
