"""Predicted against measured: how far the cost model is off, and whether what it chooses is the fastest.

    python -m benchmarks.prediction [--device cuda] [--profile NAME|FILE] [--ranks N] [--layers prefill:1024 decode:8]

GEMMs, kernels bound by memory, attention, collectives, every kernel of the fused all-reduce + norm at sizes and
row lengths that no profile holds, sites left alone, and whole layers. A site's candidates are all measured, so the
choice can be held against the best of them and against leaving the site alone. At many more sites (`--sites`) only the
choice and leaving are measured: see `benchmarks/prediction_sweep.py`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks import accuracy, gpu_ranks, record, results_table
from benchmarks.prediction_cases import Trial
from benchmarks.prediction_model import predict_again
from weaveopt import cost_model
from weaveopt.errors import ProfileError
from weaveopt.wording import counted

SUITE = "prediction"
LAYERS = ("prefill:1024", "decode:8")
SITES = {"cuda": 260, "cpu": 0}
QUICK_SITES = 4
MOST_SITES = 1000


def summary(rows: Sequence[record.Row]) -> str:
    """Errors by kind, and how good the choices are."""
    lines = [
        [each.kind, str(each.cases), f"{each.mean:.1%}", f"{each.p90:.1%}", f"{each.largest:.1%}"]
        for each in accuracy.errors(rows)
    ]
    text = gpu_ranks.table("predicted against measured", ["kind", "cases", "mean error", "90th", "largest"], lines)
    return f"{text}\n{accuracy.sentence(accuracy.choices(rows))}".rstrip()


def measure(device: torch.device, args: argparse.Namespace) -> list[record.Row]:
    return Trial(device, cost_model.load(args.profile), args.quick, args.sites).run()


def layers(args: argparse.Namespace, place: gpu_ranks.Place) -> list[record.Row]:
    """Whole layers on GPUs, rewritten and not."""
    from benchmarks import llama_layers_gpu as gpu

    cases = tuple(gpu.parse(word) for word in args.layers)
    if not cases:
        return []
    rows, wrong = gpu.run(place, gpu.Asked(cases, args.profile, False, False), lambda found: None)
    assert not wrong, "; ".join(wrong)
    return [row for whole in rows for row in of_layers(whole)]


def of_layers(whole: record.Row) -> list[record.Row]:
    """Two predictions for a row of the suite `llama_layers`: with the rewrites, and by Inductor alone."""
    found = []
    pairs = (("weave", whole.weave_us, whole.predicted_us),
             ("inductor", whole.baselines["inductor"], whole.parameters.get("inductor_predicted_us")))  # fmt: skip
    for name, us, predicted in pairs:
        if isinstance(predicted, float):
            row = record.row(
                case={"kind": "layers", "backend": name, **whole.case},
                weave_us=us, baselines={"measured": us}, predicted_us=predicted,
            )  # fmt: skip
            found.append(row)
    return found


def finish(args: argparse.Namespace, rows: list[record.Row]) -> None:
    print(summary(rows))
    if not args.quick:
        print(record.write(SUITE, args.machine, rows))


def again(args: argparse.Namespace) -> int:
    """The result file's measurements, held against what the model says now. Date, host and commit stay theirs."""
    path = record.RESULTS / args.machine / f"{SUITE}.json"
    rows = predict_again(cost_model.load(args.profile), list(results_table.read(path).rows))
    print(summary(rows))
    print(record.rewrite(path, rows))
    return 0


def main_cpu(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure(torch.device("cpu"), args)
    if dist.get_rank() == 0:
        finish(args, rows)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, help="default: 2 on CPUs, as many as there are GPUs")
    parser.add_argument("--profile", help="machine profile to hold against the clock (default: MACHINE)")
    parser.add_argument("--machine", help="folder of benchmarks/results that the figures go to (default: the device)")
    parser.add_argument(
        "--sites", type=int, metavar="N",
        help="sites of a group at which only leaving and the choice are measured (default: 260, on CPUs none)",
    )  # fmt: skip
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), help="whole layers to run on GPUs")
    parser.add_argument("--again", action="store_true", help="measure nothing: predict the result file's cases anew")
    parser.add_argument("--quick", action="store_true", help="few cases, and nothing is written")
    args = parser.parse_args()
    args.machine = args.machine or args.device
    args.profile = args.profile or args.machine
    if args.sites is None:
        args.sites = QUICK_SITES if args.quick else SITES[args.device]
    if not 0 <= args.sites <= MOST_SITES:
        parser.error(f"--sites {args.sites}: expected 0 to {MOST_SITES}")
    try:
        cost_model.load(args.profile)
    except ProfileError as error:
        parser.error(f"{error}; --profile names another one than --machine")
    if args.again:
        return again(args)
    if not dist.is_torchelastic_launched():
        if args.device == "cuda":
            num_ranks = args.ranks or torch.cuda.device_count()
            if num_ranks < 2:
                raise SystemExit(f"found {counted(num_ranks, 'CUDA device')}, the benchmark needs at least 2")
            return gpu_ranks.start("benchmarks.prediction", num_ranks, sys.argv[1:])
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks or 2)]
        command = [sys.executable, "-m", *launch, "-m", "benchmarks.prediction", *sys.argv[1:]]
        return subprocess.call(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if args.device == "cpu":
        return main_cpu(args)

    def program(place: gpu_ranks.Place) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        rows = measure(place.device, args)
        place.say(summary(rows))
        rows += layers(args, place)
        if place.rank == 0:
            finish(args, rows)

    gpu_ranks.run_and_exit(program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
