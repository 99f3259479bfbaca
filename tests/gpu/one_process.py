"""The ranks of a group in one process on one GPU, each a stream of its own, for compute-sanitizer.

`python -m tests.gpu.one_process` runs every kernel, dtype and case of the computation on a few CTAs, so that all ranks'
kernels fit on the GPU together, and compares the results with the reference and with each other. Device memory comes
from the CUDA runtime itself and the references are computed on the CPU: nothing but kernels of ours runs on the GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tests.gpu.op_cases import (
    CASES,
    DTYPES,
    KERNELS,
    LL_PACKET_TWO_SHOT,
    Case,
    Inputs,
    Kernel,
    Results,
    check,
    make_call,
    make_inputs,
    plan_of,
    reference_of,
)
from weaveopt import _native
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.traits import header_bytes
from weaveopt.ops.reduction.buffers import OUTPUT, PARTIAL, locate
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.peer import native_kernel, native_site
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import Quant

Tensor = torch.Tensor
NUM_CTAS = 4
HEADER_BYTES = header_bytes(Fabric.PEER)
TO_DEVICE, TO_HOST = 1, 2
POISON = 0xFF
"""In every byte of results, and of what peers write rows to, before a call; NaN in all dtypes."""


class Gpu:
    """The needed part of the CUDA runtime, without torch's allocator and kernels."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")  # torch's own
        self._owned: list[int] = []

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        assert code == 0, f"{name}: {_native.cuda_error_text(code)}"

    def memory(self, num_bytes: int) -> int:
        pointer = ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(max(num_bytes, 256)))
        assert pointer.value is not None
        self._owned.append(pointer.value)
        return pointer.value

    def copy(self, x: Tensor | None) -> int:
        """`x` on the GPU; 0 where there is none."""
        if x is None:
            return 0
        x = x.contiguous()
        pointer = self.memory(x.nbytes)
        self._move(pointer, x.data_ptr(), x.nbytes, TO_DEVICE)
        return pointer

    def poisoned(self, num_bytes: int) -> int:
        pointer = self.memory(num_bytes)
        self.poison(pointer, num_bytes)
        return pointer

    def poison(self, pointer: int, num_bytes: int) -> None:
        self.call("cudaMemset", ctypes.c_void_p(pointer), POISON, ctypes.c_size_t(num_bytes))

    def read(self, pointer: int, like: Tensor) -> Tensor:
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._move(found.data_ptr(), pointer, found.nbytes, TO_HOST)
        return found

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), 1)  # does not wait for the default stream
        assert stream.value is not None
        return stream.value

    def captured(self, stream: int, launch: Callable[[], int]) -> ctypes.c_void_p:
        """Captures the work that `launch` submits to `stream`, as an executable graph."""
        graph, replay = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cudaStreamBeginCapture", ctypes.c_void_p(stream), 1)  # this thread alone
        code = launch()
        self.call("cudaStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        assert code == 0, _native.cuda_error_text(code)
        self.call("cudaGraphInstantiate", ctypes.byref(replay), graph, ctypes.c_ulonglong(0))
        self.call("cudaGraphDestroy", graph)
        return replay

    def replay(self, graphs: Sequence[ctypes.c_void_p], streams: Sequence[int], rounds: int = 1) -> None:
        """Each on its stream, all at once; they are given back."""
        for _ in range(rounds):
            for graph, stream in zip(graphs, streams, strict=True):
                self.call("cudaGraphLaunch", graph, ctypes.c_void_p(stream))
        self.finish()
        for graph in graphs:
            self.call("cudaGraphExecDestroy", graph)

    def finish(self) -> None:
        self.call("cudaDeviceSynchronize")

    def free(self, keep: int) -> None:
        """Frees all memory allocated after the first `keep` pieces."""
        while len(self._owned) > keep:
            self.call("cudaFree", ctypes.c_void_p(self._owned.pop()))

    @property
    def num_owned(self) -> int:
        return len(self._owned)

    def _move(self, to: int, source: int, num_bytes: int, kind: int) -> None:
        self.call("cudaMemcpy", ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes), kind)


Enqueue = Callable[[int], int]
"""Enqueues a call of one rank on a raw stream; returns a CUDA error code."""


@dataclass(frozen=True)
class Ready:
    """One call on every rank, not enqueued yet, and where its results will be."""

    enqueue: list[Enqueue]
    outputs: list[list[int]]
    like: Results


@dataclass(frozen=True)
class Launched:
    """One call on every rank, captured on a stream of each, and where its results will be."""

    graphs: list[ctypes.c_void_p]
    streams: list[int]
    outputs: list[list[int]]
    like: Results


