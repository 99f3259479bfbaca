"""GEMMs that overlap with their exchange, on the GPUs of one host: kernels that push tiles against cuBLAS and NCCL.

bf16, random data. Every case runs as chains in CUDA graphs that take turns; the best variant counts as weave's, and
`parameters` has all. The bound is perfect overlap: the longer of cuBLAS and of the link's share of the exchange.

`gemm_all_reduce`: residual and sum sharded by tokens; a cut is columns of a tile, pairs of panels in a wave group, CTAs
that finish rows. `strong_sequence` is cuBLAS and then weave's own fused all-reduce + norm, `sequence` cuBLAS, NCCL and
Inductor's addition and norm. `gemm`: the GEMM alone.

`gemm_reduce_scatter` and `all_gather_gemm`: a cut is columns of a tile, pairs of panels in a wave group and, of the
former, CTAs that finish rows; `partials` and `copies` are cuBLAS and an exchange. `async_tp` is torch's fused
functions: left out, with a line, where they raise. Inductor's addition and norm on this rank's rows follow a
reduce-scatter; `norm C:P:F` is one kernel for all of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, UsageError, product
from benchmarks.workloads import gemm_all_reduce, scatter_gather
from benchmarks.workloads.gemm_all_reduce import Inputs, chains_us, tiles_of
from benchmarks.workloads.scatter_gather import ASYNC_TP, SEQUENCE, Gather, Scatter
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.fabrics import peer, topology
from weaveopt.measure.cases.gemm_comm import all_gather as all_gather_gemm
from weaveopt.measure.cases.gemm_comm import reduce_scatter as gemm_reduce_scatter
from weaveopt.measure.cases.gemm_comm import reduce_scatter_norm as gemm_reduce_scatter_norm

TOKENS = Setting("tokens", (1024, 2048, 4096, 8192, 16384), "of all ranks together", quick=(2048,))
HIDDENS = Setting("hiddens", (8192,), "elements of a row that travels")
DEPTHS = Setting("k", (2048, 4096, 7168, 14336), "depths of the GEMM", quick=(4096,))
WIDTHS = Setting("widths", (5120, 14336), "columns of the GEMM's result", quick=(5120,))
PRODUCT_CUTS = Setting(
    "cuts", ("256:1:4", "256:2:4", "256:2:8", "256:2:16", "256:4:4"), "COLUMNS:PAIRS:CTAS", quick=("256:2:8",)
)
PRODUCTS_CHECKED = ((512, 512), (1000, 520), (1, 64), (777, 2048))
"""Tokens and k."""
SHARDS_CHECKED = ((128, 512), (250, 520), (1, 64), (194, 2048))
"""Rows of a rank, and k or n."""


def names_of(cuts: Iterable[TileConfig]) -> tuple[str, ...]:
    return tuple(":".join(str(value) for value in astuple(cut) if value) for cut in cuts)


SCATTER_CUTS = Setting("cuts", names_of(gemm_reduce_scatter.TILE_CUTS), "COLUMNS:PAIRS:CTAS")
NORM_CUTS = Setting("norm_cuts", names_of(gemm_reduce_scatter_norm.CUTS), "COLUMNS:PAIRS:CTAS")
GATHER_CUTS = Setting("cuts", names_of(all_gather_gemm.PUSHED_CUTS), "COLUMNS:PAIRS")


@dataclass(frozen=True)
class DeepCase:
    """[tokens, k] @ [k, hidden]."""

    tokens: int
    hidden: int
    k: int


@dataclass(frozen=True)
class WideCase:
    """[tokens, hidden] @ [hidden, n]."""

    tokens: int
    hidden: int
    n: int


def deep_cases(asked: Asked) -> list[DeepCase]:
    axes = asked.of(HIDDENS), asked.of(DEPTHS), asked.of(TOKENS)
    return product(lambda hidden, k, tokens: DeepCase(tokens, hidden, k), *axes)


def wide_cases(asked: Asked) -> list[WideCase]:
    axes = asked.of(HIDDENS), asked.of(WIDTHS), asked.of(TOKENS)
    return product(lambda hidden, n, tokens: WideCase(tokens, hidden, n), *axes)


def reduced_cases(asked: Asked) -> list[DeepCase]:
    list(map(tiles_of, asked.of(PRODUCT_CUTS)))  # a wrong one ends it before GPUs are used
    return deep_cases(asked)


def reduced(place: Place, cases: Sequence[DeepCase], asked: Asked) -> Iterator[record.Row]:
    cuts = {text: tiles_of(text) for text in asked.of(PRODUCT_CUTS)}
    most = max(case.tokens for case in cases)
    for hidden in dict.fromkeys(case.hidden for case in cases):
        bench = gemm_all_reduce.Bench(place, hidden, most)
        for (tokens, k), cut in itertools.product(PRODUCTS_CHECKED, [*cuts.values()][:2]):
            bench.check(min(tokens, most), k, cut)
        place.say("results agree with an fp32 sum and on all ranks")
        for case in (case for case in cases if case.hidden == hidden):
            yield bench.row(case.tokens, case.k, cuts)


def alone(place: Place, cases: Sequence[DeepCase], asked: Asked) -> Iterator[record.Row]:
    for case in cases:
        inputs = Inputs.make(place, case.tokens, case.hidden, case.k)
        room, transposed = torch.empty_like(inputs.residual), inputs.weight.t()
        us = chains_us(
            place,
            {
                "cublas": lambda: torch.mm(inputs.a, transposed, out=room),  # noqa: B023  (timed in this turn)
                "gemm": lambda: gemm_all_reduce.gemm(inputs, room),  # noqa: B023
            },
            2.0 * case.tokens * case.hidden * case.k,
        )
        named = {"tokens": case.tokens, "hidden": case.hidden, "k": case.k, "dtype": "bfloat16", "ranks": place.world}
        yield record.row(case=named, weave_us=us["gemm"], baselines={"cublas": us["cublas"]})


def prepare() -> None:
    torch._dynamo.config.recompile_limit = 1024


def reserved(place: Place, bench: Scatter | Gather) -> None:
    """Checks results, with memory for every variant: graphs, which hold the arena's addresses, are captured later."""
    for plan in bench.plans():
        peer.reserve(topology.discover(place.group, scatter_gather.TIMEOUT_S), plan, 0, scatter_gather.TIMEOUT_S)
    for hidden, (rows, size) in itertools.product(bench.hiddens, SHARDS_CHECKED):
        bench.check(hidden, rows, size)
    place.say("results agree with products in fp32")


