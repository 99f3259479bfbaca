"""One rank of `test_shard_norm_gpu`: a compiled decoder under a tensor-parallel plan, by every pair of variants.

Profiles claim made-up times, so short that the variants meant are chosen. Logits are held against the same decoder in
fp32: what is compiled may be off by twice what eager in the same dtype is. They are bitwise the same on all ranks, and
from replay to replay of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention, silu

import weaveopt
from benchmarks.ranks import Place, barrier, run_and_exit
from tests.gpu.captured import captured
from tests.gpu.profiles import with_curves, written_once
from tests.graphs import forms
from weaveopt import cost_model
from weaveopt.cost_model.machine import Curve, Point
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER, REDUCE_SCATTER_NORM
from weaveopt.records.report import GraphReport

RULE, OTHER = "shard_norm", "all_reduce_rms_norm"
POINTS = (Point(1 << 10, 0.5), Point(1 << 30, 1.0))
HIDDEN, INNER, HEAD, LAYERS, VOCABULARY = 1024, 512, 64, 2, 1000
"""Sizes of the decoder. `HIDDEN`: elements of a row; `INNER`: elements of a row between GEMMs, on one rank."""
REPLAYS = 200


@dataclass(frozen=True)
class Case:
    name: str
    tokens: tuple[int, int]
    """Sequences, and their length."""
    dtype: torch.dtype = torch.bfloat16
    early: bool = True
    """True if the profile has curves of kernels that hide their exchange."""
    takes_norm: bool = False
    """True if the profile has a curve of the kernel with addition and norm too."""
    has_bias: bool = False
    """True if q, k and v have a bias."""
    is_layer_norm: bool = False
    last_token: bool = False
    """True if only the last token's logits are asked for: an operation other than a GEMM reads the last rows then."""
    variants: tuple[str, str] = ("tiles, pushed", "tiles, pushed")
    """Expected variants of the sites after attention and after the MLP, whose rows q, k and v read."""


CASES = (
    Case("even", (1, 512)),
    Case("odd", (3, 37), last_token=True),
    Case("biased", (1, 2048), torch.float16, has_bias=True, last_token=True),
    Case("inside", (2, 256), takes_norm=True, variants=("tiles norm, pushed", "tiles norm, pushed")),
    Case(
        "inside biased",
        (1, 1036),
        torch.float16,
        takes_norm=True,
        has_bias=True,
        last_token=True,
        variants=("tiles norm, pushed", "tiles norm, pushed"),
    ),
    Case("inside odd", (3, 37), takes_norm=True),
    Case("late", (2, 128), early=False, is_layer_norm=True, variants=("partials, copies", "partials, copies")),
)


def profile(early: bool, takes_norm: bool = False) -> str:
    """Writes a profile under which the asked variants win. The gather of a sum has no GEMM, so one curve covers it."""
    base, world = cost_model.load("h200x4"), dist.get_world_size()
    curves = [Curve("fused", "all_gather", "copies", world, POINTS)]
    if early:
        for size in (64, 8192):
            tiles = REDUCE_SCATTER.name_of(TileConfig(256, 1, 4), size)
            pushed = ALL_GATHER.name_of(TileConfig(256, 1), size)
            curves.append(Curve("fused", "gemm_reduce_scatter", tiles, world, POINTS, HIDDEN))
            curves.append(Curve("fused", "all_gather_gemm", pushed, world, POINTS, HIDDEN))
            if takes_norm:
                normed = REDUCE_SCATTER_NORM.name_of(TileConfig(256, 2, 16), size)
                curves.append(Curve("fused", REDUCE_SCATTER_NORM.op, normed, world, POINTS, HIDDEN))
    else:
        curves.append(Curve("fused", "reduce_scatter", "partials", world, POINTS))
    return written_once(with_curves(base, f"chain{early}{takes_norm}", curves))


class Decoder:
    """This rank's part; parameters are drawn in fp32 and rounded to `dtype`, so that both dtypes hold the same."""

    def __init__(self, case: Case, rank: int, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        own, every = torch.Generator("cuda").manual_seed(10 + rank), torch.Generator("cuda").manual_seed(1)

        def drawn(*shape: int, of_rank: bool = True) -> Tensor:
            values = torch.randn(*shape, device="cuda", generator=own if of_rank else every)
            return (values / shape[-1] ** 0.5).to(case.dtype).to(dtype)

        def norm() -> Tensor:
            return (drawn(HIDDEN, of_rank=False).float() + 1).to(case.dtype).to(dtype)

        self.embedding = drawn(VOCABULARY, HIDDEN, of_rank=False) * 32
        self.head, self.last = drawn(VOCABULARY, HIDDEN, of_rank=False), norm()
        self.layers = [
            {
                **{name: drawn(INNER, HIDDEN) for name in ("q", "k", "v", "gate", "up")},
                **{name: drawn(HIDDEN, INNER) for name in ("o", "down")},
                **{f"{name}_bias": drawn(INNER) for name in ("q", "k", "v")},
                "first": norm(),
                "second": norm(),
            }
            for _ in range(LAYERS)
        ]

    def __call__(self, ids: Tensor) -> Tensor:
        total = self.embedding[ids]
        for layer in self.layers:
            rows = self._norm(total, layer["first"])
            q, k, v = (self._heads(rows, layer, name) for name in ("q", "k", "v"))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            total = total + self._summed(linear(attended, layer["o"]))
            rows = self._norm(total, layer["second"])
            inner = silu(linear(rows, layer["gate"])) * linear(rows, layer["up"])
            total = total + self._summed(linear(inner, layer["down"]))
        rows = self._norm(total, self.last)
        return linear(rows[:, -1:] if self.case.last_token else rows, self.head)

    def _heads(self, rows: Tensor, layer: dict[str, Tensor], name: str) -> Tensor:
        bias = layer[f"{name}_bias"] if self.case.has_bias else None
        return linear(rows, layer[name], bias).unflatten(-1, (-1, HEAD)).transpose(1, 2)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.case.is_layer_norm:
            return layer_norm(x, (HIDDEN,), weight, weight * 0.1)
        return forms.rms(x, weight)

    def _summed(self, partial: Tensor) -> Tensor:
        return functional.all_reduce(partial, "sum", dist.group.WORLD)


def ids_of(tokens: tuple[int, int], seed: int) -> Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, VOCABULARY, tokens, device="cuda", generator=random)