class Ranks:
    """`world` arenas on one GPU, with buffers and streams for each of `calls`: they share neither."""

    def __init__(self, gpu: Gpu, world: int, calls: Sequence[ReductionCall]) -> None:
        self.gpu, self.world = gpu, world
        self.layouts = [Layout.of(plan_of([call])) for call in calls]
        ends = itertools.accumulate((layout.num_bytes for layout in self.layouts), aligned_sum, initial=HEADER_BYTES)
        *self.begins, num_bytes = ends
        self.bases = [gpu.memory(num_bytes) for _ in range(world)]
        self.streams = [[gpu.stream() for _ in range(world)] for _ in calls]
        fills = [
            (begin + offset, size, word)
            for begin, layout in zip(self.begins, self.layouts, strict=True)
            for offset, size, word in layout.fills()
        ]
        self.groups = [_native.PeerGroup(self.bases, 0, rank, 0, num_bytes, fills) for rank in range(world)]

    def launch(
        self, index: int, kernel: Kernel, call: ReductionCall, inputs: Inputs, tokens: int, like: Results
    ) -> Launched:
        """A call with the `index`-th buffers; results like `like`."""
        ready, streams = self.ready(index, kernel, call, inputs, tokens, like), self.streams[index]
        graphs = [
            self.gpu.captured(stream, partial(enqueue, stream))
            for stream, enqueue in zip(streams, ready.enqueue, strict=True)
        ]
        return Launched(graphs, streams, ready.outputs, like)

    def ready(
        self, index: int, kernel: Kernel, call: ReductionCall, inputs: Inputs, tokens: int, like: Results
    ) -> Ready:
        """The same, not enqueued."""
        gpu, native, begin = self.gpu, native_kernel(kernel.row()), self.begins[index]
        operands, at = inputs.operands, locate(call, self.layouts[index])
        parameters = (*operands.vectors, operands.scale, operands.quant_scale)
        fp32 = sum(1 << i for i, x in enumerate(parameters) if x is not None and x.dtype is torch.float32)
        pointers = [gpu.copy(x) for x in parameters]
        in_place = native is _native.GpuKernel.direct
        prepared = []
        for rank in range(self.world):
            source = gpu.copy(inputs.partials[rank])
            if in_place:
                source_bytes = inputs.partials[rank].nbytes
                into = self.bases[rank] + begin + at[PARTIAL].offset
                gpu.call("cudaMemcpy", ctypes.c_void_p(into), ctypes.c_void_p(source), ctypes.c_size_t(source_bytes), 3)
            outputs = [gpu.poisoned(x.nbytes) if x.numel() else 0 for x in like]
            if OUTPUT in at:
                output = self.bases[rank] + begin + at[OUTPUT].offset
                gpu.poison(output, at[OUTPUT].num_bytes)
                if call.normalized_aliases_arena:
                    outputs[0] = output
            prepared.append((source, gpu.copy(operands.residual), outputs))
        gpu.finish()
        enqueue: list[Enqueue] = []
        for rank, (source, own_residual, outputs) in enumerate(prepared):
            site = native_site(call, tag=7 + index, layout=self.layouts[index])
            site.mailbox_offset += begin - HEADER_BYTES
            site.staging_offset += begin - HEADER_BYTES
            site.output_offset += begin - HEADER_BYTES
            leading = (tokens, int(native), kernel.num_ctas or NUM_CTAS)
            rest = (
                source, begin + at[PARTIAL].offset if in_place else 0, own_residual,
                _native.ReductionParameters(*[*pointers, fp32]), *outputs,
            )  # fmt: skip
            bound = _native.GpuAllReduceNorm(self.groups[rank], site)
            enqueue.append(partial(_enqueue, bound, leading, rest))
        return Ready(enqueue, [outputs for _, _, outputs in prepared], like)

    def results(self, launched: Launched | Ready) -> list[Results]:
        """Results of each rank."""
        got = []
        for outputs in launched.outputs:
            a, b, c = (self.gpu.read(p, x) if p else x for p, x in zip(outputs, launched.like, strict=True))
            got.append((a, b, c))
        return got


def _enqueue(bound: _native.GpuAllReduceNorm, leading: tuple[int, ...], rest: tuple[object, ...], stream: int) -> int:
    return bound.run(*leading, stream, *rest)  # type: ignore[arg-type,call-arg]


