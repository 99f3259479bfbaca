"""`weave::all_reduce_norm` against a library's all-reduce followed by Inductor's add + RMSNorm.

    python -m benchmarks.all_reduce_rms_norm [--worlds 2,3,4] [--quick]                       CPU ranks, against Gloo
    python -m benchmarks.all_reduce_rms_norm --device cuda --machine h200x4 [--worlds 4,2]    GPUs of this host
        [--sweep-ctas] [--sweep-shapes] [--sums] [--all] [--tokens 1 64] [--hiddens 8192]
    torchrun --nproc-per-node 4 -m benchmarks.all_reduce_rms_norm --device cuda ...           the same, one world only

On CPU ranks: one thread each, hidden 4096, bf16; all variants of a case take turns in one run on the same spawned
ranks. A time is the median over iterations, of the ranks the slowest. `bound` is what memory allows: the op must at
least read partial result and residual and write sum and normalized, once each, so it is the time of two copies of that
size in the same run, with all ranks copying at once, into memory that is there already.

On GPUs: see benchmarks/all_reduce_rms_norm_gpu.py and benchmarks/all_reduce_rms_norm_variants.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import record
from tests.ranks import run_ranks
from tests.tolerances import LIBRARY, assert_close
from weaveopt import cost_model
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec
from weaveopt.reductions.buffers import memory_plan
from weaveopt.reductions.call import ReductionCall
from weaveopt.reductions.prices.estimate import estimate_fused
from weaveopt.reductions.prices.table import one_shot_max_tokens
from weaveopt.reductions.prices.workload import Workload
from weaveopt.reductions.variant import Algorithm
from weaveopt.wording import counted

HIDDEN = 4096
DTYPE = torch.bfloat16
EPS = 1e-5
TOKENS = (1, 8, 64, 512, 4096)
GROUP = "0"
TIMEOUT_S = 60.0
NUM_ROUNDS = 4
"""Variants take turns this often, so that drift of the machine meets all of them."""
GLOO, UNFUSED, COPY = "gloo_all_reduce", "gloo_then_inductor", "copy"


@dataclass(frozen=True)
class Medians:
    """Median microseconds by variant at one token count, on one rank."""

    tokens: int
    us: dict[str, float]


def unfused(partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What Llama's layers do between one product and the next."""
    reduced = torch.ops._c10d_functional.all_reduce(partial, "sum", GROUP)
    total = torch.ops._c10d_functional.wait_tensor(reduced) + residual
    wide = total.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(DTYPE)
    return weight * scaled, total


def variants(world: int, rank: int, tokens: int) -> dict[str, Callable[[], object]]:
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

    def ours(call: str) -> Callable[[], object]:
        return lambda: fused(partial, None, None, residual, None, None, weight, None, call)

    steps = {name: ours(call) for name, call in calls.items()}
    want = compiled(partial, residual, weight)
    for name, step in steps.items():
        for got, expected in zip(step(), want, strict=True):  # type: ignore[call-overload]
            assert_close(got, expected, LIBRARY, f"{name}, {tokens} tokens")
    steps[UNFUSED] = lambda: compiled(partial, residual, weight)
    # In place, as a library user would; gloo's own time does not depend on the values.
    steps[GLOO] = lambda: dist.all_reduce(buffer.zero_())
    steps[COPY] = lambda: (targets[0].copy_(partial), targets[1].copy_(residual))
    return steps