def as_good(got: Tensor, eager: Tensor, exact: Tensor, what: str) -> None:
    """Against the decoder in fp32."""
    assert got.shape == exact.shape and bool(torch.isfinite(got).all()), what
    size = float(exact.norm())
    errors = [float((each.float() - exact).norm()) / size for each in (got, eager)]
    assert errors[0] <= 2 * errors[1] + 1e-3, f"{what}: off by {errors[0]:.2e}, eager by {errors[1]:.2e}"


def same_on_all_ranks(got: Tensor, what: str) -> None:
    every = [torch.empty(got.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(every, got.float().cpu())
    assert all(torch.equal(each, every[0]) for each in every), f"{what}: ranks differ"


def reductions(report: GraphReport) -> list[tuple[str, str]]:
    return [(d.chosen.choice, d.chosen.variant) for d in report.decisions if d.site.kind == "reduction"]


def compiled_of(decoder: Decoder, machine: str, dynamic: bool = False) -> Callable[[Tensor], Tensor]:
    """Sites of a GEMM that reads the rows, or with `dynamic` the other reduction, would be cheaper at few of them."""
    torch._dynamo.reset()
    options = {"machine": machine, "strict": True, "timeout_s": 30.0, "force": [RULE] if dynamic else [RULE, OTHER]}
    options["disable"] = ["merged_gemm", *([OTHER, "gemm_all_reduce"] if dynamic else [])]
    kept = None if dynamic else False
    return torch.compile(decoder.__call__, backend="weave", options=options, fullgraph=True, dynamic=kept)  # type: ignore[call-overload]


def check(case: Case, place: Place, machine: str) -> None:
    decoder, exact = Decoder(case, place.rank, case.dtype), Decoder(case, place.rank, torch.float32)
    run = compiled_of(decoder, machine)
    for seed in range(3):
        ids = ids_of(case.tokens, seed)
        got = run(ids)
        as_good(got, decoder(ids), exact(ids), f"{case.name}, call {seed}")
        same_on_all_ranks(got, f"{case.name}, call {seed}")
    found = reductions(weaveopt.report().graphs[-1])
    ours = 2 * LAYERS - int(case.last_token)
    wanted = [(RULE, case.variants[site % 2]) for site in range(ours)]
    assert found[:ours] == wanted, f"{case.name}: {found}"
    assert all(choice in (RULE, OTHER) for choice, _ in found), f"{case.name}: {found}"

    ids = ids_of(case.tokens, 7)
    want = run(ids).clone()
    barrier()
    graph, result = captured(lambda: run(ids))
    for replay in range(REPLAYS):
        result.fill_(float("nan"))
        graph.replay()
        if replay % 20 == 0 or replay == REPLAYS - 1:
            assert torch.equal(result, want), f"{case.name}: replay {replay} differs"
    for seed in (8, 9):
        ids.copy_(ids_of(case.tokens, seed))
        graph.replay()
        as_good(result, decoder(ids), exact(ids), f"{case.name}, replay with other tokens {seed}")
    barrier()
    place.say(f"{case.name}: {found}")


def check_symbolic(place: Place, machine: str) -> None:
    """One graph for all lengths but one row a rank, which is left; rows are filled up where they do not divide."""
    case = Case("symbolic", (2, 0), early=False)
    decoder, exact = Decoder(case, place.rank, case.dtype), Decoder(case, place.rank, torch.float32)
    run = compiled_of(decoder, machine, dynamic=True)
    for length in (33, 7, 64, 2):
        ids = ids_of((1, length), length)
        torch._dynamo.mark_dynamic(ids, 1)
        got = run(ids)
        as_good(got, decoder(ids), exact(ids), f"symbolic, {length} tokens")
        same_on_all_ranks(got, f"symbolic, {length} tokens")
    found, few = (reductions(graph) for graph in weaveopt.report().graphs[-2:])
    assert (RULE, "partials, copies") in found and OTHER not in dict(found), found
    assert {choice for choice, _ in few} == {"leave"}, few
    barrier()
    place.say(f"symbolic: {found}")


def program(place: Place) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        machines = {known: profile(*known) for known in ((True, False), (True, True), (False, False))}
        for case in CASES:
            check(case, place, machines[case.early, case.takes_norm])
        check_symbolic(place, machines[False, False])
    print("chains agree", flush=True)


if __name__ == "__main__":
    run_and_exit(program)
