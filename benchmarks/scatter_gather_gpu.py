"""GEMM + reduce-scatter and all-gather + GEMM on the GPUs of one host, beside what runs there without weaveopt.

    python -m benchmarks.scatter_gather_gpu --machine h200x4 [--suites scatter gather] [--tokens ...] [--hidden ...]
        [--k ...] [--widths ...] [--cuts C:P:F:L ...] [--norm-cuts C:P:F:L ...] [--gather-cuts C:P:S:Q ...]

bf16, random data; chains in CUDA graphs that take turns. The best of weave's variants counts, `parameters` has all: a
cut is columns of a tile, pairs of panels in a wave group, then CTAs that finish rows and whether own rows come last
(`--cuts`), or spare CTAs and pieces of a shard (`--gather-cuts`); `partials` and `copies` are cuBLAS and an exchange.
Baselines `sequence` are cuBLAS and NCCL, `async_tp` torch's fused functions: left out, with a line, once they raise.

Suite `gemm_reduce_scatter`: [tokens, k] @ [k, hidden], summed over ranks, and Inductor's addition and norm on this
rank's rows; `norm C:P:F:L` (`--norm-cuts`) is one kernel for all of that; `strong_sequence` is cuBLAS and weave's fused
all-reduce + norm, which hands out all normalized rows.
Suite `all_gather_gemm`: the rows [tokens, hidden] of all ranks @ [hidden, n].

The bound is perfect overlap: the longer of cuBLAS and of the link's share of the exchange.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from types import ModuleType
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
from torch import Tensor

import weaveopt.ops  # noqa: F401
from benchmarks import gpu_ranks, record
from benchmarks.all_reduce_rms_norm_variants import PUSH_BYTES_PER_S
from benchmarks.gemm_all_reduce_gpu import DEPTHS, EXCHANGE_CTAS, REPLAY_US, TFLOPS, TOKENS, Inputs
from benchmarks.gpu_ranks import Place
from weaveopt import _native
from weaveopt.fabrics import peer, rows_call, topology
from weaveopt.measure.cases import all_gather_gemm, gemm_reduce_scatter, gemm_reduce_scatter_norm
from weaveopt.measure.cases.all_reduce_norm import calls
from weaveopt.measure.cases.memory import add_norm
from weaveopt.ops.all_gather_gemm import op as gathers
from weaveopt.ops.all_gather_gemm.call import AllGatherGemmCall
from weaveopt.ops.all_gather_gemm.cut import Cut as GatherCut
from weaveopt.ops.gemm_reduce_scatter import op as scatters
from weaveopt.ops.gemm_reduce_scatter.call import GemmReduceScatterCall, GemmReduceScatterNormCall
from weaveopt.ops.gemm_reduce_scatter.cut import Cut as TileCut
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import MemoryPlan
from weaveopt.reductions import buffers
from weaveopt.reductions.call import ReductionCall
from weaveopt.reductions.variant import Algorithm, KernelRow, Transfer
from weaveopt.wording import counted

TIMEOUT_S = 60.0
WIDTHS = (5120, 14336)
CHECKED = ((128, 512), (250, 520), (1, 64), (194, 2048))
"""Rows of a rank, and k or n."""
EPS = 1e-5
"""Of `add_norm`."""
GEMM, SEQUENCE, ASYNC_TP = "gemm", "sequence", "async_tp"
SUITES = ["scatter", "gather"]
MULTICAST_TOKENS = 2048
"""Up to so many, torch gathers by NVLink multicast where it may, unless the gathered rows are asked for too."""

Product = Callable[[], Tensor]
Steps = dict[str, gpu_ranks.Step]
T = TypeVar("T")

compiled_add_norm = torch.compile(add_norm, dynamic=False, fullgraph=True)


def names_of(cuts: Sequence[TileCut] | Sequence[GatherCut]) -> list[str]:
    return [":".join(str(int(value)) for value in astuple(cut)) for cut in cuts]


class Bench:
    """How a suite's calls are made, checked and timed."""

    suite: str
    bare: str
    """The variant without a cut."""
    op: ModuleType
    kind: type[GemmReduceScatterCall] | type[AllGatherGemmCall]
    cut: type[TileCut] | type[GatherCut]

    def __init__(self, place: Place, hiddens: list[int], cuts: list[str], most_tokens: int) -> None:
        self.place, self.hiddens, self.most_tokens = place, hiddens, most_tokens
        self.variants = [self.bare, *cuts]
        self.normed: list[str] = []
        """Variants that hold what follows them too."""
        self.left_out = False
        """Torch's own function raised."""

    def call(self, hidden: int, variant: str) -> GemmReduceScatterCall | AllGatherGemmCall:
        return self.kind(
            site=f"benchmark.{self.suite}.{hidden}.{variant}", group=self.place.group, fabric=Fabric.PEER,
            world=self.place.world, hidden=hidden, dtype="bfloat16", max_tokens=self.most_tokens, timeout_s=TIMEOUT_S,
            cut="" if variant == self.bare else str(self.cut(*map(int, variant.split(":")))),
        )  # fmt: skip

    def plans(self) -> Iterator[MemoryPlan]:
        ours = [self.call(hidden, variant) for hidden in self.hiddens for variant in self.variants]
        site = self.op.SITES[Fabric.PEER]
        yield rows_call.memory_plan(self.place.group, [(call, site.buffers(call)) for call in ours])

    def attempt(self, act: Callable[[], T]) -> T | None:
        """What `act`, with torch's own function, returns; None where it raises on a rank, and from then on."""
        if self.left_out:
            return None
        found, why = None, ""
        try:
            found = act()
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.left_out = gpu_ranks.slowest([float(bool(why))]) != [0.0]
        if self.left_out:
            self.place.say(f"{self.suite}: {ASYNC_TP} is left out: {why or 'it raised on another rank'}")
        return None if self.left_out else found

    def compare(self, products: Mapping[str, Product], want: Tensor, atol: float) -> None:
        """Each twice in a row. Raises `AssertionError`; torch's own is left out instead."""
        memory = peer.of(self.place.group)
        rows = [each for each in memory.layout.buffers if each.fill is None]

        def agree(name: str, product: Product) -> None:
            gpu_ranks.barrier()  # no peer writes
            for buffer in rows:
                memory.tensor(buffer.offset, (buffer.num_bytes,), torch.uint8).fill_(0xFF)  # NaN
            gpu_ranks.barrier()
            found = [product() for _ in range(2)]
            torch.cuda.synchronize()
            where = f"{self.suite}, {name}, {tuple(want.shape)}, rank {self.place.rank}"
            for got in found:
                torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=atol, msg=lambda text: f"{where}: {text}")

        for name, product in products.items():
            if name == ASYNC_TP:
                self.attempt(partial(agree, name, product))
            elif name != SEQUENCE:  # NCCL rounds after every addition
                agree(name, product)

    def times(self, steps: Steps, num_flops: float) -> dict[str, float]:
        """Microseconds a call, by name."""
        count = max(2, int(REPLAY_US / (num_flops * 1e-6 / TFLOPS)))

        def chain(step: gpu_ranks.Step) -> None:
            for _ in range(count):
                step()

        shared = torch.cuda.graph_pool_handle()
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for name, step in steps.items():
            # A capture that fails leaves its pool unusable.
            pool = torch.cuda.graph_pool_handle() if name == ASYNC_TP else shared
            capture = partial(gpu_ranks.capture, partial(chain, step), pool)
            graph = self.attempt(capture) if name == ASYNC_TP else capture()
            if graph is not None:
                graphs[name] = graph
        us = gpu_ranks.replayed_us(graphs, 6, 2, self.place.device)
        return {name: value / count for name, value in us.items()}

    def made(self, case: dict[str, int], us: dict[str, float]) -> record.Row:
        """The row of `case`; `us` has the variants, the GEMM alone and the baselines."""
        world = self.place.world
        sent_bytes = (world - 1) / world * case["tokens"] * case["hidden"] * torch.bfloat16.itemsize
        bound_us = max(us[GEMM], sent_bytes / PUSH_BYTES_PER_S * 1e6)
        variants = [*self.variants, *self.normed]
        best = min(variants, key=lambda name: us[name])
        row = record.row(
            case={**case, "dtype": "bfloat16", "ranks": world}, weave_us=us[best], bound_us=bound_us,
            baselines={name: value for name, value in us.items() if name not in (GEMM, *variants)},
            parameters={
                "variant": best, "gemm_us": round(us[GEMM], 1), "over_bare_gemm": round(us[best] / us[GEMM], 3),
                **{f"us {name}": round(us[name], 1) for name in variants},
            },
        )  # fmt: skip
        beside = ", ".join(f"{name} {value:.1f}" for name, value in row.baselines.items())
        self.place.say(
            f"{' x '.join(map(str, case.values()))}: GEMM {us[GEMM]:.1f}, bound {bound_us:.1f} | {beside} | {best} "
            f"{us[best]:.1f}, {row.ratio:.3f} of {row.baselines[row.best_baseline] / bound_us:.3f}"
        )
        return row


