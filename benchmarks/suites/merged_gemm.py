"""`weave::merged_linear` on one GPU: projections of one input as one GEMM, against one GEMM each.

bf16, shards of models as their tensor-parallel ranks hold them. Each variant's calls run in one CUDA graph, over as
many sets of weights in turn as exceed the L2. The bound is the weights at the memory's rate (`gpu_limits`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks import gpu_limits, record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.workloads.attention import Call, times_us
from weaveopt.ops.merged_gemm.adjacent import adjoin

Tensor = torch.Tensor
SHARDS = {
    "llama-8b-tp2-qkv": (4096, (2048, 512, 512)),
    "llama-70b-tp8-qkv": (8192, (1024, 128, 128)),
    "qwen3-30b-tp2-qkv": (2048, (2048, 256, 256)),
    "llama-8b-tp2-gate-up": (4096, (7168, 7168)),
    "llama-70b-tp8-gate-up": (8192, (3584, 3584)),
}
"""Input size, and columns of each GEMM."""
NAMES = Setting("shards", tuple(SHARDS), quick=("qwen3-30b-tp2-qkv",), among=tuple(SHARDS))
TOKENS = Setting("tokens", (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192), quick=(8, 1024))
COLD_BYTES = 240e6


@dataclass(frozen=True)
class Case:
    shard: str
    tokens: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        inner, columns = SHARDS[self.shard]
        return inner * sum(columns) * torch.bfloat16.itemsize


def cases(asked: Asked) -> list[Case]:
    return product(Case, asked.of(NAMES), asked.of(TOKENS))


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for case in cases:
        inner, columns = SHARDS[case.shard]
        copies = max(2, round(COLD_BYTES / case.num_bytes))
        x = torch.randn(case.tokens, inner, device=place.device, dtype=torch.bfloat16)
        apart = [
            [torch.randn(n, inner, device=place.device, dtype=torch.bfloat16) / inner**0.5 for n in columns]
            for _ in range(copies)
        ]
        together = [[each.clone() for each in weights] for weights in apart]
        for weights in together:
            assert not (why := adjoin(weights)), why
        results = [_call(x, weights)(0) for weights in (together, apart)]
        torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
        calls = {"weave": _call(x, together), "one_by_one": _one_by_one(x, apart)}
        times = times_us(place, calls, copies)
        ours = times.pop("weave")
        yield record.row(
            case={"shard": case.shard, "tokens": case.tokens, "inner": inner, "columns": " + ".join(map(str, columns))},
            weave_us=ours, baselines=times,
            bound_us=case.num_bytes / gpu_limits.limits(place.device).bytes_per_us,
            parameters={"tflops": round(2 * case.tokens * inner * sum(columns) / ours / 1e6)},
        )  # fmt: skip
        del apart, together, calls, results
        torch.cuda.empty_cache()


def _call(x: Tensor, weights: Sequence[Sequence[Tensor]]) -> Call:
    return lambda index: torch.ops.weave.merged_linear(x, weights[index % len(weights)], [])


def _one_by_one(x: Tensor, weights: Sequence[Sequence[Tensor]]) -> Call:
    def call(index: int) -> Tensor:
        *_, last = (torch.mm(x, each.t()) for each in weights[index % len(weights)])
        return last

    return call


SUITES = (
    Suite(
        "merged_gemm", "projections of one input as one GEMM", Needs(GPU, worlds=(1,)), cases, rows, ours=("weave",),
        baselines=("one_by_one",), settings=(NAMES, TOKENS),
    ),
)  # fmt: skip
