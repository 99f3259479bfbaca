"""Chrome traces of a mixture's experts on one GPU, and a picture of a call by each of the kernels.

    python -m benchmarks.experts_trace_gpu --folder FOLDER [--model mixtral-8x22b] [--tokens 64]
                                           [--kernels hopper one_kernel]
    python -m benchmarks.experts_trace_gpu --draw FOLDER/A.trace.json.gz FOLDER/B.trace.json.gz --output experts.png

A trace holds several calls, of routings in turn, in one CUDA graph; the picture shows the last one. Kernels are
launched while the one ahead still runs and wait for it: their bars overlap.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.layer_trace import Kernel, Kinds, draw, read
from benchmarks.moe_experts_cases import MODELS, Case, Data, capture, make_weights
from weaveopt.expert_kernels.call import Kernels

EXPERTS = Kinds(
    {
        "routing": ("route", "rows_by_expert"),
        "rows gathered": ("gather_expert_rows",),
        "both GEMMs": ("both_gemms",),
        "second GEMM": ("product)3", "down"),
        "first GEMM": ("grouped_gemm", "gate_up"),
        "sum": ("combine",),
        "other": ("",),
    },
    {
        "routing": "#a0a0a0",
        "rows gathered": "#8a6fae",
        "first GEMM": "#4878a8",
        "second GEMM": "#7fb2de",
        "both GEMMs": "#2f9e77",
        "sum": "#d1603d",
        "other": "#505050",
    },
)


def trace(data: Data, kernels: Kernels, path: Path) -> None:
    """Of a replayed graph of a call for every routing."""
    from torch.profiler import ProfilerActivity, profile

    graph = capture(data.planned(kernels))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(path))


def last_call(kernels: list[Kernel]) -> list[Kernel]:
    """Of a trace of several: what begins behind the last but one sum, up to the last."""
    sums = [index for index, kernel in enumerate(kernels) if EXPERTS.of(kernel) == "sum"]
    if len(sums) < 2:
        raise SystemExit(f"found {len(sums)} sums of experts in the trace, expected one of each of several calls")
    return kernels[sums[-2] + 1 : sums[-1] + 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="that traces are written to")
    parser.add_argument("--model", choices=tuple(MODELS), default="mixtral-8x22b")
    parser.add_argument("--tokens", type=int, default=64, help="of each rank")
    parser.add_argument("--ranks", type=int, default=2, help="that share the experts")
    parser.add_argument("--kernels", nargs="+", choices=tuple(map(str, Kernels)), default=["hopper", "one_kernel"])
    parser.add_argument("--draw", type=Path, nargs="+", help="traces to draw instead")
    parser.add_argument("--output", type=Path, help="of the picture")
    args = parser.parse_args()
    if bool(args.draw) != bool(args.output) or bool(args.draw) == bool(args.folder):
        parser.error("either --folder, or --draw and --output")
    if args.draw:
        traces = [(path.name.removesuffix(".trace.json.gz"), last_call(read(path))) for path in args.draw]
        draw(traces, args.output, EXPERTS)
        return 0
    torch.manual_seed(0)
    data = Data(Case(args.model, args.tokens, "uniform", args.ranks), make_weights(MODELS[args.model], args.ranks))
    for kernels in map(Kernels, args.kernels):
        path = args.folder / f"experts_{args.model}_{args.tokens}_{kernels}.trace.json.gz"
        trace(data, kernels, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
