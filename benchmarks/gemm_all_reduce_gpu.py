"""The kernel that pushes tiles, on the GPUs of one host: GEMM, all-reduce, addition and norm in one grid.

    python -m benchmarks.gemm_all_reduce_gpu --machine h200x4 [--tokens ...] [--k ...] [--hidden N] [--cuts T:P:F ...]

Suite `gemm_all_reduce`. bf16, random data, residual and sum sharded by tokens. Every case runs as chains in CUDA graphs
that take turns; the best of the cuts counts as weave's: `T:P:F` is columns of a tile, pairs of panels in a wave group,
CTAs that finish rows. `strong_sequence` is cuBLAS and then weave's own fused all-reduce + norm, `sequence` cuBLAS, NCCL
and Inductor's addition and norm. The bound is perfect overlap: the longer of cuBLAS and of the link's share of the
exchange. Suite `gemm`: the GEMM alone beside cuBLAS.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import weaveopt.ops  # noqa: F401
from benchmarks import gpu_ranks, record
from benchmarks.all_reduce_rms_norm_variants import PUSH_BYTES_PER_S
from benchmarks.gpu_ranks import Place
from weaveopt import _native
from weaveopt.fabrics import peer, topology
from weaveopt.fabrics.traits import header_bytes
from weaveopt.measure.cases.all_reduce_norm import calls
from weaveopt.measure.cases.all_reduce_norm.calls import EPS, TIMEOUT_S, Fused
from weaveopt.measure.cases.memory import add_norm
from weaveopt.records.candidate import Fabric
from weaveopt.reductions.buffers import OUTPUT, locate, memory_plan
from weaveopt.reductions.call import ReductionCall
from weaveopt.reductions.peer import native_site
from weaveopt.reductions.variant import Algorithm, KernelRow, Transfer
from weaveopt.wording import counted

TOKENS = (1024, 2048, 4096, 8192, 16384)
DEPTHS = (2048, 4096, 7168, 14336)
CUTS = ("256:1:4", "256:2:4", "256:2:8", "256:2:16", "256:4:4")
EXCHANGE_CTAS = (32, 128)
REPLAY_US = 1500.0
TFLOPS = 650.0
"""About what a GEMM reaches; how many calls make a replay follows from it."""
CHECKED = ((512, 512), (1000, 520), (1, 64), (777, 2048))


@dataclass(frozen=True)
class Cut:
    tile_columns: int
    group_pairs: int
    finisher_ctas: int

    @staticmethod
    def parse(text: str) -> Cut:
        columns, pairs, ctas = map(int, text.split(":"))
        return Cut(columns, pairs, ctas)

    @property
    def name(self) -> str:
        return f"{self.tile_columns}:{self.group_pairs}:{self.finisher_ctas}"


@dataclass(frozen=True)
class Inputs:
    a: Tensor
    weight: Tensor
    residual: Tensor
    norm_weight: Tensor

    @staticmethod
    def make(place: Place, tokens: int, hidden: int, k: int) -> Inputs:
        own, same = (torch.Generator(place.device).manual_seed(seed) for seed in (1 + place.rank, 1000 + tokens + k))

        def random(*size: int, generator: torch.Generator) -> Tensor:
            return torch.randn(size, generator=generator, device=place.device, dtype=torch.bfloat16)

        scale = torch.rand(hidden, generator=same, device=place.device).to(torch.bfloat16)
        weight = random(hidden, k, generator=own) / k**0.5
        return Inputs(random(tokens, k, generator=own), weight, random(tokens, hidden, generator=same), scale)


class Bench:
    def __init__(self, place: Place, hidden: int, most_tokens: int) -> None:
        self.place, self.hidden = place, hidden
        # Twice the tokens: tiles of all sources are staged, where bulk copies stage those of the peers.
        most = 2 * most_tokens
        self.calls = {ctas: self._call(most, ctas) for ctas in EXCHANGE_CTAS}
        plan = memory_plan(place.group, list(self.calls.values()))
        memory = peer.reserve(topology.discover(place.group, TIMEOUT_S), plan, 0, TIMEOUT_S)
        call = self.calls[EXCHANGE_CTAS[-1]]
        site = native_site(call, 12345, memory.layout)
        self.native = _native.GpuAllReduceNorm(memory.native, site)
        at = locate(call, memory.layout)[OUTPUT].offset
        assert header_bytes(Fabric.PEER) > 0
        self.output = memory.tensor(at, (most_tokens, hidden), torch.bfloat16)
        self.add_norm = torch.compile(add_norm, dynamic=False, fullgraph=True)

    def _call(self, tokens: int, ctas: int) -> ReductionCall:
        row = KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.BULK, ctas)
        fused = Fused(row, self.hidden, tokens)
        call = calls.peer_call(f"benchmark.{self.hidden}.{ctas}", self.place.group, self.place.world, fused, True)
        return replace(call, timeout_s=20.0)

    def tiles(self, inputs: Inputs, cut: Cut) -> tuple[Tensor, Tensor]:
        tokens, k = inputs.a.shape
        total = torch.empty_like(inputs.residual)
        out = self.output[:tokens]
        code = self.native.run_product(
            tokens, cut.tile_columns, cut.group_pairs, cut.finisher_ctas, torch.cuda.current_stream().cuda_stream,
            inputs.a.data_ptr(), inputs.a.stride(0), inputs.weight.data_ptr(), inputs.weight.stride(0), k,
            inputs.residual.data_ptr(), 0, 0, 0, inputs.norm_weight.data_ptr(), 0, 0, 0, 0, out.data_ptr(),
            total.data_ptr(), 0,
        )  # fmt: skip
        assert code == 0, _native.cuda_error_text(code)
        return out, total

    def exchange(self, product: Tensor, inputs: Inputs, ctas: int) -> None:
        text = self.calls[ctas].encode()
        torch.ops.weave.all_reduce_norm.default(
            product, None, None, inputs.residual, None, None, inputs.norm_weight, None, text
        )

    def library(self, inputs: Inputs) -> None:
        product = torch.mm(inputs.a, inputs.weight.t())
        dist.all_reduce(product)
        self.add_norm(product, inputs.residual, inputs.norm_weight)

    def gemm(self, inputs: Inputs, out: Tensor) -> None:
        (rows, k), n = inputs.a.shape, self.hidden
        code = _native.gemm(
            inputs.a.data_ptr(), inputs.weight.data_ptr(), out.data_ptr(), rows, n, k, k, k, n,
            _native.DType.bfloat16, 256, 4, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        assert code == 0, _native.cuda_error_text(code)

    def check(self, tokens: int, k: int, cut: Cut) -> None:
        """Twice in a row against an fp32 sum; bitwise alike on all ranks. Raises `AssertionError`."""
        inputs, place = Inputs.make(self.place, tokens, self.hidden, k), self.place
        wide = torch.mm(inputs.a, inputs.weight.t()).float()
        dist.all_reduce(wide)
        want = (wide + inputs.residual).to(torch.bfloat16)
        scaled = want.float() * torch.rsqrt(want.float().square().mean(-1, keepdim=True) + EPS)
        normalized = inputs.norm_weight * scaled.to(torch.bfloat16)
        self.output.fill_(float("nan"))
        gpu_ranks.barrier()
        for _ in range(2):
            got, total = self.tiles(inputs, cut)
        torch.cuda.synchronize()
        begin, end = (tokens * (place.rank + step) // place.world for step in (0, 1))
        what = f"{tokens} x {self.hidden} x {k}, {cut.name}, rank {place.rank}"
        torch.testing.assert_close(got.float(), normalized.float(), rtol=2e-2, atol=2e-2, msg=what)
        torch.testing.assert_close(total[begin:end], want[begin:end], rtol=2e-2, atol=2e-2, msg=what)
        sums = [torch.zeros((), dtype=torch.int64, device=place.device) for _ in range(place.world)]
        dist.all_gather(sums, got.contiguous().view(torch.int16).long().sum())
        assert all(torch.equal(each, sums[0]) for each in sums), f"ranks differ: {what}"
        gpu_ranks.barrier()

    def rows(self, tokens: int, k: int, cuts: Sequence[Cut]) -> tuple[record.Row, record.Row]:
        inputs = Inputs.make(self.place, tokens, self.hidden, k)
        product = torch.empty(tokens, self.hidden, device=self.place.device, dtype=torch.bfloat16)
        transposed = inputs.weight.t()

        def sequence(ctas: int) -> Callable[[], object]:
            return lambda: self.exchange(torch.mm(inputs.a, transposed), inputs, ctas)

        steps: dict[str, Callable[[], object]] = {
            "cublas": lambda: torch.mm(inputs.a, transposed, out=product),
            "gemm": lambda: self.gemm(inputs, product),
            "sequence": lambda: self.library(inputs),
            **{f"strong_sequence_{ctas}": sequence(ctas) for ctas in EXCHANGE_CTAS},
            **{cut.name: partial(self.tiles, inputs, cut) for cut in cuts},
        }
        us = self._times(steps, 2e-6 * tokens * self.hidden * k / TFLOPS)
        strong = min(us.pop(f"strong_sequence_{ctas}") for ctas in EXCHANGE_CTAS)
        best = min(cuts, key=lambda cut: us[cut.name])
        message = tokens * self.hidden * 2
        link_us = 2 * (self.place.world - 1) / self.place.world * message / PUSH_BYTES_PER_S * 1e6
        case = {"tokens": tokens, "hidden": self.hidden, "k": k, "dtype": "bfloat16", "ranks": self.place.world}
        fused = record.row(
            case=case, weave_us=us[best.name],
            baselines={"strong_sequence": strong, "sequence": us["sequence"]},
            bound_us=max(us["cublas"], link_us),
            parameters={
                "tile_columns": best.tile_columns, "group_pairs": best.group_pairs,
                "finisher_ctas": best.finisher_ctas, **{f"us {cut.name}": round(us[cut.name], 1) for cut in cuts},
            },
        )  # fmt: skip
        alone = record.row(case=case, weave_us=us["gemm"], baselines={"cublas": us["cublas"]})
        self.place.say(
            f"{tokens:6} x {self.hidden} x {k:6}: cuBLAS {us['cublas']:7.1f}, ours {us['gemm']:7.1f} | sequence "
            f"{us['sequence']:7.1f}, strong {strong:7.1f}, tiles {us[best.name]:7.1f} ({best.name}), "
            f"{strong / us[best.name]:.3f} of {strong / max(us['cublas'], link_us):.3f}"
        )
        return fused, alone

    def _times(self, steps: dict[str, Callable[[], object]], gemm_us: float) -> dict[str, float]:
        count = max(2, int(REPLAY_US / gemm_us))

        def chain(step: Callable[[], object]) -> gpu_ranks.Step:
            def run() -> None:
                for _ in range(count):
                    step()

            return run

        pool = torch.cuda.graph_pool_handle()
        graphs = {name: gpu_ranks.capture(chain(step), pool) for name, step in steps.items()}
        replays = {name: graph.replay for name, graph in graphs.items()}
        us = gpu_ranks.median_us(replays, lambda: None, 6, 2, torch.zeros(1, device=self.place.device))
        gpu_ranks.barrier()
        for graph in graphs.values():
            graph.reset()
        return {name: value / count for name, value in us.items()}


def program(place: Place, args: argparse.Namespace) -> None:
    cuts = [Cut.parse(text) for text in args.cuts]
    fused: list[record.Row] = []
    alone: list[record.Row] = []
    with torch.no_grad():
        bench = Bench(place, args.hidden, max(args.tokens))
        for (tokens, k), cut in itertools.product(CHECKED, cuts[:2]):
            bench.check(min(tokens, max(args.tokens)), k, cut)
        place.say("results agree with an fp32 sum and on all ranks")
        for k, tokens in itertools.product(args.k, args.tokens):
            found = bench.rows(tokens, k, cuts)
            fused.append(found[0])
            alone.append(found[1])
            if place.rank == 0:  # after every row: a run that is cut short has those it came to
                record.write("gemm_all_reduce", args.machine, fused, beside=True)
                record.write("gemm", args.machine, alone, beside=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu", help="folder of benchmarks/results that the figures go to")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--k", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--cuts", nargs="+", default=list(CUTS))
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        ranks = args.ranks or torch.cuda.device_count()
        if ranks < 2:
            raise SystemExit(f"found {counted(ranks, 'CUDA device')}, the benchmark needs at least 2")
        return gpu_ranks.start("benchmarks.gemm_all_reduce_gpu", ranks, sys.argv[1:])
    gpu_ranks.run_and_exit(lambda place: program(place, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
