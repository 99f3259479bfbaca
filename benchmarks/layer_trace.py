"""Chrome traces of compiled layers on a GPU, and a picture of a layer before and after: who runs when on rank 0.

    python -m benchmarks.attention_layers_gpu ... --trace FOLDER      writes FOLDER/NAME.json.gz, for chrome://tracing
    python -m benchmarks.layer_trace BEFORE.json.gz AFTER.json.gz --layers 4 --output layer_trace.png

The picture shows the second last layer of each trace, from the first to the last of its kernels.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "GEMM": ("gemm", "cutlass", "cublas", "nvjet", "sm90_xmma", "gemv", "splitk"),
    "attention": ("flash", "fmha", "cudnn", "attention"),
    "GEMM and exchange": ("push_tiles", "multiply_gathered"),
    "exchange": ("nccl", "weave", "sum_parts", "memcpy ptop", "memcpy p2p"),
    "other": ("",),
}
"""By words in the names of kernels; the first that fits."""
ORDER = ("GEMM and exchange", "attention", "exchange", "GEMM", "other")
"""In which the kinds are tried."""
COLORS = {
    "GEMM": "#4878a8",
    "attention": "#8a6fae",
    "GEMM and exchange": "#2f9e77",
    "exchange": "#d1603d",
    "other": "#a0a0a0",
}


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy of a trace, in microseconds."""

    name: str
    begin: float
    us: float

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return next(kind for kind in ORDER if any(word in name for word in KINDS[kind]))


def write(step: Callable[[], object], restore: Callable[[], object], path: Path) -> None:
    """A trace of `step`, run twice, on every rank; rank 0's is kept, as `path` with `.json.gz`."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from benchmarks import gpu_ranks

    restore()
    step()
    gpu_ranks.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(2):
            restore()
            step()
        torch.cuda.synchronize()
    gpu_ranks.barrier()
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(path.with_name(f"{path.name}.json.gz")))


def read(path: Path) -> list[Kernel]:
    """Kernels and copies in the order in which they begin."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [
        Kernel(str(event["name"]), float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy")
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def layer(kernels: Sequence[Kernel], layers: int) -> list[Kernel]:
    """Of the second of two runs, the second last layer: its attention and what follows until the next one's."""
    run = kernels[len(kernels) // 2 :]
    begins = [index for index, kernel in enumerate(run) if kernel.kind == "attention"]
    assert len(begins) >= layers, f"found {len(begins)} kernels of attention, expected one in each of {layers} layers"
    of_a_layer = len(begins) // layers
    return list(run[begins[-2 * of_a_layer] : begins[-of_a_layer]])


def draw(traces: Sequence[tuple[str, list[Kernel]]], output: Path) -> None:
    """A row of each kind of kernel for each trace, all at one scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    longest = max(kernels[-1].begin + kernels[-1].us - kernels[0].begin for _, kernels in traces)
    figure, axes = plt.subplots(len(traces), 1, figsize=(12, 2.2 * len(traces)), sharex=True, squeeze=False)
    for axis, (name, kernels) in zip(axes[:, 0], traces, strict=True):
        kinds = [kind for kind in COLORS if any(kernel.kind == kind for kernel in kernels)]
        for kernel in kernels:
            place = (kernel.begin - kernels[0].begin, kernel.us)
            axis.broken_barh([place], (kinds.index(kernel.kind) - 0.4, 0.8), color=COLORS[kernel.kind])
        whole = kernels[-1].begin + kernels[-1].us - kernels[0].begin
        axis.axvline(whole, color="black", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(kinds)), kinds)
        axis.set_title(f"{name}: {whole:,.0f} us", loc="left", fontsize=10)
        axis.set_xlim(0, longest * 1.01)
    axes[-1, 0].set_xlabel("microseconds")
    figure.tight_layout()
    figure.savefig(output, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--layers", type=int, required=True, help="layers in each trace")
    parser.add_argument("--names", nargs="+", default=None, help="titles (default: names of the files)")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    names = args.names or [path.name.removesuffix(".json.gz") for path in args.traces]
    if len(names) != len(args.traces):
        parser.error(f"{len(names)} names for {len(args.traces)} traces")
    draw([(name, layer(read(path), args.layers)) for name, path in zip(names, args.traces, strict=True)], args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
