"""`weave::expert_exchange` against transformers' all-to-all and against all-gather + reduce-scatter.

    python -m benchmarks.moe_sharded [--worlds 2,3,4] [--shapes mixtral_small,qwen_small] [--tokens 8 512] [--quick]

CPU ranks, one thread each, bf16; every rank has as many tokens of its own, routed uniformly or with half of all tokens
on an eighth of the experts (at least one). All variants of a case take turns in one run on the same spawned ranks. A
time is the median over iterations, of the ranks the slowest. The baselines are transformers' own classes: `AllToAllEP`
with `grouped_mm`, and the same experts on gathered tokens, foreign ones masked, whose sums a reduce-scatter adds.
`bound` is the experts alone on as many rows as come to a rank on average, in the order in which they need them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import record
from tests.ranks import run_ranks
from tests.tolerances import LIBRARY, assert_close
from weaveopt.records.candidate import Fabric

DTYPE = torch.bfloat16
TOKENS = (8, 64, 512, 2048)
GROUP = "0"
TIMEOUT_S = 120.0
NUM_ROUNDS = 3
"""Variants take turns this often, so that drift of the machine meets all of them."""
ALL_TO_ALL, GATHER, LIBRARY_OP, EXPERTS = "gloo_all_to_all", "gloo_all_gather", "through_library", "experts"
BATCHES = {"whole": 1, "own_first": 2}
WEAVE = "own_first"
"""What `weave_us` is of: the op's default."""


@dataclass(frozen=True)
class Shape:
    """A mixture; `experts` are those of all ranks together, a multiple of every world."""

    hidden: int
    inner: int
    experts: int
    choices: int


SHAPES = {"mixtral_small": Shape(1024, 1024, 12, 2), "qwen_small": Shape(1024, 256, 48, 8)}


@dataclass(frozen=True)
class Case:
    shape: str
    tokens: int
    """Of a rank."""
    skewed: bool


@dataclass(frozen=True)
class Medians:
    """Median microseconds by variant, on one rank."""

    case: Case
    us: dict[str, float]


