"""The ranks of a group in one process on one GPU: calls on a side stream while another of the group runs in line.

`python -m tests.gpu.one_process_begun` captures, for every rank, one graph in which a call is begun on a side stream, a
call on another channel and with other buffers runs on the main stream, and the first one is ended; it replays the
graphs of all ranks again and again.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from tests.gpu.one_process import Enqueue, Gpu, Ranks, check_all
from tests.gpu.op_cases import CASES, KERNELS, Kernel, make_call, make_inputs, reference_of
from weaveopt import _native
from weaveopt.ops.reduction.buffers import communication_channel

ROUNDS = 1000


def run_begun(gpu: Gpu, in_line: Kernel, begun: Kernel, world: int) -> int:
    """Replays of two calls, the second one in flight while the first one runs."""
    hidden, dtype, case = 1024, "bfloat16", CASES[0]
    owned = gpu.num_owned
    made = []
    for index, (kernel, channel) in enumerate(((in_line, 0), (begun, communication_channel()))):
        tokens = 37 + 11 * index
        call = replace(make_call(case, hidden, dtype, world, (kernel.row(tokens),)), channel=channel)
        inputs = make_inputs(case, tokens, hidden, getattr(torch, dtype), world, seed=tokens, device="cpu")
        made.append((kernel, call, inputs, tokens, reference_of(inputs, call)))
    ranks = Ranks(gpu, world, [call for _, call, *_ in made])
    ready = [ranks.ready(index, *each) for index, each in enumerate(made)]
    streams = ranks.streams[0]
    sides = [_native.SideStream(0) for _ in range(world)]
    crossings = [_native.StreamCrossing(side) for side in sides]

    def both(rank: int, stream: int) -> int:
        side, crossing = sides[rank], crossings[rank]
        first: Enqueue = ready[0].enqueue[rank]
        second: Enqueue = ready[1].enqueue[rank]
        return (
            crossing.fork(stream)
            or second(side.handle)
            or crossing.launched()
            or first(stream)
            or crossing.join(stream)
        )

    graphs = [
        gpu.captured(stream, lambda rank=rank, stream=stream: both(rank, stream))  # type: ignore[misc]
        for rank, stream in enumerate(streams)
    ]
    gpu.replay(graphs, streams, ROUNDS)
    for each, (kernel, call, inputs, tokens, want) in zip(ready, made, strict=True):
        what = f"{kernel.name} on channel {call.channel}, {in_line.name} in line and {begun.name} in flight"
        check_all(ranks.results(each), want, call, inputs, tokens, what)
    gpu.free(owned)
    return ROUNDS


def main() -> None:
    gpu, count = Gpu(), 0
    for in_line, begun in itertools.product(KERNELS, KERNELS):
        count += run_begun(gpu, in_line, begun, 2)
    print(f"{count} begun calls agree with the reference")


if __name__ == "__main__":
    main()
