"""Layers of shapes that no profile and no other benchmark has, drawn at random: how good is what weaveopt chooses?

One capture of a model, compiled with all rules, with each rule that was chosen switched off, with profiles alone (no
kernel timed), and by Inductor. All take turns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

import torch
import torch.fx as fx
from transformers import PreTrainedModel

import weaveopt
from benchmarks.ranks import Place, slowest
from benchmarks.steady import Steady, steadily
from benchmarks.timing import Effort, Step, capture, enqueued_us, host_us, nothing
from benchmarks.workloads import decoder
from benchmarks.workloads.decoder import INDUCTOR, WEAVE, Compile, Forward, Shape, Variants, Workload
from weaveopt.autotune.asked_kernels import AskedKernel
from weaveopt.autotune.kernel_calls import CPU_COLD_BYTES, GPU_COLD_BYTES, Operands, launch_of
from weaveopt.autotune.kernel_timing import TuningCpuClock, TuningGpuClock, gemm_between
from weaveopt.cost_model.timed import KernelShape
from weaveopt.measure.clock import Clock
from weaveopt.records.report import GraphReport, KernelReport
from weaveopt.reporting.timeline import total

BY_PROFILE = "weave_by_profile"
"""With no kernel timed."""
HEAD = 128
MOST_GEMMS = 4


@dataclass(frozen=True)
class Span:
    """Range that layers are drawn from."""

    hiddens: range
    ratios: tuple[float, float]
    """Intermediate size over hidden size."""
    most_tokens: int
    head_dim: int


GPU_SPAN = Span(range(1024, 12288 + 1, 128), (2.0, 6.0), 16000, 128)
CPU_SPAN = Span(range(256, 1024 + 1, 128), (2.0, 4.0), 512, 64)


@dataclass(frozen=True)
class DrawnShape:
    """Layers of one random shape, and a prefill of so many tokens."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    tokens: int


