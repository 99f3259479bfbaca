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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kinds:
    """What kernels of a trace are, by words in their names; the first that fits, in this order."""

    words: Mapping[str, tuple[str, ...]]
    colors: Mapping[str, str]
    """In the order in which a picture has them."""

    def of(self, kernel: Kernel) -> str:
        name = kernel.name.lower()
        return next(kind for kind, words in self.words.items() if any(word in name for word in words))


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy of a trace, in microseconds."""

    name: str
    begin: float
    us: float


LAYER = Kinds(
    {
        "GEMM and exchange": ("push_tiles", "multiply_gathered"),
        "attention": ("flash", "fmha", "cudnn", "attention"),
        "exchange": ("nccl", "weave", "sum_parts", "memcpy ptop", "memcpy p2p"),
        "GEMM": ("gemm", "cutlass", "cublas", "nvjet", "sm90_xmma", "gemv", "splitk"),
        "other": ("",),
    },
    {
        "GEMM": "#4878a8",
        "attention": "#8a6fae",
        "GEMM and exchange": "#2f9e77",
        "exchange": "#d1603d",
        "other": "#a0a0a0",
    },
)


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
    begins = [index for index, kernel in enumerate(run) if LAYER.of(kernel) == "attention"]
    assert len(begins) >= layers, f"found {len(begins)} kernels of attention, expected one in each of {layers} layers"
    of_a_layer = len(begins) // layers
    return list(run[begins[-2 * of_a_layer] : begins[-of_a_layer]])


def draw(traces: Sequence[tuple[str, list[Kernel]]], output: Path, kinds: Kinds = LAYER) -> None:
    """A row of each kind of kernel for each trace, all at one scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    longest = max(kernels[-1].begin + kernels[-1].us - kernels[0].begin for _, kernels in traces)
    figure, axes = plt.subplots(len(traces), 1, figsize=(12, 2.2 * len(traces)), sharex=True, squeeze=False)
    for axis, (name, kernels) in zip(axes[:, 0], traces, strict=True):
        found = [(kernel, kinds.of(kernel)) for kernel in kernels]
        rows = [kind for kind in kinds.colors if any(kind == of_kernel for _, of_kernel in found)]
        for kernel, kind in found:
            place = (kernel.begin - kernels[0].begin, kernel.us)
            axis.broken_barh([place], (rows.index(kind) - 0.4, 0.8), color=kinds.colors[kind])
        whole = kernels[-1].begin + kernels[-1].us - kernels[0].begin
        axis.axvline(whole, color="black", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(rows)), rows)
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
