"""Layers of models with and without the rewrite of their attention, or of their mixtures, on the GPUs of one host.

    python -m benchmarks.attention_layers_gpu --machine h200x4 [--ranks 2] [--models llama-70b qwen3-30b-a3b]
        [--cases prefill:4096 decode:8] [--layers N] [--variants ...] [--beside]
    python -m benchmarks.attention_layers_gpu --suite moe_layers --machine h200x4 --ranks 1

Random weights, bf16, tensor parallel over all ranks by the model's own plan. Prefill is one sequence without a cache;
decode is one token a sequence over a static cache of 2048 positions of which 1000 are filled. Variants are captured in
CUDA graphs and take turns (benchmarks/llama_layers_gpu.py); then each runs back to back for a second, at whatever clock
the power limit leaves.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

import weaveopt
from benchmarks import gpu_clocks, gpu_ranks, layer_trace, record
from benchmarks.gpu_ranks import Place
from benchmarks.llama_layers import Case, largest_error, without_all_reduce
from benchmarks.llama_layers_gpu import INDUCTOR, WEAVE, Compile, Variants, Workload, parse
from weaveopt.records.report import GraphReport
from weaveopt.reporting.timeline import total

SUITES = ("attention_layers", "moe_layers")
WITHOUT = "weave_without_attention"
WITHOUT_SHARDS = "weave_without_attention_shards"
"""Nor `shard_norm`: all rows are handed out at every site."""
ALONE = "attention_alone"
WITHOUT_EXPERTS = "weave_without_experts"
REMOVED = "without_collectives"
"""Inductor on the graph without its all-reduces: what all of them cost together."""
VARIANTS = (INDUCTOR, WEAVE, WITHOUT, WITHOUT_SHARDS, ALONE, WITHOUT_EXPERTS, REMOVED)
OF_SUITE = {"attention_layers": (WITHOUT, ALONE), "moe_layers": (WITHOUT_EXPERTS,)}
CACHE_POSITIONS, FILLED_POSITIONS = 2048, 1000
STEADY_US = 1.0e6


@dataclass(frozen=True)
class Shape:
    """A model's layers by their config, and what is measured of them."""

    config: str
    layers: int
    settings: dict[str, int | float | bool]
    cases: tuple[str, ...]
    suites: tuple[str, ...] = SUITES
    """That measure it unless models are named."""
    tensor_parallel: bool = True
    """Else transformers has a plan for its experts alone."""


