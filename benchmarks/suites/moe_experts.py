"""`weave::moe_experts` on one GPU, against `torch._grouped_mm` and `torch.bmm` as compiled models call them.

A case is one rank's share of a layer's experts, on the tokens of all ranks; bf16. `grouped_mm` and `batched_mm` are the
sequences that transformers runs, compiled; `grouped_mm_alone` its two GEMMs and the activation, of rows that were
sorted beforehand. Each variant's calls run in one CUDA graph over several routings in turn. The bound is the larger of
active weights and FLOPs, at the rates of `gpu_limits`. A row is of one implementation of ours, `kernels` of its case:
`triton`, and where they run `hopper`, `one_kernel` and, from some hundred rows an expert on, `wide`; all with the same
baselines. Up to 512 tokens the active weights are to be read at 85 % of the bound or more.

`experts_launches` times every launch that `candidates` of the plan lists: what the plan is fitted from. `experts_lags`
times `hopper` and `one_kernel`, the latter with each lag: what `hopper.LAG` is chosen by.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks import record, traces
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite
from benchmarks.timing import capture, nothing
from benchmarks.workloads.experts import (
    BASELINES,
    MODELS,
    Call,
    Case,
    Data,
    expected,
    make_weights,
    over_all,
    times_us,
)
from weaveopt.ops.experts import gpu, hopper
from weaveopt.ops.experts.call import ExpertsKernel
from weaveopt.ops.experts.plan import ExpertsLaunch, candidates, plan

HOW_ROUTED = ("uniform", "skewed")
MODEL = Setting("models", tuple(MODELS), quick=("qwen3-30b-a3b",), among=tuple(MODELS))
TOKENS = Setting("tokens", (1, 8, 64, 512, 2048, 8192), "of each rank", quick=(8,))
ROUTINGS = Setting("routings", HOW_ROUTED, quick=HOW_ROUTED[:1], among=HOW_ROUTED)
RANKS = Setting("ranks", 2, "ranks that share the experts")
WITHOUT = Setting[tuple[str, ...]]("without", (), "variants not to run")
SECONDS = Setting("seconds", 300.0, "no case begins after that")
TRACE = Setting("trace", "", "folder for a Chrome trace of each implementation")
LAGS = Setting("lags", (1, 2, 3))
LARGEST_ERROR = 3e-2
SWEEP_AT_A_TIME = 12
"""Graphs that take turns: each holds its results' memory."""


def cases(asked: Asked) -> list[Case]:
    return [
        Case(model, tokens, routing, asked.of(RANKS))
        for model in asked.of(MODEL)
        for tokens in asked.of(TOKENS)
        for routing in asked.of(ROUTINGS)
    ]


def each_data(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[tuple[Case, Data]]:
    """Cases with their tensors, as long as `seconds` allow; those left out are said."""
    end, left_out = time.monotonic() + asked.of(SECONDS), []
    for model in dict.fromkeys(case.model for case in cases):
        weights = make_weights(MODELS[model], asked.of(RANKS))
        for case in (case for case in cases if case.model == model):
            if time.monotonic() > end:
                left_out.append(str(case))
                continue
            yield case, Data(case, weights)
            torch.cuda.empty_cache()
        del weights
    if left_out:
        place.say(f"left out for want of time: {'; '.join(left_out)}")


def is_right(call: Call, want: torch.Tensor, what: str) -> bool:
    error = (call(0).float() - want).abs().max().item()
    if not error < LARGEST_ERROR:
        print(f"  {what}: off by {error}, left out", flush=True)
    return error < LARGEST_ERROR


def implementations(data: Data) -> dict[str, Callable[[Data], Call]]:
    """Ours that run the case."""
    ours: dict[str, Callable[[Data], Call]] = {
        str(kernels): partial(Data.planned, kernels=kernels) for kernels in ExpertsKernel
    }
    if not data.runs_hopper():
        return {ExpertsKernel.TRITON: ours[ExpertsKernel.TRITON]}
    if not data.runs_wide():
        del ours[ExpertsKernel.WIDE]
    return ours


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for case, data in each_data(place, cases, asked):
        want, ours = expected(data.operands(0), data.model.call), implementations(data)
        calls: dict[str, Call] = {}
        for name, make in {**ours, **BASELINES}.items():
            if name in asked.of(WITHOUT) or not data.fits(name):
                continue
            try:
                call = make(data)
                # Alone, rows stay in the order of experts: there is nothing to compare.
                if name == "grouped_mm_alone" or is_right(call, want, name):
                    calls[name] = call
            except RuntimeError as refused:
                print(f"  {name}: {str(refused).splitlines()[0][:140]}", flush=True)
        for name in ours.keys() & calls.keys() if asked.of(TRACE) else ():
            path = Path(asked.of(TRACE)) / f"experts_{case.model}_{case.tokens}_{name}.trace"
            graph = capture(over_all(calls[name]), torch.cuda.graph_pool_handle())
            traces.write(graph.replay, nothing, path, runs=1)
            graph.reset()
        times = times_us(place, calls)
        baselines = {name: us for name, us in times.items() if name in BASELINES}
        yield from (row_of(name, times[name], case, data, baselines) for name in ours if name in times and baselines)


def row_of(kernels: str, us: float, case: Case, data: Data, baselines: dict[str, float]) -> record.Row:
    if kernels == ExpertsKernel.TRITON:
        tile = brief(plan(data.shape, gpu.num_sms(data.x.device)))
    else:
        tile = hopper_tile(hopper.plan_of(kernels, data.operands(0), data.shape))
    gb, tflops = data.weight_bytes / us / 1e3, data.flops / us / 1e6
    return record.row(
        case={**asdict(case), "experts": data.num_experts, "kernels": kernels}, weave_us=us, baselines=baselines,
        bound_us=data.bound_us,
        parameters={
            "gb_per_s": round(gb), "tflops": round(tflops), "rows": round(data.own_rows),
            "active_experts": round(data.active, 1), "tile": tile,
        },
    )  # fmt: skip


def hopper_tile(how: hopper.HopperPlan) -> str:
    lag = f", lag {how.lag}" if how.one_kernel else ""
    return f"rows {how.rows}, group {how.group}{lag}, combine {how.combine_columns}"


def brief(how: ExpertsLaunch) -> str:
    def tile(of: object) -> str:
        found = asdict(of)  # type: ignore[call-overload]
        return f"{found['columns']}/{found['depth']}/{found['num_warps']}/{found['num_stages']}" + "s" * found["swap"]

    words = [f"rows {how.rows}", f"gate_up {tile(how.gate_up)}", f"down {tile(how.down)}", f"splits {how.splits}"]
    words += [f"group {how.group}", f"combine {how.combine_columns}"]
    words += ["late"] * (not how.early)
    return ", ".join(words)


def compile_all(data: Data, launches: tuple[ExpertsLaunch, ...]) -> None:
    """Compiles the kernels of all launches at a time; an error is raised again where the launch is timed."""
    from triton import AsyncCompileMode

    from weaveopt.ops.experts import kernels, routing_kernels

    began, threads = time.monotonic(), os.cpu_count() or 1
    known = [routing_kernels.route, kernels.gate_up, kernels.down, kernels.combine]
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True), ExitStack() as patches:
        for kernel in known:
            patches.enter_context(mock.patch.object(kernel, "run", partial(_warm_up, kernel.run)))
        for how in launches:
            data.weave(how)(0)
    print(f"{len(launches)} launches compiled by {threads} threads in {time.monotonic() - began:.1f} s", flush=True)


