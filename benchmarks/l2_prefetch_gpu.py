"""Weights loaded into L2 beside the exchange before them, on one GPU: chains of [all-reduce + norm -> GEMMs] x 16.

    python -m benchmarks.l2_prefetch_gpu [--machine gpu] [--shapes 70b-tp2-gate-up ...] [--tokens 1 8 32 64]
        [--mebibytes 2 4 8 16 32] [--late-us 0 4 8] [--ctas 0 32] [--no-write]

Suite `l2_prefetch`. bf16, in CUDA graphs; every layer has weights of its own, together several times what L2 holds.
`without` loads nothing; `front` and `columns` say which bytes of the weights are loaded. Graphs of one case are
replayed in turns, and a time is the median, of a layer.

There is one rank, whose exchange is as short as it can be: what is gained there is the least. With `--late-us N` a
second rank of the same process joins, on a stream of its own, and comes N us later than the first in each exchange, as
peers of a real group do; both share the GPU, so only differences between variants mean anything.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import record
from weaveopt import _native
from weaveopt.cost_model.l2_prefetch import Order
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.traits import header_bytes
from weaveopt.measure.cases.all_reduce_norm.calls import Fused, peer_call
from weaveopt.measure.clock import capture
from weaveopt.records.candidate import Fabric
from weaveopt.reductions.buffers import memory_plan
from weaveopt.reductions.call import Prefetch
from weaveopt.reductions.peer import native_kernel, native_site
from weaveopt.reductions.prefetch_ranges import PrefetchRange, ranges_of
from weaveopt.reductions.variant import Algorithm, KernelRow, Transfer

LAYERS = 16
DTYPE = torch.bfloat16
PLANNED_RANKS = 2
"""Whose buffers hold what one rank or two exchange."""
SHARED_CTAS = 64
"""Of each of two ranks on one GPU, so that all fit beside each other."""
ROUNDS, REPLAYS = 7, 5
HEADER_BYTES = header_bytes(Fabric.PEER)


@dataclass(frozen=True)
class Shape:
    """Linear layers that read the normalized rows: `hidden` to each of `columns`, on one rank."""

    hidden: int
    columns: tuple[int, ...]


SHAPES = {
    "70b-tp2-qkv": Shape(8192, (4096, 512, 512)),
    "70b-tp2-gate-up": Shape(8192, (14336, 14336)),
    "70b-tp8-qkv": Shape(8192, (1024, 128, 128)),
    "70b-tp8-gate-up": Shape(8192, (3584, 3584)),
    "8b-tp2-qkv": Shape(4096, (2048, 512, 512)),
    "8b-tp2-gate-up": Shape(4096, (7168, 7168)),
}


@dataclass(frozen=True)
class Variant:
    order: Order | None
    mebibytes: int
    ctas: int

    @property
    def name(self) -> str:
        ctas = f" on {self.ctas} CTAs" if self.ctas else ""
        return "without" if self.order is None else f"{self.order.value} {self.mebibytes} MiB{ctas}"

    def ranges(self, weights: Sequence[Tensor], tokens: int) -> tuple[PrefetchRange, ...]:
        if self.order is None:
            return ()
        return ranges_of(weights, Prefetch(self.mebibytes << 20, self.order, tokens))


WITHOUT = Variant(None, 0, 0)


class Group:
    """One rank, or two of one process, and the tensors of their calls."""

    def __init__(self, num_ranks: int, hidden: int, tokens: int) -> None:
        self.tokens, self.hidden = tokens, hidden
        row = KernelRow(tokens, Algorithm.ONE_SHOT, Transfer.LL_PACKET)
        call = peer_call("benchmark", "0", PLANNED_RANKS, Fused(row, hidden, tokens), False)
        call = replace(call, timeout_s=20.0, normalized_aliases_arena=False)
        layout = Layout.of(memory_plan("0", [call]))
        num_bytes = HEADER_BYTES + layout.num_bytes
        self._arenas = [torch.zeros(num_bytes, device="cuda", dtype=torch.uint8) for _ in range(num_ranks)]
        bases = [arena.data_ptr() for arena in self._arenas]
        fills = [(HEADER_BYTES + offset, size, word) for offset, size, word in layout.fills()]
        groups = [_native.PeerGroup(bases, 0, rank, 0, num_bytes, fills) for rank in range(num_ranks)]
        torch.cuda.synchronize()
        self._sites = [_native.GpuAllReduceNorm(group, native_site(call, 7, layout)) for group in groups]
        self._kernel = int(native_kernel(row))
        self._num_ctas = 0 if num_ranks == 1 else SHARED_CTAS
        random = torch.Generator("cuda").manual_seed(1)
        self._partial, self._residual = torch.randn(
            2, tokens, hidden, generator=random, device="cuda", dtype=DTYPE
        ).unbind()
        self._scale = torch.ones(hidden, device="cuda", dtype=DTYPE)
        self._sums = [torch.empty(tokens, hidden, device="cuda", dtype=DTYPE) for _ in range(num_ranks)]
        self.normalized = [torch.empty(tokens, hidden, device="cuda", dtype=DTYPE) for _ in range(num_ranks)]

    def exchange(self, rank: int, ranges: tuple[PrefetchRange, ...] = (), ctas: int = 0) -> None:
        code = self._sites[rank].run_prefetching(
            self.tokens, self._kernel, self._num_ctas, torch.cuda.current_stream().cuda_stream,
            self._partial.data_ptr(), 0, self._residual.data_ptr(), 0, 0, 0, self._scale.data_ptr(), 0, 0, 0, 0,
            self.normalized[rank].data_ptr(), self._sums[rank].data_ptr(), 0, ranges, ctas,
        )  # fmt: skip
        assert code == 0, _native.cuda_error_text(code)


def cycles_of(us: float) -> int:
    """Of `torch.cuda._sleep`, whose clock is the GPU's."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    count = 2_000_000
    for _ in range(3):
        torch.cuda._sleep(count)
    begin.record()
    torch.cuda._sleep(count)
    end.record()
    torch.cuda.synchronize()
    return int(us * count / (begin.elapsed_time(end) * 1e3))


