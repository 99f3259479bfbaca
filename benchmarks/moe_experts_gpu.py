"""`weave::moe_experts` on one GPU, beside `torch._grouped_mm` and `torch.bmm` as compiled models call them.

    python -m benchmarks.moe_experts_gpu --machine h200x4 [--models qwen3-30b-a3b] [--tokens 8 512] [--ranks 2]
        [--routings uniform skewed] [--without batched_mm] [--seconds 300] [--no-write] [--sweep [--output FILE]]
        [--lags 1 2 3]

A case is one rank's share of a layer's experts, on the tokens of all ranks; bf16. `grouped_mm` and `batched_mm` are the
sequences that transformers runs, compiled; `grouped_mm_alone` its two GEMMs and the activation, of rows that were
sorted beforehand. Each variant's calls run in one CUDA graph over several routings in turn; graphs are replayed in
turns, and a time is the median. The bound is the larger of active weights and FLOPs, at the rates of `gpu_limits`.
A row is of one implementation of ours, `kernels` of its case: `triton`, and where they run `hopper`, `one_kernel` and,
from some hundred rows an expert on, `wide`; all beside the same baselines.
Up to 512 tokens the active weights are to be read at 85 % of the bound or more: each row prints what it
reaches.

`--sweep` times every launch that `candidates` of the plan lists instead: what the plan is fitted from. `--lags` times
`hopper` and `one_kernel` alone, the latter with each lag, and writes nothing: what `hopper.LAG` is chosen by.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks import record
from benchmarks.moe_experts_cases import (
    BASELINES,
    MODELS,
    Call,
    Case,
    Data,
    capture,
    expected,
    make_weights,
    time_in_turns,
)
from weaveopt.expert_kernels import gpu, hopper
from weaveopt.expert_kernels.call import Kernels
from weaveopt.expert_kernels.plan import Plan, candidates, plan

TOKENS = (1, 8, 64, 512, 2048, 8192)
ROUTINGS = ("uniform", "skewed")
LARGEST_ERROR = 3e-2
SWEEP_AT_A_TIME = 12
"""Graphs that take turns: each holds its results' memory."""


def is_right(call: Call, want: torch.Tensor, what: str) -> bool:
    error = (call(0).float() - want).abs().max().item()
    if not error < LARGEST_ERROR:
        print(f"  {what}: off by {error}, left out", flush=True)
    return error < LARGEST_ERROR


def rows_of(case: Case, data: Data, without: list[str]) -> list[record.Row]:
    want = expected(data.operands(0), data.model.call)
    graphs, kept = {}, []
    ours: dict[str, Callable[[Data], Call]] = {
        str(kernels): partial(Data.planned, kernels=kernels) for kernels in Kernels
    }
    if not data.runs_hopper():
        ours = {Kernels.TRITON: ours[Kernels.TRITON]}
    elif not data.runs_wide():
        del ours[Kernels.WIDE]
    for name, make in {**ours, **BASELINES}.items():
        if name in without or not data.fits(name):
            continue
        try:
            call = make(data)
            kept.append(call)  # with what its graph reads
            # Alone, rows stay in the order of experts: there is nothing to compare.
            if name == "grouped_mm_alone" or is_right(call, want, name):
                graphs[name] = capture(call)
        except RuntimeError as refused:
            print(f"  {name}: {str(refused).splitlines()[0][:140]}", flush=True)
    times = time_in_turns(graphs)
    baselines = {name: us for name, us in times.items() if name in BASELINES}
    return [row_of(name, times[name], case, data, baselines) for name in ours if name in times and baselines]


def row_of(kernels: str, us: float, case: Case, data: Data, baselines: dict[str, float]) -> record.Row:
    if kernels == Kernels.TRITON:
        tile = brief(plan(data.shape, gpu.num_sms(data.x.device)))
    else:
        tile = hopper_tile(hopper.plan_of(kernels, data.operands(0), data.shape))
    gb, tflops = data.weight_bytes / us / 1e3, data.flops / us / 1e6
    others = " ".join(f"{name} {us:.1f}" for name, us in baselines.items())
    print(
        f"{case.model} {case.tokens} x {case.ranks} {case.routing}: {kernels} {us:8.1f} us {gb:5.0f} GB/s "
        f"{tflops:4.0f} TFLOP/s {data.bound_us / us:4.0%} | {others} | {min(baselines.values()) / us:.2f}x | {tile}",
        flush=True,
    )
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


