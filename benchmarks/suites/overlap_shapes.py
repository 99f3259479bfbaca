"""A layer's GEMMs and exchanges at many shapes: what the model chooses against the strong sequence, on one host's GPUs.

A dense layer but for attention: `o_proj`, all-reduce, addition, RMSNorm, gate and up, SiLU, `down_proj`, all-reduce,
addition, RMSNorm, q, k and v; bf16, random weights of a rank's share. It is compiled twice: with all rules, and as
`strong_sequence` without those that let a GEMM and its exchange overlap, which leaves cuBLAS and weave's fused
all-reduce + norm. Where the first has chosen none of these rules both are the same, and a row says 1. Their results
agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import weaveopt
from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.timing import Effort, Step, chain, replayed_us
from weaveopt.config import OptionValue

OVERLAPPING = ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "shard_norm")
TOKENS = Setting("tokens", (37, 200, 509, 777, 1021, 1536, 1999, 3001, 4093, 6007, 8191), quick=(777,))
PROFILE = Setting("profile", "h100x2", "whose prices choose")
CALLS = 4
"""In a graph."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    model: str
    tokens: int


@dataclass(frozen=True)
class Shape:
    """Sizes of the whole model."""

    hidden: int
    inner: int
    attention: int
    """Rows of q's weight."""
    cached: int
    """Rows of k's and of v's."""


SHAPES = {
    "llama-3-8b": Shape(4096, 14336, 4096, 1024),
    "llama-3-70b": Shape(8192, 28672, 8192, 1024),
    "qwen2.5-7b": Shape(3584, 18944, 3584, 512),
    "qwen2.5-32b": Shape(5120, 27648, 5120, 1024),
    "qwen2.5-72b": Shape(8192, 29568, 8192, 1024),
    "mistral-large": Shape(12288, 28672, 12288, 1024),
}


@dataclass(frozen=True)
class Layer:
    """A rank's share of the weights, as `[out, in]`."""

    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    norms: tuple[Tensor, Tensor]

    @staticmethod
    def make(place: Place, shape: Shape) -> Layer:
        own, same = (torch.Generator(place.device).manual_seed(seed) for seed in (1 + place.rank, 0))
        share = 1 / place.world

        def weight(rows: float, columns: float) -> Tensor:
            size = int(rows), int(columns)
            return torch.randn(size, generator=own, device=place.device, dtype=torch.bfloat16) / columns**0.5

        hidden, inner, attention = shape.hidden, shape.inner * share, shape.attention * share
        of_columns = [
            weight(rows, hidden) for rows in (inner, inner, attention, shape.cached * share, shape.cached * share)
        ]
        norms = torch.rand(2, hidden, generator=same, device=place.device).to(torch.bfloat16)
        gate, up, q, k, v = of_columns
        return Layer(weight(hidden, attention), gate, up, weight(hidden, inner), q, k, v, (norms[0], norms[1]))

    def run(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        residual, rows = self._reduced(attended, self.o, residual, self.norms[0])
        rows = torch.nn.functional.silu(rows @ self.gate.t()) * (rows @ self.up.t())
        residual, rows = self._reduced(rows, self.down, residual, self.norms[1])
        return rows @ self.q.t(), rows @ self.k.t(), rows @ self.v.t(), residual

    @staticmethod
    def _reduced(rows: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + functional.all_reduce(rows @ weight.t(), "sum", dist.group.WORLD)
        wide = residual.float()
        return residual, norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(residual.dtype)


def compiled(layer: Layer, profile: str, disable: tuple[str, ...]) -> Callable[..., tuple[Tensor, ...]]:
    torch._dynamo.reset()
    options: dict[str, OptionValue] = {
        "machine": profile, "strict": True, "timeout_s": TIMEOUT_S, "disable": list(disable),
    }  # fmt: skip
    return torch.compile(layer.run, backend="weave", dynamic=False, options=options)  # type: ignore[call-overload,no-any-return]


def row_of(place: Place, name: str, layer: Layer, tokens: int, profile: str) -> record.Row:
    own, same = (torch.Generator(place.device).manual_seed(seed) for seed in (7 + place.rank, 7))
    made = {"device": place.device, "dtype": torch.bfloat16}
    attended = torch.randn(tokens, layer.o.shape[1], generator=own, **made)  # type: ignore[call-overload]
    residual = torch.randn(tokens, layer.o.shape[0], generator=same, **made)  # type: ignore[call-overload]
    step = compiled(layer, profile, ())
    got = step(attended, residual)
    chosen = [decision.chosen.choice for decision in weaveopt.report().graphs[-1].decisions]
    overlapping = [choice for choice in chosen if choice in OVERLAPPING]
    case = {"model": name, "tokens": tokens, "prices": profile, "ranks": place.world, "dtype": "bfloat16"}
    told = {"chosen": " ".join(chosen)}
    if not overlapping:
        us = _times(place, {"weave": lambda: step(attended, residual)})["weave"]
        return record.row(case=case, weave_us=us, baselines={"strong_sequence": us}, parameters={**told, "same": True})
    strong = compiled(layer, profile, OVERLAPPING)
    for mine, theirs in zip(got, strong(attended, residual), strict=True):
        scale = theirs.float().abs().max()
        worst = (mine.float() - theirs.float()).abs().max() / scale
        assert worst < 3e-2, f"{name}, {tokens} tokens, rank {place.rank}: off by {worst:.3f} of {scale:.3f}"
    both = _times(
        place, {"weave": lambda: step(attended, residual), "strong_sequence": lambda: strong(attended, residual)}
    )
    baselines = {"strong_sequence": both["strong_sequence"]}
    return record.row(case=case, weave_us=both["weave"], baselines=baselines, parameters={**told, "same": False})


def _times(place: Place, steps: dict[str, Step]) -> dict[str, float]:
    return replayed_us(place, {name: chain(step, CALLS) for name, step in steps.items()}, Effort(12, 2), CALLS)


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for name in dict.fromkeys(case.model for case in cases):
        layer = Layer.make(place, SHAPES[name])
        for case in (case for case in cases if case.model == name):
            yield row_of(place, name, layer, case.tokens, asked.of(PROFILE))
        del layer
        torch.cuda.empty_cache()


MODELS = Setting("models", tuple(SHAPES), quick=("llama-3-8b",), among=tuple(SHAPES))
SUITES = (
    Suite(
        "overlap_shapes", "a dense layer with and without the rules that overlap a GEMM and its exchange",
        Needs(GPU, 2),
        lambda asked: product(Case, asked.of(MODELS), asked.of(TOKENS)), rows, ours=("weave",),
        baselines=("strong_sequence",), settings=(MODELS, TOKENS, PROFILE),
    ),
)  # fmt: skip