def draw(span: Span, count: int, seed: int, world: int = 2) -> list[DrawnShape]:
    """`count` shapes, the same in every run with the seed; token counts evenly in the logarithm, odd ones too."""
    numbers, found = Random(seed), []
    for _ in range(count):
        hidden = numbers.choice(span.hiddens)
        intermediate = round(hidden * numbers.uniform(*span.ratios) / 128) * 128
        # transformers refuses a hidden size that the heads do not divide, though their own size is given.
        most = hidden // span.head_dim
        heads = max(each for each in range(world, most + 1, world) if hidden % each == 0)
        shares = [each for each in (1, 2, 4, 8) if heads % each == 0 and heads // each % world == 0]
        tokens = int((span.most_tokens + 1) ** numbers.random())
        found.append(DrawnShape(hidden, intermediate, heads, heads // numbers.choice(shares), tokens))
    return found


def made(place: Place, shape: DrawnShape, layers: int, head_dim: int) -> PreTrainedModel:
    settings: dict[str, int | float | bool] = {
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": head_dim,
    }  # fmt: skip
    return decoder.make(place, Shape("llama", layers, settings, ()), layers)


@dataclass
class Compiles:
    """Compiles one captured graph in several ways, weave ones one after the other, and keeps their reports."""

    folder: str
    budget_s: float
    reports: dict[str, GraphReport] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def weave(self, name: str, disable: Sequence[str] = (), budget_s: float | None = None) -> Compile:
        from weaveopt.backend import weave

        budget_s = self.budget_s if budget_s is None else budget_s
        options = {"disable": list(disable), "tune_budget_s": budget_s, "tune_cache": self.folder}

        def compile_graph(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Forward:
            began = time.perf_counter()
            compiled = weave(gm, inputs, options=options)  # type: ignore[arg-type]
            self.seconds[name] = time.perf_counter() - began
            self.reports[name] = weaveopt.report().graphs[-1]
            return compiled

        return compile_graph


@dataclass(frozen=True)
class UnseenResult:
    """Times in microseconds by way, and what the reports say of them."""

    us: Mapping[str, float]
    reports: Mapping[str, GraphReport]
    seconds: Mapping[str, float]
    gemm_errors: tuple[float, ...]
    """|timed when compiled / timed again - 1| of the longest GEMMs."""
    steady: Mapping[str, Steady]
    """Back to back, by way; empty on CPU ranks."""

    def predicted_us(self, name: str) -> float:
        return total(self.reports[name], fused=True).us

    def predicted_steady_us(self, name: str) -> float | None:
        report = self.reports[name]
        return next((each.steady_us for each in report.variants if each.name == report.variant), None)

    @property
    def of_fastest(self) -> float:
        """Speed of the chosen form over that of the fastest of weaveopt's own."""
        return of_fastest(self.us)

    @property
    def steady_us(self) -> dict[str, float]:
        return {name: each.us for name, each in self.steady.items()}

    @property
    def gemm_error(self) -> float:
        return fmean(self.gemm_errors) if self.gemm_errors else 0.0


def of_fastest(us: Mapping[str, float]) -> float:
    return min(us for name, us in us.items() if name != INDUCTOR) / us[WEAVE]


def measure(place: Place, model: PreTrainedModel, shape: DrawnShape, folder: str, budget_s: float) -> UnseenResult:
    """Compile and time all ways. The first compile times kernels; that with the same rules again times nothing."""
    from torch._inductor.compile_fx import compile_fx

    workload = Workload(model, decoder.Case("prefill", 1, shape.tokens), place.device)
    compiles = Compiles(folder, budget_s)
    torch._dynamo.reset()
    # Which rules there are to switch off is known once the first way is compiled.
    ways: dict[str, Compile] = {WEAVE: compiles.weave(WEAVE), "again": compiles.weave("again")}
    workload(Variants(model, ways).running(WEAVE))
    chosen = sorted({each.chosen.choice for each in compiles.reports[WEAVE].decisions if each.rewritten})
    torch._dynamo.reset()
    every: dict[str, Compile] = {INDUCTOR: compile_fx, WEAVE: compiles.weave("warm")}
    every[BY_PROFILE] = compiles.weave(BY_PROFILE, budget_s=0.0)
    every |= {f"without_{rule}": compiles.weave(f"without_{rule}", [rule]) for rule in chosen}
    variants = Variants(model, every)
    steps: dict[str, Step] = {}
    for name in every:
        forward = variants.running(name)
        steps[name] = lambda forward=forward: workload(forward)  # type: ignore[misc]
        steps[name]()
    if place.device.type == "cpu":  # as a CUDA graph has none of Dynamo's guards
        steps = {name: variants.graph_of(name) for name in every}
    us, steady = _times(place, steps)
    return UnseenResult(us, compiles.reports, compiles.seconds, _gemm_errors(place, compiles.reports[WEAVE]), steady)


def _times(place: Place, steps: Mapping[str, Step]) -> tuple[dict[str, float], dict[str, Steady]]:
    if place.device.type == "cpu":
        # Ranks leave a barrier at different times, which would count; exchanges keep them together.
        return host_us(place, steps, Effort(6, 20), warm=10), {}
    pool = torch.cuda.graph_pool_handle()
    graphs = {name: capture(step, pool) for name, step in steps.items()}
    us = enqueued_us(place, {name: graph.replay for name, graph in graphs.items()}, Effort(8, 6))
    steady = {}
    if not place.quick:
        steady = {name: steadily(graph.replay, nothing, us[name], place) for name, graph in graphs.items()}
    for graph in graphs.values():
        graph.reset()
    return us, steady


def _gemm_errors(place: Place, report: GraphReport) -> tuple[float, ...]:
    gemms = [kernel for kernel in report.kernels if kernel.kernel.startswith("gemm ")][:MOST_GEMMS]
    is_cpu = place.device.type == "cpu"
    operands = Operands(place.device, CPU_COLD_BYTES if is_cpu else GPU_COLD_BYTES)
    as_asked = [AskedKernel(shape_of(kernel), kernel.us, is_captured=True) for kernel in gemms]
    clock: Clock = TuningCpuClock(other=gemm_between(as_asked, operands)) if is_cpu else TuningGpuClock()
    found = []
    for kernel in gemms:
        launch = launch_of(shape_of(kernel), operands)
        assert launch is not None, f"{kernel} was timed"
        [us] = slowest([clock.among_others(launch, kernel.us).us])
        found.append(abs(kernel.us / us - 1.0))
    return tuple(found)


def shape_of(kernel: KernelReport) -> KernelShape:
    """The GEMM that a report names."""
    name, dtype, sizes, *layout = kernel.kernel.split()
    size, *rest = map(int, sizes.split("x"))
    return KernelShape(name, dtype, size, tuple(rest), " ".join(layout))