def compare_lags(case: Case, data: Data, lags: list[int]) -> None:
    """Prints what two kernels take, and one with each lag."""
    if not data.runs_hopper():
        print(f"{case}: the native kernels do not run it")
        return
    two = hopper.plan(data.shape)
    one = hopper.plan_of(Kernels.ONE, data.operands(0), data.shape)
    plans = {"hopper": two, **{f"one_kernel, lag {lag}": replace(one, lag=lag) for lag in lags}}
    calls = {name: data.native(how) for name, how in plans.items()}
    want = expected(data.operands(0), data.model.call)
    times = time_in_turns({name: capture(call) for name, call in calls.items() if is_right(call, want, name)})
    found = " | ".join(f"{name} {us:.1f} us {times['hopper'] / us:.3f}x" for name, us in times.items())
    print(f"{case.model} {case.tokens} x {case.ranks} {case.routing}: {found} | bound {data.bound_us:.1f}", flush=True)


def brief(how: Plan) -> str:
    def tile(of: object) -> str:
        found = asdict(of)  # type: ignore[call-overload]
        return f"{found['columns']}/{found['depth']}/{found['num_warps']}/{found['num_stages']}" + "s" * found["swap"]

    words = [f"rows {how.rows}", f"gate_up {tile(how.gate_up)}", f"down {tile(how.down)}", f"splits {how.splits}"]
    words += [f"group {how.group}", f"combine {how.combine_columns}"]
    words += ["late"] * (not how.early)
    return ", ".join(words)


def compile_all(data: Data, launches: tuple[Plan, ...]) -> None:
    """What they launch, all at a time; an error comes again where the launch is timed."""
    from triton import AsyncCompileMode

    from weaveopt.expert_kernels import kernels, routing_kernels

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


def sweep(case: Case, data: Data) -> list[dict[str, object]]:
    """All launches of one case, the planned one first; prints the best of them."""
    want = expected(data.operands(0), data.model.call)
    launches = candidates(data.shape, gpu.num_sms(data.x.device))
    try:
        compile_all(data, launches)
    except Exception as refused:  # they are compiled one by one then, where they are timed
        print(f"not compiled beforehand: {refused!r}", flush=True)
    found: list[tuple[float, Plan]] = []
    for first in range(0, len(launches), SWEEP_AT_A_TIME):
        graphs = {}
        for at, how in enumerate(launches[first : first + SWEEP_AT_A_TIME], start=first):
            try:
                if is_right(data.weave(how), want, brief(how)):
                    graphs[str(at)] = capture(data.weave(how))
            except Exception as refused:  # Triton has no common base: out of shared memory, of registers
                print(f"  {str(refused).splitlines()[0][:100]}: {brief(how)}", flush=True)
        found += [(us, launches[int(at)]) for at, us in time_in_turns(graphs, rounds=5).items()]
        del graphs
    print(f"{case.model} {case.tokens} x {case.ranks} {case.routing}: bound {data.bound_us:.1f} us", flush=True)
    ordered = sorted(found, key=lambda pair: pair[0])
    for us, how in (*[pair for pair in found if pair[1] == launches[0]], *ordered[:5]):
        mark = "planned " if how == launches[0] else ""
        print(f"   {us:9.2f} us {data.bound_us / us:4.0%} {mark}[{brief(how)}]", flush=True)
    return [{**asdict(case), "us": round(us, 3), **asdict(how)} for us, how in ordered]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu")
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS, help="of each rank")
    parser.add_argument("--routings", nargs="*", choices=ROUTINGS, default=ROUTINGS)
    parser.add_argument("--ranks", type=int, default=2, help="that share the experts")
    parser.add_argument("--without", nargs="*", default=[], help="baselines not to run")
    parser.add_argument("--seconds", type=float, default=300.0, help="no case begins after that")
    parser.add_argument("--sweep", action="store_true", help="try launches instead")
    parser.add_argument("--lags", nargs="*", type=int, help="time the native kernels with these instead")
    parser.add_argument("--output", type=Path, help="of the sweep: all launches and their times")
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    end, rows, swept, left_out = time.monotonic() + asked.seconds, [], [], []
    for model in asked.models:
        weights = make_weights(MODELS[model], asked.ranks)
        for case in (Case(model, tokens, how, asked.ranks) for tokens in asked.tokens for how in asked.routings):
            if time.monotonic() > end:
                left_out.append(str(case))
                continue
            data = Data(case, weights)
            if asked.lags is not None:
                compare_lags(case, data, asked.lags)
            elif asked.sweep:
                swept += sweep(case, data)
                if asked.output is not None:
                    asked.output.write_text(json.dumps(swept, separators=(",", ":")) + "\n")
            else:
                rows += rows_of(case, data, asked.without)
            del data
            torch.cuda.empty_cache()
        del weights
    if left_out:
        print(f"left out for want of time: {'; '.join(left_out)}")
    if rows and not asked.no_write:
        print(record.write("moe_experts", asked.machine, rows, beside=True))


if __name__ == "__main__":
    main()
