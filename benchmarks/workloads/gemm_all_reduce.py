"""GEMM, all-reduce, addition and norm in one grid: the kernel that pushes tiles, its data, checks and baselines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import weaveopt.ops  # noqa: F401
from benchmarks import record
from benchmarks.ranks import Place, barrier
from benchmarks.suite import UsageError
from benchmarks.timing import Effort, Step, chain, replayed_us
from benchmarks.workloads.reduction import PUSH_BYTES_PER_S
from weaveopt import _native
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.fabrics import peer, topology
from weaveopt.fabrics.traits import header_bytes
from weaveopt.measure.cases.memory import add_norm
from weaveopt.measure.cases.reduction import calls
from weaveopt.measure.cases.reduction.calls import EPS, TIMEOUT_S, Fused
from weaveopt.ops.reduction.buffers import OUTPUT, locate, memory_plan
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.peer import native_site
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric

EXCHANGE_CTAS = (32, 128)
REPLAY_US = 1500.0
TFLOPS = 650.0
"""About what a GEMM reaches; how many calls make a replay follows from it."""


def chains_us(
    place: Place, steps: Mapping[str, Step], num_flops: float, may_fail: Collection[str] = ()
) -> dict[str, float]:
    """Microseconds a call by name, of chains of as many GEMMs as make about a millisecond."""
    count = max(2, int(REPLAY_US / (num_flops * 1e-6 / TFLOPS)))
    return replayed_us(
        place, {name: chain(step, count) for name, step in steps.items()}, Effort(6, 2), count, may_fail=may_fail
    )


def tiles_of(text: str) -> TileConfig:
    """Tiles written as `COLUMNS:PAIRS:CTAS`. Raises `UsageError`."""
    words = text.split(":")
    if len(words) != 3 or not all(word.isdigit() for word in words):
        raise UsageError(f"found tiles {text!r}, expected COLUMNS:PAIRS:CTAS")
    return TileConfig(*map(int, words))


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


def gemm(inputs: Inputs, out: Tensor) -> None:
    """weave's GEMM alone: `inputs.a @ inputs.weight.t()`."""
    (rows, k), n = inputs.a.shape, out.shape[1]
    code = _native.gemm(
        inputs.a.data_ptr(), inputs.weight.data_ptr(), out.data_ptr(), rows, n, k, k, k, n, _native.DType.bfloat16,
        256, 4, torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    assert code == 0, _native.cuda_error_text(code)


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

    def tiles(self, inputs: Inputs, cut: TileConfig) -> tuple[Tensor, Tensor]:
        tokens, k = inputs.a.shape
        total = torch.empty_like(inputs.residual)
        out = self.output[:tokens]
        code = self.native.run_product(
            tokens, _native.TileConfig(cut.tile_columns, cut.group_pairs, cut.reducer_ctas),
            torch.cuda.current_stream().cuda_stream, inputs.a.data_ptr(), inputs.a.stride(0),
            _native.GemmMatrix(inputs.weight.data_ptr(), inputs.weight.stride(0), k), inputs.residual.data_ptr(),
            _native.ReductionParameters(weight=inputs.norm_weight.data_ptr()), out.data_ptr(), total.data_ptr(),
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

    def check(self, tokens: int, k: int, cut: TileConfig) -> None:
        """Twice in a row against an fp32 sum; bitwise alike on all ranks. Raises `AssertionError`."""
        inputs, place = Inputs.make(self.place, tokens, self.hidden, k), self.place
        wide = torch.mm(inputs.a, inputs.weight.t()).float()
        dist.all_reduce(wide)
        want = (wide + inputs.residual).to(torch.bfloat16)
        scaled = want.float() * torch.rsqrt(want.float().square().mean(-1, keepdim=True) + EPS)
        normalized = inputs.norm_weight * scaled.to(torch.bfloat16)
        self.output.fill_(float("nan"))
        barrier()
        for _ in range(2):
            got, total = self.tiles(inputs, cut)
        torch.cuda.synchronize()
        begin, end = (tokens * (place.rank + step) // place.world for step in (0, 1))
        what = f"{tokens} x {self.hidden} x {k}, {cut}, rank {place.rank}"
        torch.testing.assert_close(got.float(), normalized.float(), rtol=2e-2, atol=2e-2, msg=what)
        torch.testing.assert_close(total[begin:end], want[begin:end], rtol=2e-2, atol=2e-2, msg=what)
        sums = [torch.zeros((), dtype=torch.int64, device=place.device) for _ in range(place.world)]
        dist.all_gather(sums, got.contiguous().view(torch.int16).long().sum())
        assert all(torch.equal(each, sums[0]) for each in sums), f"ranks differ: {what}"
        barrier()

    def row(self, tokens: int, k: int, cuts: Mapping[str, TileConfig]) -> record.Row:
        inputs = Inputs.make(self.place, tokens, self.hidden, k)
        product = torch.empty(tokens, self.hidden, device=self.place.device, dtype=torch.bfloat16)
        transposed = inputs.weight.t()

        def sequence(ctas: int) -> Callable[[], object]:
            return lambda: self.exchange(torch.mm(inputs.a, transposed), inputs, ctas)

        steps: dict[str, Callable[[], object]] = {
            "cublas": lambda: torch.mm(inputs.a, transposed, out=product),
            "sequence": lambda: self.library(inputs),
            **{f"strong_sequence_{ctas}": sequence(ctas) for ctas in EXCHANGE_CTAS},
            **{name: partial(self.tiles, inputs, cut) for name, cut in cuts.items()},
        }
        us = chains_us(self.place, steps, 2.0 * tokens * self.hidden * k)
        strong = min(us.pop(f"strong_sequence_{ctas}") for ctas in EXCHANGE_CTAS)
        fastest = min(cuts, key=us.__getitem__)
        best = cuts[fastest]
        message = tokens * self.hidden * 2
        link_us = 2 * (self.place.world - 1) / self.place.world * message / PUSH_BYTES_PER_S * 1e6
        case = {"tokens": tokens, "hidden": self.hidden, "k": k, "dtype": "bfloat16", "ranks": self.place.world}
        return record.row(
            case=case, weave_us=us[fastest],
            baselines={"strong_sequence": strong, "sequence": us["sequence"]},
            bound_us=max(us["cublas"], link_us),
            parameters={
                "tile_columns": best.tile_columns, "group_pairs": best.group_pairs,
                "finisher_ctas": best.reducer_ctas, **{f"us {name}": round(us[name], 1) for name in cuts},
            },
        )  # fmt: skip