def routes(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, and weights that add up to one."""
    shape, random = SHAPES[case.shape], torch.Generator().manual_seed(rank)
    scores = torch.rand(case.tokens, shape.experts, generator=random)
    if case.skewed:
        chosen = torch.rand(case.tokens, generator=random) < 0.5
        hot = max(shape.experts // 8, 1)
        scores[:, :hot] += chosen[:, None].float()
    weights, experts = scores.topk(shape.choices, dim=-1)
    return experts, torch.softmax(weights, dim=-1).to(DTYPE)


def variants(case: Case, world: int, rank: int) -> dict[str, Callable[[], object]]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import CONFIG_MAPPING
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from weaveopt.experts.form import activation_of, call_of
    from weaveopt.fabrics import shm, topology
    from weaveopt.fabrics.rows_call import memory_plan
    from weaveopt.mixtures.by_expert import ExpertWeights
    from weaveopt.ops.moe_sharded.experts import expert_rows
    from weaveopt.ops.moe_sharded.op import SITES

    shape = SHAPES[case.shape]
    own = shape.experts // world
    config = CONFIG_MAPPING["mixtral"](
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_local_experts=own,
        num_experts_per_tok=shape.choices, experts_implementation="grouped_mm",
    )  # fmt: skip
    experts = MixtralExperts(config).to(DTYPE).requires_grad_(False)
    experts._is_expert_parallel = True
    random = torch.Generator().manual_seed(100 + rank)
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.copy_(torch.randn(weight.shape, generator=random) * weight.shape[-1] ** -0.5)
    x = torch.randn(case.tokens, shape.hidden, generator=random).to(DTYPE)
    ids, weights = routes(case, rank)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("experts", "batch"))
    theirs = AllToAllEP(experts, mesh["experts"], mesh["batch"])

    def gathered() -> Tensor:
        whole, every_id, every_weight = (
            torch.empty(world * case.tokens, each.shape[1], dtype=each.dtype) for each in (x, ids, weights)
        )
        for out, each in ((whole, x), (every_id, ids), (every_weight, weights)):
            dist.all_gather_into_tensor(out, each)
        foreign = (every_id // own) != rank
        mine = torch.where(foreign, own, every_id % own)
        partial = experts(whole, mine, every_weight.masked_fill(foreign, 0.0))
        out = torch.empty_like(x)
        dist.reduce_scatter_tensor(out, partial)
        return out

    call = replace(
        call_of(activation_of(experts), GROUP, world, shape.hidden, "bfloat16", own, same_tokens=True),
        site=f"benchmark.{case}",
        fabric=Fabric.SHM, max_tokens=case.tokens, choices=shape.choices, timeout_s=TIMEOUT_S,
    )  # fmt: skip
    plan = memory_plan(GROUP, [(call, SITES[Fabric.SHM].buffers(call))])
    shm.reserve(topology.discover(GROUP, TIMEOUT_S), plan, 0, TIMEOUT_S)
    operands = ExpertWeights(experts.gate_up_proj, None, experts.down_proj, None)

    def ours(**changes: object) -> Callable[[], Tensor]:
        text = replace(call, **changes).encode()  # type: ignore[arg-type]
        return lambda: torch.ops.weave.expert_exchange(x, ids, weights, *operands, text)  # type: ignore[no-any-return]

    rows = torch.randn(case.tokens * shape.choices, shape.hidden, generator=random).to(DTYPE)
    in_order = torch.arange(len(rows)) * own // len(rows)
    found: dict[str, Callable[[], object]] = {name: ours(batches=number) for name, number in BATCHES.items()}
    found[LIBRARY_OP] = ours(fabric=Fabric.LIBRARY, max_tokens=0)
    found[ALL_TO_ALL] = lambda: theirs(x, ids, weights)
    found[GATHER] = gathered
    want = theirs(x, ids, weights)
    for name, step in found.items():
        got = step()
        assert isinstance(got, Tensor)
        assert_close(got, want, LIBRARY, f"{name}, {case}", DTYPE)
    found[EXPERTS] = lambda: expert_rows(rows, in_order, operands, call)
    return found


def time_us(step: Callable[[], object], num_iterations: int) -> list[float]:
    times = []
    for _ in range(num_iterations):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def rank_main(rank: int, world: int, cases: tuple[Case, ...], num_iterations: int) -> list[Medians]:
    import weaveopt.ops  # noqa: F401

    found = []
    with torch.no_grad():
        for case in cases:
            steps = variants(case, world, rank)
            count = max(2, num_iterations // (1 + case.tokens // 128))
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(NUM_ROUNDS):
                for name, step in steps.items():
                    dist.barrier()
                    time_us(step, 1)
                    times[name] += time_us(step, count)
            found.append(Medians(case, {name: statistics.median(us) for name, us in times.items()}))
    return found


def measure(world: int, cases: tuple[Case, ...], num_iterations: int) -> Iterator[record.Row]:
    by_rank = run_ranks(rank_main, world, world, cases, num_iterations, timeout_s=1800)
    for index, first in enumerate(by_rank[0]):
        us = {name: max(medians[index].us[name] for medians in by_rank) for name in first.us}
        case, shape = first.case, SHAPES[first.case.shape]
        yield record.row(
            case={
                "ranks": world, "tokens": case.tokens, "shape": case.shape, "hidden": shape.hidden,
                "inner": shape.inner, "experts": shape.experts, "choices": shape.choices, "skewed": case.skewed,
                "dtype": "bfloat16",
            },
            weave_us=us[WEAVE],
            baselines={name: us[name] for name in (ALL_TO_ALL, GATHER)},
            bound_us=us[EXPERTS],
            parameters={f"{name}_us": round(us[name], 3) for name in (*BATCHES, LIBRARY_OP)},
        )  # fmt: skip


def show(rows: list[record.Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="a mixture's tokens sharded over CPU ranks, bf16, microseconds")
    names = (*BATCHES, LIBRARY_OP)
    for name in ("ranks", "tokens", "shape", "skewed", ALL_TO_ALL, GATHER, *names, "ratio", "bound"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = [*row.baselines.values(), *(float(row.parameters[f"{name}_us"]) for name in names)]
        table.add_row(
            *(str(row.case[name]) for name in ("ranks", "tokens", "shape", "skewed")),
            *(f"{figure:.0f}" for figure in figures), f"{row.ratio:.2f}x", f"{row.bound_us:.0f}",
        )  # fmt: skip
    Console(width=160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="2,3,4", help="rank counts")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of those in SHAPES")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of a rank")
    parser.add_argument("--quick", action="store_true", help="few iterations, small cases; nothing is written")
    args = parser.parse_args()
    tokens = [each for each in args.tokens if not args.quick or each <= 64]
    cases = tuple(
        Case(shape, count, skewed) for shape in args.shapes.split(",") for count in tokens for skewed in (False, True)
    )
    iterations = 4 if args.quick else 40
    rows = [row for world in args.worlds.split(",") for row in measure(int(world), cases, iterations)]
    show(rows)
    if not args.quick:
        print(record.write("moe_sharded", "cpu", rows, beside=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