def chain(
    group: Group, layers: Sequence[Sequence[Tensor]], outs: Sequence[Tensor], variant: Variant, late_cycles: int
) -> Callable[[], None]:
    """What is captured. Each exchange of the late rank begins behind the GEMMs before, and waits first."""
    # Ranks wait for each other, so their streams may share no queue of the GPU: those of another priority do not.
    peer = torch.cuda.Stream(priority=-1) if late_cycles else None

    def run() -> None:
        own = torch.cuda.current_stream()
        for weights in layers:
            if peer is not None:
                peer.wait_stream(own)
                with torch.cuda.stream(peer):
                    torch.cuda._sleep(late_cycles)
                    group.exchange(1)
            group.exchange(0, variant.ranges(weights, group.tokens), variant.ctas)
            for weight, out in zip(weights, outs, strict=True):
                torch.mm(group.normalized[0], weight.t(), out=out)
        if peer is not None:
            own.wait_stream(peer)

    return run


def times_of(graphs: dict[Variant, torch.cuda.CUDAGraph]) -> dict[Variant, float]:
    """Microseconds of a layer."""
    times: dict[Variant, list[float]] = {variant: [] for variant in graphs}
    for turn in range(ROUNDS + 1):
        for variant in graphs if turn % 2 else reversed(list(graphs)):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
            graphs[variant].replay()
            events[0].record()
            for event in events[1:]:
                graphs[variant].replay()
                event.record()
            torch.cuda.synchronize()
            if turn:
                pairs = itertools.pairwise(events)
                times[variant] += [begin.elapsed_time(end) * 1e3 / LAYERS for begin, end in pairs]
    return {variant: statistics.median(found) for variant, found in times.items()}


def measure(name: str, shape: Shape, tokens: int, late_us: float, variants: Sequence[Variant]) -> record.Row:
    random = torch.Generator("cuda").manual_seed(2)
    layers = [
        [torch.randn(n, shape.hidden, generator=random, device="cuda", dtype=DTYPE) for n in shape.columns]
        for _ in range(LAYERS)
    ]
    outs = [torch.empty(tokens, n, device="cuda", dtype=DTYPE) for n in shape.columns]
    group = Group(2 if late_us else 1, shape.hidden, tokens)
    cycles = cycles_of(late_us) if late_us else 0
    pool = torch.cuda.graph_pool_handle()
    graphs, want = {}, None
    for variant in (WITHOUT, *variants):
        graphs[variant] = capture(chain(group, layers, outs, variant, cycles), pool)
        graphs[variant].replay()
        torch.cuda.synchronize()
        got = torch.cat([group.normalized[0], *outs], 1)
        want = got if want is None else want
        assert torch.equal(got, want), f"{variant.name} changes results"
    us = times_of(graphs)
    without = us.pop(WITHOUT)
    best = min(us, key=lambda variant: us[variant])
    weight_bytes = sum(shape.columns) * shape.hidden * DTYPE.itemsize
    found = ", ".join(f"{variant.name} {without - us[variant]:+.2f}" for variant in us)
    print(f"{name} ({weight_bytes >> 20} MiB), {tokens} tokens, late {late_us} us: {without:.2f} us; saved: {found}")
    sys.stdout.flush()
    for graph in graphs.values():
        graph.reset()
    parameters: dict[str, record.Scalar] = {f"us {variant.name}": round(us[variant], 2) for variant in us}
    ranks = 2 if late_us else 1
    case = {"shape": name, "tokens": tokens, "late_us": late_us, "ranks": ranks, "dtype": "bfloat16"}
    return record.row(
        case=case, weave_us=us[best], baselines={"without": without}, parameters={"best": best.name, **parameters}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu", help="folder of benchmarks/results that the figures go to")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--orders", nargs="+", choices=[each.value for each in Order], default=list(Order))
    parser.add_argument("--late-us", type=float, nargs="+", default=[0.0], help="0: one rank, which waits for nobody")
    parser.add_argument("--ctas", type=int, nargs="+", default=[0], help="that load; 0: one for each idle SM")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues that streams are spread over
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found: run this benchmark on a GPU host")
    every = itertools.product(map(Order, args.orders), args.mebibytes, args.ctas)
    variants = [Variant(*each) for each in every if each[1]]
    rows = []
    with torch.no_grad():
        for late_us, name, tokens in itertools.product(args.late_us, args.shapes, args.tokens):
            rows.append(measure(name, SHAPES[name], tokens, late_us, variants))
            if not args.no_write:  # after every row: a run that is cut short has those it came to
                record.write("l2_prefetch", args.machine, rows, beside=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