def _warm_up(run: Callable[..., object], *arguments: object, warmup: bool, **options: object) -> object:
    return run(*arguments, warmup=True, **options)


def launches(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    """All launches of each case, the fastest first, against the planned one."""
    for case, data in each_data(place, cases, asked):
        want = expected(data.operands(0), data.model.call)
        every = candidates(data.shape, gpu.num_sms(data.x.device))
        every = every[:SWEEP_AT_A_TIME] if place.quick else every
        try:
            compile_all(data, every)
        except Exception as refused:  # they are compiled one by one then, where they are timed
            print(f"not compiled beforehand: {refused!r}", flush=True)
        found: dict[ExpertsLaunch, float] = {}
        for first in range(0, len(every), SWEEP_AT_A_TIME):
            calls = {}
            for at, how in enumerate(every[first : first + SWEEP_AT_A_TIME], start=first):
                try:
                    if is_right(data.weave(how), want, brief(how)):
                        calls[str(at)] = data.weave(how)
                except Exception as refused:  # Triton has no common base: out of shared memory, of registers
                    print(f"  {str(refused).splitlines()[0][:100]}: {brief(how)}", flush=True)
            found |= {every[int(at)]: us for at, us in times_us(place, calls, rounds=5).items()}
        planned = found.get(every[0], max(found.values(), default=0.0))
        for how, us in sorted(found.items(), key=lambda pair: pair[1]):
            yield record.row(
                case={**asdict(case), "launch": brief(how)}, weave_us=us, baselines={"planned": planned},
                bound_us=data.bound_us,
            )  # fmt: skip


def lags(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    """`one_kernel` with each lag, against `hopper`."""
    for case, data in each_data(place, cases, asked):
        if not data.runs_hopper():
            place.say(f"{case}: the native kernels do not run it")
            continue
        one = hopper.plan_of(ExpertsKernel.ONE, data.operands(0), data.shape)
        plans = {"hopper": hopper.plan(data.shape), **{str(lag): replace(one, lag=lag) for lag in asked.of(LAGS)}}
        want = expected(data.operands(0), data.model.call)
        calls = {name: data.native(how) for name, how in plans.items()}
        us = times_us(place, {name: call for name, call in calls.items() if is_right(call, want, name)})
        two = us.pop("hopper")
        for lag, each in us.items():
            yield record.row(
                case={**asdict(case), "lag": int(lag)}, weave_us=each, baselines={"hopper": two}, bound_us=data.bound_us
            )


BOUND = "the larger of active weights and FLOPs"
COMMON = (MODEL, TOKENS, ROUTINGS, RANKS, SECONDS)
SUITES = (
    Suite(
        "moe_experts", "a rank's experts of a layer, by every implementation", Needs(GPU, worlds=(1,)), cases, rows,
        ours=tuple(map(str, ExpertsKernel)), baselines=tuple(BASELINES), bound=BOUND,
        settings=(*COMMON, WITHOUT, TRACE),
    ),
    Suite(
        "experts_launches", "every launch that the experts' plan may choose", Needs(GPU, worlds=(1,)), cases, launches,
        ours=("every launch",), baselines=("planned",), bound=BOUND, settings=COMMON, by_name_only=True,
    ),
    Suite(
        "experts_lags", "the experts' one kernel with each lag", Needs(GPU, worlds=(1,)), cases, lags,
        ours=("one_kernel",), baselines=("hopper",), bound=BOUND, settings=(*COMMON, LAGS), by_name_only=True,
    ),
)  # fmt: skip