class Scatter(Bench):
    suite, bare = "gemm_reduce_scatter", gemm_reduce_scatter.GPU_VARIANT
    op, kind, cut = scatters, GemmReduceScatterCall, TileCut

    def __init__(
        self, place: Place, hiddens: list[int], cuts: list[str], norm_cuts: list[str], most_tokens: int
    ) -> None:
        super().__init__(place, hiddens, cuts, most_tokens)
        self.normed = [f"norm {cut}" for cut in norm_cuts]

    def with_norm(self, variant: str, inputs: Inputs, residual: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """One kernel whose results are those of `add_norm` of this rank's rows. Its buffer is every variant's."""
        hidden = inputs.weight.shape[0]
        call = GemmReduceScatterNormCall(
            site=f"benchmark.{self.suite}.{hidden}.{variant}", group=self.place.group, fabric=Fabric.PEER,
            world=self.place.world, hidden=hidden, dtype="bfloat16", max_tokens=self.most_tokens, timeout_s=TIMEOUT_S,
            cut=str(TileCut(*map(int, variant.removeprefix("norm ").split(":")))), eps=EPS, cast_before_weight=True,
        )  # fmt: skip
        op, text, b = torch.ops.weave.gemm_reduce_scatter_norm.default, call.encode(), inputs.weight.t()
        return lambda: op(inputs.a, b, residual, inputs.norm_weight, text)

    def exchange(self, hidden: int, ctas: int) -> ReductionCall:
        row = KernelRow(self.most_tokens, Algorithm.TWO_SHOT, Transfer.BULK, ctas)
        fused, world = calls.Fused(row, hidden, self.most_tokens), self.place.world
        assert calls.is_supported(fused, world, self.place.device), f"no kernel for rows of {hidden}"
        return calls.peer_call(f"benchmark.exchange.{hidden}.{ctas}", self.place.group, world, fused, True)

    def plans(self) -> Iterator[MemoryPlan]:
        yield from super().plans()
        exchanges = [self.exchange(hidden, ctas) for hidden in self.hiddens for ctas in EXCHANGE_CTAS]
        yield buffers.memory_plan(self.place.group, exchanges)

    def products(self, inputs: Inputs, room: Tensor) -> dict[str, Product]:
        """This rank's rows of the sum, before any addition; `room` is for a GEMM's results."""
        a, b, world = inputs.a, inputs.weight.t(), self.place.world
        k, hidden = b.shape
        why = _native.product_unsupported(_native.DType.bfloat16, hidden, k, world, self.place.device.index or 0)
        assert not why and len(room) <= _native.product_most_tokens(world), why or f"tiles of {len(room)} rows"
        rows = room.new_empty(len(room) // world, hidden)

        def ours(variant: str) -> Product:
            op, text = torch.ops.weave.gemm_reduce_scatter.default, self.call(hidden, variant).encode()
            return lambda: op([a], [b], [], 1, text)

        def sequence() -> Tensor:
            dist.reduce_scatter_tensor(rows, torch.mm(a, b, out=room))
            return rows

        def async_tp() -> Tensor:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, self.place.group)

        return {**{variant: ours(variant) for variant in self.variants}, SEQUENCE: sequence, ASYNC_TP: async_tp}

    def check(self, hidden: int, rows: int, k: int) -> None:
        inputs = Inputs.make(self.place, rows * self.place.world, hidden, k)
        wide = torch.mm(inputs.a.float(), inputs.weight.float().t())
        dist.all_reduce(wide)
        want = wide[self.place.rank * rows : (self.place.rank + 1) * rows]
        # Partial results are rounded before they are summed, and may cancel out.
        self.compare(self.products(inputs, torch.empty_like(inputs.residual)), want, 6e-2)

        residual = inputs.residual[self.place.rank * rows : (self.place.rank + 1) * rows].clone()
        want = want + residual.float()
        wide = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + EPS) * inputs.norm_weight.float()

        def both(step: Callable[[], tuple[Tensor, Tensor]]) -> Product:
            return lambda: torch.stack(step())

        steps = {variant: both(self.with_norm(variant, inputs, residual)) for variant in self.normed}
        self.compare(steps, torch.stack([wide, want]), 6e-2)

    def row(self, hidden: int, k: int, tokens: int) -> record.Row:
        inputs, rows = Inputs.make(self.place, tokens, hidden, k), tokens // self.place.world
        room, scale = torch.empty_like(inputs.residual), inputs.norm_weight
        residual = inputs.residual[self.place.rank * rows : (self.place.rank + 1) * rows].clone()
        # Before any exchange: a rank that compiles for longer would have the others wait inside a kernel.
        compiled_add_norm(torch.zeros_like(residual), residual, scale)

        def multiply() -> Tensor:
            return torch.mm(inputs.a, inputs.weight.t(), out=room)

        def followed(product: Product) -> gpu_ranks.Step:
            return lambda: compiled_add_norm(product(), residual, scale)

        def strong(ctas: int) -> gpu_ranks.Step:
            op, text = torch.ops.weave.all_reduce_norm.default, self.exchange(hidden, ctas).encode()
            return lambda: op(multiply(), None, None, inputs.residual, None, None, scale, None, text)

        steps: Steps = {
            GEMM: multiply,
            **{f"strong_{ctas}": strong(ctas) for ctas in EXCHANGE_CTAS},
            **{name: followed(product) for name, product in self.products(inputs, room).items()},
            **{variant: self.with_norm(variant, inputs, residual) for variant in self.normed},
        }
        us = self.times(steps, 2.0 * tokens * hidden * k)
        us["strong_sequence"] = min(us.pop(f"strong_{ctas}") for ctas in EXCHANGE_CTAS)
        return self.made({"tokens": tokens, "hidden": hidden, "k": k}, us)