def most_tokens(place: Place, tokens: list[int]) -> int:
    if odd := [count for count in tokens if count % place.world]:
        raise UsageError(f"{odd[0]} tokens do not divide among {place.world} ranks")
    return max(*tokens, *(rows * place.world for rows, _ in SHARDS_CHECKED))


def scattered(place: Place, cases: Sequence[DeepCase], asked: Asked) -> Iterator[record.Row]:
    hiddens, most = list(asked.of(HIDDENS)), most_tokens(place, [case.tokens for case in cases])
    bench = Scatter(place, hiddens, list(asked.of(SCATTER_CUTS)), list(asked.of(NORM_CUTS)), most)
    reserved(place, bench)
    for case in cases:
        yield bench.row(case.hidden, case.k, case.tokens)
        torch.cuda.empty_cache()


def gathered(place: Place, cases: Sequence[WideCase], asked: Asked) -> Iterator[record.Row]:
    hiddens, most = list(asked.of(HIDDENS)), most_tokens(place, [case.tokens for case in cases])
    bench = Gather(place, hiddens, list(asked.of(GATHER_CUTS)), most)
    reserved(place, bench)
    for case in cases:
        yield bench.row(case.hidden, case.n, case.tokens)
        torch.cuda.empty_cache()


OVERLAP = "the longer of cuBLAS and of the link's share of the exchange"
SUITES = (
    Suite(
        "gemm_all_reduce", "GEMM, all-reduce, addition and norm in one kernel", Needs(GPU, 2), reduced_cases, reduced,
        ours=("a kernel for every cut",), baselines=("strong_sequence", "sequence"), bound=OVERLAP,
        settings=(TOKENS, HIDDENS, DEPTHS, PRODUCT_CUTS),
    ),
    Suite(
        "gemm", "the GEMM of those kernels alone, all GPUs at work", Needs(GPU), deep_cases, alone, ours=("gemm",),
        baselines=("cublas",), settings=(TOKENS, HIDDENS, DEPTHS),
    ),
    Suite(
        "gemm_reduce_scatter", "GEMM + reduce-scatter, addition and norm", Needs(GPU, 2), deep_cases, scattered,
        ours=("partials", "a kernel for every cut"), baselines=("strong_sequence", SEQUENCE, ASYNC_TP), bound=OVERLAP,
        settings=(TOKENS, HIDDENS, DEPTHS, SCATTER_CUTS, NORM_CUTS), prepare=prepare,
    ),
    Suite(
        "all_gather_gemm", "all-gather + GEMM", Needs(GPU, 2), wide_cases, gathered,
        ours=("copies", "a kernel for every cut"), baselines=(SEQUENCE, ASYNC_TP), bound=OVERLAP,
        settings=(TOKENS, HIDDENS, WIDTHS, GATHER_CUTS), prepare=prepare,
    ),
)  # fmt: skip
