"""Chrome traces of steps on a GPU, and pictures of what ran when on rank 0: layers, or calls of experts.

    python -m benchmarks run attention_layers --machine M --set trace=FOLDER        writes FOLDER/MODEL/NAME.json.gz
    python -m benchmarks draw BEFORE.json.gz AFTER.json.gz --layers 4 --output layer_trace.png
    python -m benchmarks run moe_experts --machine M --case "mixtral-8x22b tokens=64 uniform" --set trace=FOLDER
    python -m benchmarks draw FOLDER/A.trace.json.gz FOLDER/B.trace.json.gz --output experts.png
    python -m benchmarks hidden TRACE.json.gz --least 0.85     how much of the exchanges runs under computation

A picture of layers shows the second last layer of each trace, from the first to the last of its kernels; one of experts
the last of several calls. Kernels that are launched while the one ahead still runs wait for it: their bars overlap.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite import UsageError


@dataclass(frozen=True)
class Kinds:
    """Kinds of kernels by words in their names; the first that fits, in this order."""

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
    stream: int = 0

    @property
    def end(self) -> float:
        return self.begin + self.us


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


CONCURRENT = Kinds(
    {
        "both": ("push_tiles", "multiply_gathered"),
        "exchange": (
            "nccl", "memcpy ptop", "memcpy p2p", "sum_parts", "::ll_packet<", "::posted<", "::bulk<", "::direct<",
            "::host_doubling<",
        ),
        "copy": ("memcpy", "memset"),
        "computation": ("",),
    },
    {},
)  # fmt: skip
"""Kernels that compute and exchange at once hide what this cannot see: they count as neither."""


def write(step: Callable[[], object], restore: Callable[[], object], path: Path, runs: int = 2) -> None:
    """A trace of `step`, run `runs` times, on every rank; rank 0's is kept, as `path` with `.json.gz`."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.ranks import barrier

    restore()
    step()
    barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(runs):
            restore()
            step()
        torch.cuda.synchronize()
    barrier()
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(path.with_name(f"{path.name}.json.gz")))


def read(path: Path) -> list[Kernel]:
    """Kernels and copies in the order in which they begin."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [
        Kernel(str(event["name"]), float(event["ts"]), float(event["dur"]), int(event.get("args", {}).get("stream", 0)))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy")
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


@dataclass(frozen=True)
class Hidden:
    """Time of all exchanges of a trace, and how much of it has computation on another stream at the same time."""

    exchange_us: float
    hidden_us: float

    @property
    def share(self) -> float:
        return self.hidden_us / self.exchange_us


def hidden(kernels: Sequence[Kernel]) -> Hidden:
    """The exchanges that computation hides. On one stream kernels follow one another, whatever their bars say: one that
    is launched early waits for the one ahead. Raises `UsageError` where nothing is exchanged."""
    exchanges = [kernel for kernel in kernels if CONCURRENT.of(kernel) == "exchange"]
    if not exchanges:
        raise UsageError("found no exchange in the trace, expected NCCL's kernels or weaveopt's")
    computing = sorted(
        (each for each in kernels if CONCURRENT.of(each) == "computation"), key=lambda each: each.begin
    )  # fmt: skip
    under_us = 0.0
    for exchange in exchanges:
        reached = exchange.begin
        for each in computing:
            if each.stream == exchange.stream:
                continue
            end = min(each.end, exchange.end)
            under_us += max(0.0, end - max(each.begin, reached))
            reached = max(reached, end)
    return Hidden(sum(exchange.us for exchange in exchanges), under_us)


def print_hidden(paths: Sequence[Path], least: float) -> int:
    """A line for each trace; returns 1 where a share is below `least`. Raises `UsageError`."""
    worst = 1.0
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
        found = hidden(read(path))
        worst = min(worst, found.share)
        print(
            f"{path.name}: {found.exchange_us / 1e3:,.2f} ms of exchanges, {found.hidden_us / 1e3:,.2f} ms "
            f"({found.share:.0%}) under computation"
        )
    return int(worst < least)


def layer(kernels: Sequence[Kernel], layers: int) -> list[Kernel]:
    """Second last layer of the second of two runs: its attention and what follows until the next one's."""
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


def last_call(kernels: list[Kernel]) -> list[Kernel]:
    """Last of several calls: what begins after the last but one sum, up to the last."""
    sums = [index for index, kernel in enumerate(kernels) if EXPERTS.of(kernel) == "sum"]
    if len(sums) < 2:
        raise UsageError(f"found {len(sums)} sums of experts in the trace, expected one of each of several calls")
    return kernels[sums[-2] + 1 : sums[-1] + 1]


def draw_files(paths: Sequence[Path], output: Path, layers: int) -> int:
    """Draws traces of layers, or with `layers` 0 of experts. Raises `UsageError`."""
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
    names = [path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".trace") for path in paths]
    kernels = [layer(read(path), layers) if layers else last_call(read(path)) for path in paths]
    draw(list(zip(names, kernels, strict=True)), output, LAYER if layers else EXPERTS)
    return 0