class Gather(Bench):
    suite, bare = "all_gather_gemm", all_gather_gemm.GPU_VARIANT
    op, kind, cut = gathers, AllGatherGemmCall, GatherCut

    def products(self, inputs: Inputs, whole: Tensor, room: Tensor) -> dict[str, Product]:
        """`whole` has the rows of all ranks, of which `inputs.a` are this one's; `room` is for a GEMM's results."""
        shard, b, group = inputs.a, inputs.weight.t(), self.place.group
        hidden, width = b.shape
        why = _native.gemm_unsupported(_native.DType.bfloat16, width, hidden, self.place.device.index or 0)
        assert not why, why

        def ours(variant: str) -> Product:
            op, text = torch.ops.weave.all_gather_gemm.default, self.call(hidden, variant).encode()
            return lambda: op(shard, [b], [None], 1, text)[1]

        def sequence() -> Tensor:
            dist.all_gather_into_tensor(whole, shard)
            return torch.mm(whole, b, out=room)

        def async_tp() -> Tensor:
            asks_rows = len(whole) <= MULTICAST_TOKENS
            _, found = torch.ops.symm_mem.fused_all_gather_matmul(shard, [b], 0, group, return_A=asks_rows)
            return found[0]

        return {**{variant: ours(variant) for variant in self.variants}, SEQUENCE: sequence, ASYNC_TP: async_tp}

    def inputs(self, rows: int, hidden: int, width: int) -> tuple[Inputs, Tensor, Tensor]:
        """`rows` of this rank, those of all ranks, and room for a GEMM's results."""
        inputs = Inputs.make(self.place, rows, width, hidden)
        whole = inputs.a.new_empty(rows * self.place.world, hidden)
        dist.all_gather_into_tensor(whole, inputs.a)
        return inputs, whole, whole.new_empty(len(whole), width)

    def check(self, hidden: int, rows: int, width: int) -> None:
        inputs, whole, room = self.inputs(rows, hidden, width)
        want = torch.mm(whole.float(), inputs.weight.float().t())
        self.compare(self.products(inputs, whole, room), want, 2e-2)

    def row(self, hidden: int, width: int, tokens: int) -> record.Row:
        inputs, whole, room = self.inputs(tokens // self.place.world, hidden, width)
        alone: Steps = {GEMM: lambda: torch.mm(whole, inputs.weight.t(), out=room)}
        us = self.times({**alone, **self.products(inputs, whole, room)}, 2.0 * tokens * hidden * width)
        return self.made({"tokens": tokens, "hidden": hidden, "n": width}, us)


def program(place: Place, args: argparse.Namespace) -> None:
    assert not any(tokens % place.world for tokens in args.tokens), f"{args.tokens} tokens of {place.world} ranks"
    torch._dynamo.config.recompile_limit = 1024
    most_tokens = max(*args.tokens, *(rows * place.world for rows, _ in CHECKED))
    suites: list[tuple[Scatter | Gather, list[int]]] = []
    if "scatter" in args.suites:
        suites.append((Scatter(place, args.hidden, args.cuts, args.norm_cuts, most_tokens), args.k))
    if "gather" in args.suites:
        suites.append((Gather(place, args.hidden, args.gather_cuts, most_tokens), args.widths))
    with torch.no_grad():
        for plan in itertools.chain.from_iterable(suite.plans() for suite, _ in suites):
            # All that is captured comes later: graphs hold the arena's addresses.
            peer.reserve(topology.discover(place.group, TIMEOUT_S), plan, 0, TIMEOUT_S)
        for (suite, _), hidden, (rows, size) in itertools.product(suites, args.hidden, CHECKED):
            suite.check(hidden, rows, size)
        place.say("results agree with products in fp32")
        for suite, sizes in suites:
            made: list[record.Row] = []
            for hidden, size, tokens in itertools.product(args.hidden, sizes, args.tokens):
                made.append(suite.row(hidden, size, tokens))
                torch.cuda.empty_cache()
                if place.rank == 0:  # after every row: a run that is cut short has those it came to
                    record.write(suite.suite, args.machine, made, beside=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu", help="folder of benchmarks/results that the figures go to")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of all ranks together")
    parser.add_argument("--hidden", type=int, nargs="+", default=[8192], help="elements of a row that travels")
    parser.add_argument("--k", type=int, nargs="+", default=list(DEPTHS), help="depths before a reduce-scatter")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), help="columns behind an all-gather")
    parser.add_argument("--cuts", nargs="+", default=names_of(gemm_reduce_scatter.TILE_CUTS))
    parser.add_argument("--norm-cuts", nargs="*", default=names_of(gemm_reduce_scatter_norm.CUTS))
    parser.add_argument("--gather-cuts", nargs="+", default=names_of(all_gather_gemm.PUSHED_CUTS))
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        ranks = args.ranks or torch.cuda.device_count()
        if ranks < 2:
            raise SystemExit(f"found {counted(ranks, 'CUDA device')}, the benchmark needs at least 2")
        return gpu_ranks.start("benchmarks.scatter_gather_gpu", ranks, sys.argv[1:])
    gpu_ranks.run_and_exit(lambda place: program(place, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