def time_us(step: Callable[[], object], num_iterations: int) -> list[float]:
    times = []
    for _ in range(num_iterations):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def rank_main(rank: int, world: int, quick: bool) -> list[Medians]:
    import weaveopt.ops  # noqa: F401

    torch._dynamo.config.recompile_limit = 64
    found = []
    with torch.no_grad():
        for tokens in TOKENS[:3] if quick else TOKENS:
            steps = variants(world, rank, tokens)
            num_iterations = max(4, min(400, 100_000 // (tokens * 16))) // (4 if quick else 1)
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(NUM_ROUNDS):
                for name, step in steps.items():
                    dist.barrier()
                    time_us(step, 2)
                    times[name] += time_us(step, num_iterations)
            found.append(Medians(tokens, {name: statistics.median(us) for name, us in times.items()}))
    return found


def measure(world: int, quick: bool) -> list[record.Row]:
    by_rank = run_ranks(rank_main, world, world, quick, timeout_s=900)
    machine = cost_model.load("cpu")
    rows = []
    for index, first in enumerate(by_rank[0]):
        us = {name: max(medians[index].us[name] for medians in by_rank) for name in first.us}
        ours = {algorithm.value: us[algorithm.value] for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)}
        # What the op itself would run here: the profile's choice, not the faster of the two measured.
        workload = Workload(first.tokens, first.tokens, HIDDEN, "bfloat16", world)
        threshold = one_shot_max_tokens(machine, Fabric.SHM, HIDDEN, "bfloat16", world)
        chosen = Algorithm.ONE_SHOT if first.tokens <= threshold else Algorithm.TWO_SHOT
        predicted = estimate_fused(machine, workload, Fabric.SHM, chosen, sum_sharded=False)
        rows.append(
            record.row(
                case={"ranks": world, "tokens": first.tokens, "hidden": HIDDEN, "dtype": "bfloat16"},
                weave_us=ours[chosen.value],
                baselines={UNFUSED: us[UNFUSED]},
                predicted_us=predicted.us,
                bound_us=us[COPY],
                parameters={
                    "algorithm": chosen.value, **{f"{name}_us": round(t, 3) for name, t in ours.items()},
                    f"{GLOO}_us": round(us[GLOO], 3),
                },
            )
        )  # fmt: skip
    return rows


def show(rows: list[record.Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"all-reduce + residual + RMSNorm, hidden {HIDDEN}, bf16, microseconds")
    columns = (
        "ranks tokens gloo_then_inductor gloo_all_reduce one_shot two_shot weave predicted ratio bound weave/bound"
    )
    for name in columns.split():
        table.add_column(name, justify="right")
    for row in rows:
        bound = row.bound_us or 0.0
        figures = [row.baselines[UNFUSED], row.parameters[f"{GLOO}_us"], row.parameters["one_shot_us"],
                   row.parameters["two_shot_us"], row.weave_us, row.predicted_us or 0.0]  # fmt: skip
        table.add_row(
            str(row.case["ranks"]), str(row.case["tokens"]), *(f"{figure:.1f}" for figure in figures),
            f"{row.ratio:.2f}x", f"{bound:.1f}", f"{row.weave_us / bound:.1f}",
        )  # fmt: skip
    Console().print(table)


def main_gpu(args: argparse.Namespace) -> int:
    """One torchrun for each world, unless this is a rank of one already; then the results of all of them."""
    from benchmarks import all_reduce_rms_norm_gpu as gpu
    from benchmarks import gpu_ranks

    flags = {
        gpu.MAIN: args.main or args.all,
        gpu.CTAS: args.sweep_ctas or args.all,
        gpu.SHAPES: args.sweep_shapes or args.all,
        gpu.SUMS: args.sums or args.all,
    }
    suites = tuple(suite for suite, is_asked in flags.items() if is_asked) or (gpu.MAIN,)
    profile = args.profile or (args.machine if args.machine in cost_model.names() else "h200x4")
    asked = gpu.Asked(suites, profile, tuple(args.tokens), tuple(args.hiddens), args.quick)

    def finish(found: gpu.Found) -> None:
        for suite, rows in found.rows.items():
            print(gpu.summary(suite, rows))
            if not (args.quick or args.tokens or args.hiddens):
                print(record.write(suite, args.machine, rows, beside=True))

    def program(place: gpu_ranks.Place) -> None:
        bench = gpu.Bench(place, asked, Path(args.found) if args.found else None)
        bench.run()
        if place.rank == 0:
            bench.found.save(Path(args.found)) if args.found else finish(bench.found)

    if dist.is_torchelastic_launched():
        gpu_ranks.run_and_exit(program)
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        raise SystemExit(f"found {counted(num_gpus, 'CUDA device')}, the benchmark needs at least 2")
    worlds = (
        [int(world) for world in args.worlds.split(",")] if args.worlds else [n for n in (8, 4, 2) if n <= num_gpus]
    )
    together = gpu.Found()
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            code = gpu_ranks.start("benchmarks.all_reduce_rms_norm", world, [*sys.argv[1:], "--found", str(path)])
            if code:
                return code
            together.add_from(path)
    finish(together)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--worlds", help="rank counts (default: 2,3,4; GPUs: 8,4,2 as far as there are)")
    parser.add_argument("--machine", help="folder of benchmarks/results that the figures go to (default: the device)")
    parser.add_argument("--quick", action="store_true", help="few iterations, small cases; nothing is written")
    gpus = parser.add_argument_group("GPUs")
    gpus.add_argument("--sweep-ctas", action="store_true", help="how many CTAs the bulk form needs")
    gpus.add_argument("--sweep-shapes", action="store_true", help="many shapes, the profile's choice alone")
    gpus.add_argument("--sums", action="store_true", help="all-reduces that no norm follows")
    gpus.add_argument("--main", action="store_true", help="the main suite")
    gpus.add_argument("--all", action="store_true", help="the main suite, both sweeps and the sums")
    gpus.add_argument("--tokens", type=int, nargs="+", default=[], help="only these; no result file is written")
    gpus.add_argument("--hiddens", type=int, nargs="+", default=[], help="only these; no result file is written")
    gpus.add_argument("--profile", help="machine profile that chooses and predicts (default: MACHINE if shipped)")
    gpus.add_argument("--found", help=argparse.SUPPRESS)  # where the ranks of one world leave their figures
    args = parser.parse_args()
    args.machine = args.machine or args.device
    if args.device == "cuda":
        return main_gpu(args)
    rows = [row for world in (args.worlds or "2,3,4").split(",") for row in measure(int(world), args.quick)]
    show(rows)
    if not args.quick:
        print(record.write("all_reduce_rms_norm", args.machine, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