SHAPES = {
    "llama-70b": Shape(
        "llama", 4,
        {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
        (*(f"prefill:{n}" for n in (512, 1024, 2048, 4096, 8192, 16384)), "decode:1", "decode:8", "decode:64"),
        suites=("attention_layers",),
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe", 6,
        {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "norm_topk_prob": True,
        },
        ("prefill:8192", "decode:8", "decode:64"),
    ),
    "mixtral-8x22b": Shape(
        "mixtral", 3,
        {
            "hidden_size": 6144, "intermediate_size": 16384, "num_local_experts": 8, "num_experts_per_tok": 2,
            "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        },
        ("prefill:8192", "decode:8"),
    ),
    "gpt-oss-120b": Shape(
        "gpt_oss", 4,
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        },
        ("prefill:512", "prefill:2048"),
        suites=("moe_layers",), tensor_parallel=False,
    ),
}  # fmt: skip


def make(place: Place, shape: Shape, layers: int) -> PreTrainedModel:
    """The layers, made on the device and then sharded: every rank draws the same weights and keeps its part."""
    from transformers.initialization import no_init_weights

    config: PretrainedConfig = CONFIG_MAPPING[shape.config](
        **shape.settings, num_hidden_layers=layers, vocab_size=32768, max_position_embeddings=16384
    )
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    plan = None
    if place.world > 1:
        experts = {} if shape.tensor_parallel else {"ep_size": place.world}
        plan = DistributedConfig(tp_size=place.world, **experts)
    distributed, _, mesh = model_class.prepare_distribute_model(plan) if plan else (None, None, None)
    with place.device, no_init_weights():
        model = model_class._from_config(config, dtype=torch.bfloat16).eval()
    generator = torch.Generator(place.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                deviation = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, deviation, generator=generator)
            else:
                parameter.fill_(1.0)
    if plan:
        model = model_class.maybe_distribute_model(model, distributed, mesh)
    for module in model.modules():
        # transformers 5.17 hangs hooks of the backward pass on norms of queries and keys, at which graphs break.
        module._backward_hooks.clear()
        module._is_full_backward_hook = None
    gc.collect()
    decoder: PreTrainedModel = model.model
    return decoder


def run_case(
    place: Place, model: PreTrainedModel, name: str, case: Case, names: Sequence[str], asked: argparse.Namespace
) -> tuple[record.Row, str]:
    """One row, and what is wrong with it (empty: nothing)."""
    from torch._inductor.compile_fx import compile_fx

    from weaveopt.backend import weave

    torch._dynamo.reset()
    workload = Workload(model, case, place.device, CACHE_POSITIONS, FILLED_POSITIONS, asked.positions)
    given = {"machine": asked.profile} if asked.profile else {}
    disabled = {
        WEAVE: [], WITHOUT: ["causal_attention"], WITHOUT_EXPERTS: ["moe_fused"],
        WITHOUT_SHARDS: ["causal_attention", "shard_norm"],
        ALONE: ["all_reduce_rms_norm", "gemm_all_reduce", "shard_norm", "moe_fused"],
    }  # fmt: skip
    ways: dict[str, Compile] = {
        each: lambda gm, inputs, off=disabled[each]: weave(gm, inputs, options={**given, "disable": off})  # type: ignore[misc]
        for each in names
        if each in disabled
    }
    ways |= {INDUCTOR: compile_fx, REMOVED: without_all_reduce}
    ways = {each: ways[each] for each in names}
    variants = Variants(model, ways)
    eager = workload(model).float()
    outputs: dict[str, torch.Tensor] = {}
    pool = torch.cuda.graph_pool_handle()

    def captured(which: str) -> torch.cuda.CUDAGraph:
        def step() -> None:
            outputs[which] = workload(variants.running(which))

        workload.reset()
        step()  # compiles
        workload.reset()
        return gpu_ranks.capture(step, pool)

    graphs = {}
    reports = {}
    for which in names:
        graphs[which] = captured(which)
    rewritten = [each for each in names if each not in (INDUCTOR, REMOVED)]
    reports = dict(zip(rewritten, weaveopt.report().graphs[-len(rewritten) :], strict=True))
    errors = []
    for which in names[:2]:
        workload.reset()
        graphs[which].replay()
        gpu_ranks.barrier()
        errors.append(largest_error(outputs[which].float(), eager))
    inductor_error, weave_error = gpu_ranks.slowest(errors)
    del eager
    settle = torch.zeros(1, device=place.device)
    rounds, replays = 6, 4 if case.tokens > 2048 else 10
    us = gpu_ranks.median_us(
        {which: graph.replay for which, graph in graphs.items()}, workload.reset, rounds, replays, settle
    )
    gpu_ranks.barrier()
    steady = {which: steadily(graph.replay, workload.reset, us[which], place) for which, graph in graphs.items()}
    if asked.trace:
        for which, graph in graphs.items():
            layer_trace.write(graph.replay, workload.reset, asked.trace / f"{name}-{case.phase}-{case.tokens}-{which}")
    for graph in graphs.values():
        graph.reset()
    found = reports[WEAVE]

    def chosen(kind: str) -> list[str]:
        return sorted({each.chosen.variant or each.chosen.choice for each in found.decisions if each.site.kind == kind})

    def reductions(report: GraphReport) -> str:
        sites = (each for each in report.decisions if each.site.kind == "reduction")
        counts = Counter(" ".join(filter(None, (each.chosen.choice, each.chosen.variant))) for each in sites)
        return ", ".join(f"{count} {what}" for what, count in counts.most_common())

    forms = chosen("attention")
    times = ", ".join(f"{which} {time / 1e3:.3f} (steady {steady[which].ms:.3f})" for which, time in us.items())
    experts = chosen("mixture")
    place.say(f"  {name} {case.phase} {case.batch} x {case.seq}, ms: {times}; {reductions(found)}")
    row = record.row(
        case={
            "model": name, "phase": case.phase, "batch": case.batch, "seq": case.seq, "dtype": "bfloat16",
            "ranks": place.world, "layers": model.config.num_hidden_layers,
            **({"positions": "given"} if asked.positions and case.phase == "prefill" else {}),
        },
        weave_us=us[WEAVE],
        baselines={which: us[which] for which in names if which not in (WEAVE, REMOVED)},
        predicted_us=total(found, fused=True).us,
        bound_us=us.get(REMOVED),
        parameters={
            "weave_error": weave_error, "inductor_error": inductor_error, "attention": " ".join(forms),
            **({"experts": " ".join(experts)} if experts else {}),
            **{f"{which}_reductions": reductions(report) for which, report in reports.items()},
            "over_inductor": round(us[INDUCTOR] / us[WEAVE], 3),
            "steady_over_inductor": round(steady[INDUCTOR].ms / steady[WEAVE].ms, 3),
            "inductor_predicted_us": round(total(found, fused=False).us, 3),
            **{f"{which}_steady_us": round(1e3 * each.ms, 1) for which, each in steady.items()},
            **{f"{which}_watts": round(each.watts) for which, each in steady.items()},
            **{f"{which}_joules": round(each.watts * each.ms / 1e3, 3) for which, each in steady.items()},
            **{f"{which}_sm_mhz": round(each.sm_mhz) for which, each in steady.items()},
        },
    )  # fmt: skip
    good = weave_error <= 2 * inductor_error + 1e-5
    return row, "" if good else f"{case}: weave is {weave_error:.1e} from eager, Inductor {inductor_error:.1e}"


@dataclass(frozen=True)
class Steady:
    """One variant back to back, on the slowest rank; watts and clock of the rank that draws most."""

    ms: float
    watts: float
    sm_mhz: float


def steadily(step: Callable[[], object], restore: Callable[[], object], us: float, place: Place) -> Steady:
    count = max(int(STEADY_US / us), 3)

    def again() -> None:
        restore()
        step()

    gpu_ranks.barrier()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def all_of_them() -> None:
        begin.record()
        for _ in range(count):
            again()
        end.record()

    seen = gpu_clocks.observe(all_of_them, 1, place.device)
    torch.cuda.synchronize()
    ms, watts, mhz = gpu_ranks.slowest(
        [begin.elapsed_time(end) / count, seen.watts if seen else 0.0, -seen.sm_mhz if seen else 0.0]
    )
    return Steady(ms, watts, -mhz)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="gpu")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=None, help="default: those of the suite")
    parser.add_argument("--cases", nargs="+", default=None, help="prefill:TOKENS, decode:BATCH")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--suite", choices=SUITES, default=SUITES[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=None, help="default: those of the suite")
    parser.add_argument("--profile", default=None)
    parser.add_argument("--positions", action="store_true", help="the caller gives positions, which may be packed")
    parser.add_argument("--trace", type=Path, default=None, help="folder for a Chrome trace of each variant, rank 0's")
    parser.add_argument("--beside", action="store_true", help="keep the other rows of the result file")
    asked = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(gpu_ranks.start(__spec__.name, asked.ranks or torch.cuda.device_count(), sys.argv[1:]))
    others = OF_SUITE[asked.suite] if asked.variants is None else asked.variants
    names = [INDUCTOR, WEAVE, *(each for each in others if each not in (INDUCTOR, WEAVE))]

    def program(place: Place) -> None:
        dist.all_reduce(torch.zeros(1, device=place.device))  # NCCL connects now, not in a first measurement
        rows: list[record.Row] = []
        wrong = []
        with torch.no_grad():
            for name in asked.models or [name for name, each in SHAPES.items() if asked.suite in each.suites]:
                shape = SHAPES[name]
                model = make(place, shape, asked.layers or shape.layers)
                for case in map(parse, asked.cases or shape.cases):
                    row, complaint = run_case(place, model, name, case, names, asked)
                    rows.append(row)
                    wrong += [complaint] if complaint else []
                    if place.rank == 0:
                        record.write(asked.suite, asked.machine, rows, beside=asked.beside)
                    gc.collect()
                    torch.cuda.empty_cache()
                del model
                gc.collect()
                torch.cuda.empty_cache()
        place.say(summary(rows))
        for complaint in wrong:
            place.say(f"WRONG: {complaint}")

    gpu_ranks.run_and_exit(program)


def summary(rows: Sequence[record.Row]) -> str:
    lines = [
        [
            *(str(row.case[each]) for each in ("model", "phase", "batch", "seq")),
            f"{row.baselines[INDUCTOR] / 1e3:.3f}", f"{row.weave_us / 1e3:.3f}",
            *(f"{row.parameters[each]}" for each in ("over_inductor", "steady_over_inductor", "attention")),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["model", "phase", "batch", "seq", "inductor", "weave", "ratio", "steady", "attention"]
    return gpu_ranks.table(f"layers on {rows[0].case['ranks']} GPUs, ms", columns, lines)


if __name__ == "__main__":
    main()