def aligned_sum(begin: int, num_bytes: int) -> int:
    alignment: int = _native.GPU_ALIGNMENT
    return begin + -(-num_bytes // alignment) * alignment


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def run_case(gpu: Gpu, kernel: Kernel, case: Case, dtype: str, hidden: int, tokens: int, world: int) -> int:
    """One call; with rows that alias the arena a second one. How many were made."""
    fp8 = case.quant is not Quant.NONE
    native = native_kernel(kernel.row())
    if _native.unsupported(native, getattr(_native.DType, dtype), hidden, world, fp8, 0):
        return 0
    call = make_call(case, hidden, dtype, world, (kernel.row(tokens),))
    inputs = make_inputs(case, tokens, hidden, getattr(torch, dtype), world, seed=tokens, device="cpu")
    want = reference_of(inputs, call)
    owned = gpu.num_owned
    ranks = Ranks(gpu, world, [call])
    calls = [call]
    if native is _native.GpuKernel.bulk and call.norm is not None and case.quant is not Quant.PER_TOKEN:
        calls.append(replace(call, normalized_aliases_arena=True))
    for each in calls:
        launched = ranks.launch(0, kernel, each, inputs, tokens, want)
        gpu.replay(launched.graphs, launched.streams)
        what = f"{kernel.name}, {world} ranks, {tokens} tokens of {hidden} {dtype}, {case}"
        check_all(ranks.results(launched), want, each, inputs, tokens, what)
    gpu.free(owned)
    return len(calls)


def check_all(
    got: Sequence[Results], want: Results, call: ReductionCall, inputs: Inputs, tokens: int, what: str
) -> None:
    for rank, results in enumerate(got):
        check(results, want, call, tokens, rank, f"{what}, rank {rank}", quant_scale=inputs.operands.quant_scale)
        assert torch.equal(bits(results[0]), bits(got[0][0])), f"rank {rank} differs from rank 0: {what}"


def run_channels(gpu: Gpu, kernels: Sequence[Kernel], channels: Sequence[int], rounds: int) -> int:
    """Calls of two ranks on several channels at once, again and again, with nothing that keeps channels in step."""
    world, hidden, dtype, case = 2, 1024, "bfloat16", CASES[0]
    owned = gpu.num_owned
    made = []
    for index, (kernel, channel) in enumerate(zip(kernels, channels, strict=True)):
        tokens = 37 + 11 * index
        call = replace(make_call(case, hidden, dtype, world, (kernel.row(tokens),)), channel=channel)
        inputs = make_inputs(case, tokens, hidden, getattr(torch, dtype), world, seed=tokens, device="cpu")
        made.append((kernel, call, inputs, tokens, reference_of(inputs, call)))
    ranks = Ranks(gpu, world, [call for _, call, *_ in made])
    launched = [ranks.launch(index, *each) for index, each in enumerate(made)]
    graphs = [graph for each in launched for graph in each.graphs]
    gpu.replay(graphs, [stream for each in launched for stream in each.streams], rounds)
    for each, (kernel, call, inputs, tokens, want) in zip(launched, made, strict=True):
        what = f"{kernel.name} on channel {call.channel} beside {', '.join(other.name for other in kernels)}"
        check_all(ranks.results(each), want, call, inputs, tokens, what)
    gpu.free(owned)
    return len(kernels)


def run_with_tags_alone(gpu: Gpu, kernel: Kernel, world: int, num_calls: int, rounds: int) -> int:
    """Calls of one token back to back, each on its own data, that leave the sum sharded and have no norm.

    The token's owner gets data from all, and the others none from anybody: only tags keep ranks in step.
    """
    case, hidden, dtype = Case(sum_out=SumOut.SHARDED, norm=None), 1024, "bfloat16"
    call = make_call(case, hidden, dtype, world, (kernel.row(1),))
    owned = gpu.num_owned
    ranks = Ranks(gpu, world, [call])
    steps = []
    for seed in range(num_calls):
        inputs = make_inputs(case, 1, hidden, getattr(torch, dtype), world, seed, device="cpu")
        want = reference_of(inputs, call)
        steps.append((want, ranks.launch(0, kernel, call, inputs, 1, want)))
    # Each rank replays all of its calls in its own order of time: nothing but the kernels waits for anyone.
    for _ in range(rounds):
        for rank, stream in enumerate(ranks.streams[0]):
            for _, launched in steps:
                gpu.call("cudaGraphLaunch", launched.graphs[rank], ctypes.c_void_p(stream))
    gpu.finish()
    for seed, (want, launched) in enumerate(steps):
        for rank, results in enumerate(ranks.results(launched)):
            check(results, want, call, 1, rank, f"{kernel.name}, {world} ranks, call {seed} of one token, rank {rank}")
        for graph in launched.graphs:
            gpu.call("cudaGraphExecDestroy", graph)
    gpu.free(owned)
    return num_calls * rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", nargs="*", type=int, default=[2, 3, 8])
    arguments = parser.parse_args()
    gpu, count = Gpu(), 0
    for world, kernel, (index, case) in itertools.product(arguments.worlds, KERNELS, enumerate(CASES)):
        dtype = DTYPES[(index + world) % len(DTYPES)]
        hidden, tokens = ((1024, 37), (4096, 9), (8192, 5))[index % 3]
        count += run_case(gpu, kernel, case, dtype, hidden, tokens, world)
    # Many units a CTA, and rows of several vectors a thread.
    for kernel in KERNELS:
        count += run_case(gpu, kernel, CASES[0], "bfloat16", 1024, 300, 2)
        count += run_case(gpu, kernel, CASES[0], "bfloat16", 16384, 23, 2)
    for world in (2, 4):
        count += run_with_tags_alone(gpu, LL_PACKET_TWO_SHOT, world, num_calls=96, rounds=8)
    # At most 8 streams: more of them would share the queues of the GPU, and a kernel wait behind one that waits for it.
    for first, second in itertools.combinations_with_replacement(KERNELS, 2):
        count += run_channels(gpu, (first, second), (1, _native.NUM_CHANNELS - 1), rounds=20)
    all_four = (*KERNELS[:3], KERNELS[-1])
    count += run_channels(gpu, all_four, range(len(all_four)), rounds=20)
    print(f"{count} calls agree with the reference and on all ranks")


if __name__ == "__main__":
    main()
