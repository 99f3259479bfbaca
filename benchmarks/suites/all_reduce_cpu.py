"""`weave::all_reduce_norm` on CPU ranks, against Gloo's all-reduce followed by Inductor's add + RMSNorm.

One thread each, hidden 4096, bf16. The op must at least read partial result and residual and write sum and normalized,
once each: the bound is the time of two copies of that size in the same run, with all ranks copying at once, into memory
that is there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import CPU, Asked, Needs, Setting, Suite
from benchmarks.timing import Effort, Step, host_us
from tests.graphs.tolerances import LIBRARY, assert_close
from weaveopt import cost_model
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.table import one_shot_max_tokens
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

HIDDEN = 4096
DTYPE = torch.bfloat16
EPS = 1e-5
TOKENS = Setting("tokens", (1, 8, 64, 512, 4096), quick=(1, 64))
GROUP = "0"
TIMEOUT_S = 60.0
GLOO, UNFUSED, COPY = "gloo_all_reduce", "gloo_then_inductor", "copy"


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int = HIDDEN


def unfused(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All-reduce, addition and RMSNorm as in Llama's layers."""
    reduced = torch.ops._c10d_functional.all_reduce(partial, "sum", GROUP)
    total = torch.ops._c10d_functional.wait_tensor(reduced) + residual
    wide = total.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(DTYPE)
    return weight * scaled, total


def variants(world: int, rank: int, tokens: int) -> dict[str, Step]:
    from weaveopt.fabrics import shm, topology

    random = torch.Generator().manual_seed(rank)
    partial = torch.randn(tokens, HIDDEN, generator=random).to(DTYPE)
    residual = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(99)).to(DTYPE)
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(7)).to(DTYPE)
    one_shot = ReductionCall(
        site=f"benchmark.{tokens}", group=GROUP, fabric=Fabric.SHM, world=world, hidden=HIDDEN, dtype="bfloat16",
        out_dtype="bfloat16", max_tokens=tokens, one_shot_max_tokens=tokens, post=None,
        norm=NormSpec(NormKind.RMS, EPS, cast_before_weight=True), timeout_s=TIMEOUT_S,
    )  # fmt: skip
    shm.reserve(topology.discover(GROUP, TIMEOUT_S), memory_plan(GROUP, [one_shot]), 0, TIMEOUT_S)
    calls = {
        Algorithm.ONE_SHOT.value: one_shot.encode(),
        Algorithm.TWO_SHOT.value: replace(one_shot, one_shot_max_tokens=0).encode(),
    }
    fused = torch.ops.weave.all_reduce_norm.default
    compiled = torch.compile(unfused, dynamic=False)
    buffer = partial.clone()
    targets = (torch.empty_like(partial), torch.empty_like(residual))

    def ours(call: str) -> Step:
        return lambda: fused(partial, None, None, residual, None, None, weight, None, call)

    steps: dict[str, Step] = {name: ours(call) for name, call in calls.items()}
    want = compiled(partial, residual, weight)
    for name, step in steps.items():
        for got, expected in zip(step(), want, strict=True):  # type: ignore[call-overload]
            assert_close(got, expected, LIBRARY, f"{name}, {tokens} tokens")
    steps[UNFUSED] = lambda: compiled(partial, residual, weight)
    # In place, as a library user would; gloo's own time does not depend on the values.
    steps[GLOO] = lambda: dist.all_reduce(buffer.zero_())
    steps[COPY] = lambda: (targets[0].copy_(partial), targets[1].copy_(residual))
    return steps


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    import weaveopt.ops  # noqa: F401

    torch._dynamo.config.recompile_limit = 64
    world, machine = place.world, cost_model.load("cpu")
    for tokens in (case.tokens for case in cases):
        effort = Effort(4, max(4, min(400, 100_000 // (tokens * 16))))
        us = host_us(place, variants(world, place.rank, tokens), effort)
        ours = {algorithm.value: us[algorithm.value] for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)}
        # What the op itself would run here: the profile's choice, not the faster of the two measured.
        workload = Workload(tokens, tokens, HIDDEN, "bfloat16", world)
        threshold = one_shot_max_tokens(machine, Fabric.SHM, HIDDEN, "bfloat16", world)
        chosen = Algorithm.ONE_SHOT if tokens <= threshold else Algorithm.TWO_SHOT
        yield record.row(
            case={"ranks": world, "tokens": tokens, "hidden": HIDDEN, "dtype": "bfloat16"},
            weave_us=ours[chosen.value],
            baselines={UNFUSED: us[UNFUSED]},
            predicted_us=estimate_fused(machine, workload, Fabric.SHM, chosen, sum_sharded=False).us,
            bound_us=us[COPY],
            parameters={
                "algorithm": chosen.value, **{f"{name}_us": round(t, 3) for name, t in ours.items()},
                f"{GLOO}_us": round(us[GLOO], 3),
            },
        )  # fmt: skip


SUITES = (
    Suite(
        "all_reduce_rms_norm", "all-reduce + residual + RMSNorm through shared memory",
        Needs(CPU, 2, worlds=(2, 3, 4)), lambda asked: [Case(tokens) for tokens in asked.of(TOKENS)], rows,
        ours=("one_shot", "two_shot"), baselines=(UNFUSED,),
        predicted="the cpu profile's price of the chosen algorithm",
        bound="two copies of the rows, by all ranks at once", settings=(TOKENS,),
    ),
)  # fmt: skip
