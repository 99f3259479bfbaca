"""Layers of models on the GPUs of one host: weave, parts of it switched off, Inductor, and none of the collectives.

Random weights, bf16, tensor parallel over all ranks by the model's own plan. Prefill is one sequence without a cache;
decode is one token a sequence over a static cache. Dynamo captures a case once; each variant compiles that graph, and
one call of it is captured in a CUDA graph. The graphs take turns; then each runs back to back for a second, at whatever
clock the power limit leaves.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

import weaveopt
from benchmarks import record, traces
from benchmarks.ranks import Place, barrier, slowest
from benchmarks.steady import Steady, steadily
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite
from benchmarks.timing import Effort, Step, capture, enqueued_us
from benchmarks.workloads import decoder
from benchmarks.workloads.decoder import INDUCTOR, SHAPES, WEAVE, Compile, Variants, Workload, without_all_reduce
from weaveopt.records.report import GraphReport
from weaveopt.reporting.timeline import total

WITHOUT = "weave_without_attention"
WITHOUT_SHARDS = "weave_without_attention_shards"
"""Nor `shard_norm`: every rank has all rows at every site."""
ALONE = "attention_alone"
WITHOUT_EXPERTS = "weave_without_experts"
UNSPLIT = "weave_without_token_split"
REMOVED = "without_collectives"
"""Inductor on the graph without its all-reduces: what all of them cost together."""
DISABLED: Mapping[str, tuple[str, ...]] = {
    WEAVE: (), WITHOUT: ("causal_attention",), WITHOUT_EXPERTS: ("moe_fused",),
    WITHOUT_SHARDS: ("causal_attention", "shard_norm"), UNSPLIT: ("token_split",),
    ALONE: ("all_reduce_rms_norm", "gemm_all_reduce", "shard_norm", "moe_fused"),
}  # fmt: skip
LLAMA_CASES = (*(f"prefill:{n}" for n in (512, 1024, 2048, 4096, 8192)), *(f"decode:{n}" for n in (1, 8, 32)))


@dataclass(frozen=True)
class Case(decoder.Case):
    model: str


@dataclass(frozen=True)
class Measured:
    """One case: times, errors against eager, what was decided, and the time back to back by variant."""

    us: dict[str, float]
    weave_error: float
    inductor_error: float
    reports: dict[str, GraphReport]
    steady: dict[str, Steady]

    @property
    def is_right(self) -> bool:
        """True if weave's error may be rounding, of which Inductor's is the measure."""
        return self.weave_error <= 2 * self.inductor_error + 1e-5


def measure(
    place: Place,
    model: PreTrainedModel,
    workload: Workload,
    names: Sequence[str],
    profile: str,
    trace: str,
    eager: bool,
) -> Measured:
    """Captures every variant of `names`, of which the first two are Inductor and weave, and times them in turns."""
    from torch._inductor.compile_fx import compile_fx

    from weaveopt.backend import weave

    given = {"machine": profile} if profile else {}
    ways: dict[str, Compile] = {
        each: lambda gm, inputs, off=list(off): weave(gm, inputs, options={**given, "disable": off})  # type: ignore[misc]
        for each, off in DISABLED.items()
    }
    ways |= {INDUCTOR: compile_fx, REMOVED: without_all_reduce}
    torch._dynamo.reset()
    variants = Variants(model, {each: ways[each] for each in names})
    want = workload(model).float()
    outputs: dict[str, torch.Tensor] = {}
    pool = torch.cuda.graph_pool_handle()

    def step_of(name: str) -> Step:
        def step() -> None:
            outputs[name] = workload(variants.running(name))

        return step

    runs = {name: step_of(name) for name in names}
    for step in runs.values():  # all of them before the first capture: compiled graphs move weights in their first call
        workload.reset()
        step()
    graphs = {}
    for name, step in runs.items():
        workload.reset()
        graphs[name] = capture(step, pool)
    rewritten = [each for each in names if each in DISABLED]
    reports = dict(zip(rewritten, weaveopt.report().graphs[-len(rewritten) :], strict=True))
    errors = []
    for name in names[:2]:
        workload.reset()
        graphs[name].replay()
        barrier()
        errors.append(decoder.largest_error(outputs[name].float(), want))
    inductor_error, weave_error = slowest(errors)
    del want
    steps: dict[str, Step] = {name: graph.replay for name, graph in graphs.items()}
    if eager:
        steps["eager"] = lambda: workload(model)
    us = enqueued_us(place, steps, Effort(6, 4 if workload.case.tokens > 2048 else 10), workload.reset)
    barrier()
    steady = {}
    if not place.quick:
        steady = {name: steadily(graph.replay, workload.reset, us[name], place) for name, graph in graphs.items()}
    for name, graph in graphs.items() if trace else ():
        path = Path(trace) / f"{workload.case.phase}-{workload.case.tokens}-{name}"
        traces.write(graph.replay, workload.reset, path)
    for graph in graphs.values():
        graph.reset()
    for fallback in (each for report in reports.values() for each in report.fallbacks):
        place.say(f"  weave left the graph as it is: {fallback.step}: {fallback.error}")
    return Measured(us, weave_error, inductor_error, reports, steady)


def reductions(report: GraphReport) -> str:
    sites = (each for each in report.decisions if each.site.kind == "reduction")
    counts = Counter(" ".join(filter(None, (each.chosen.choice, each.chosen.variant))) for each in sites)
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


def chosen(report: GraphReport, kind: str) -> str:
    found = {each.chosen.variant or each.chosen.choice for each in report.decisions if each.site.kind == kind}
    return " ".join(sorted(found))


def llama_row(place: Place, model: PreTrainedModel, case: Case, found: Measured) -> record.Row:
    report, us = found.reports[WEAVE], found.us
    return record.row(
        case={
            "phase": case.phase, "batch": case.batch, "seq": case.seq, "dtype": "bfloat16", "ranks": place.world,
            "layers": model.config.num_hidden_layers, "hidden": model.config.hidden_size,
        },
        weave_us=us[WEAVE],
        baselines={name: us[name] for name in (INDUCTOR, "eager") if name in us},
        predicted_us=total(report, fused=True).us,
        bound_us=us.get(REMOVED),
        parameters={
            "weave_error": found.weave_error, "inductor_error": found.inductor_error,
            "sites_rewritten": report.num_rewritten,
            "inductor_predicted_us": round(total(report, fused=False).us, 3),
            **{f"{name}_sm_mhz": round(each.sm_mhz) for name, each in found.steady.items() if each.sm_mhz},
            **{f"{name}_power_limited": round(each.limited, 3) for name, each in found.steady.items() if each.sm_mhz},
        },
    )  # fmt: skip


def variants_row(place: Place, model: PreTrainedModel, case: Case, found: Measured, given: bool) -> record.Row:
    report, us, steady = found.reports[WEAVE], found.us, found.steady
    experts = chosen(report, "mixture")
    over = {} if place.quick else {"steady_over_inductor": round(steady[INDUCTOR].us / steady[WEAVE].us, 3)}
    return record.row(
        case={
            "model": case.model, "phase": case.phase, "batch": case.batch, "seq": case.seq, "dtype": "bfloat16",
            "ranks": place.world, "layers": model.config.num_hidden_layers,
            **({"positions": "given"} if given and case.phase == "prefill" else {}),
        },
        weave_us=us[WEAVE],
        baselines={name: each for name, each in us.items() if name not in (WEAVE, REMOVED)},
        predicted_us=total(report, fused=True).us,
        bound_us=us.get(REMOVED),
        parameters={
            "weave_error": found.weave_error, "inductor_error": found.inductor_error,
            "attention": chosen(report, "attention"),
            **({"experts": experts} if experts else {}),
            **{f"{name}_reductions": reductions(each) for name, each in found.reports.items()},
            "over_inductor": round(us[INDUCTOR] / us[WEAVE], 3), **over,
            "inductor_predicted_us": round(total(report, fused=False).us, 3),
            **{f"{name}_steady_us": round(each.us, 1) for name, each in steady.items()},
            **{f"{name}_watts": round(each.watts) for name, each in steady.items()},
            **{f"{name}_joules": round(each.watts * each.us / 1e6, 3) for name, each in steady.items()},
            **{f"{name}_sm_mhz": round(each.sm_mhz) for name, each in steady.items()},
        },
    )  # fmt: skip


PROFILE = Setting("profile", "", "machine profile for weave (default: the one that fits the GPUs)")
EAGER = Setting("eager", False, "1: time eager as well")
GIVEN = Setting("positions", False, "1: the caller gives positions, which may be packed")
TRACE = Setting("trace", "", "folder for a Chrome trace of each variant, rank 0's")


def suite_of(
    name: str, about: str, models: Mapping[str, tuple[str, ...]], quick: tuple[str, str], others: tuple[str, ...]
) -> Suite[Case]:
    """A suite of `models` with their cases; `quick` is the model and the case of a quick run."""
    llama = name == "llama_layers"
    model_names = Setting("models", tuple(models), quick=quick[:1], among=tuple(SHAPES))
    calls = Setting[tuple[str, ...]]("cases", (), "prefill:TOKENS,decode:BATCH (default: the model's)", quick=quick[1:])
    layers = Setting("layers", 8 if llama else 0, "0: the model's number for this suite", quick=1)
    variants = Setting("variants", others, "beside inductor and weave", among=(*DISABLED, REMOVED))
    positions, filled = (2048, 512) if llama else (2048, 1000)

    def cases(asked: Asked) -> list[Case]:
        return [
            Case(**asdict(decoder.parse(word)), model=each)
            for each in asked.of(model_names)
            for word in asked.of(calls) or models.get(each, SHAPES[each].cases)
        ]

    def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
        given, wrong = llama or asked.of(GIVEN), []
        names = (INDUCTOR, WEAVE, *(each for each in asked.of(variants) if each != WEAVE))
        for each in dict.fromkeys(case.model for case in cases):
            model = decoder.make(place, SHAPES[each], asked.of(layers) or SHAPES[each].layers)
            for case in (case for case in cases if case.model == each):
                workload = Workload(model, case, place.device, positions, filled, given)
                trace = asked.of(TRACE) and f"{asked.of(TRACE)}/{each}"
                found = measure(place, model, workload, names, asked.of(PROFILE), trace, asked.of(EAGER))
                yield llama_row(place, model, case, found) if llama else variants_row(place, model, case, found, given)
                if not found.is_right:
                    wrong.append(f"{case}: weave is {found.weave_error:.1e} from eager, {found.inductor_error:.1e}")
                del workload
                gc.collect()
                torch.cuda.empty_cache()
            del model
            gc.collect()
            torch.cuda.empty_cache()
        assert not wrong, "; ".join(wrong)

    return Suite(
        name, about, Needs(GPU, 1 if name == "moe_layers" else 2), cases, rows, ours=(WEAVE,),
        baselines=(INDUCTOR, *(each for each in others if each != REMOVED)),
        predicted="the report's whole graph", bound=f"{REMOVED}, where it is measured",
        settings=(model_names, calls, layers, variants, PROFILE, EAGER, TRACE, *(() if llama else (GIVEN,))),
    )  # fmt: skip


def of_suite(name: str) -> dict[str, tuple[str, ...]]:
    return {model: shape.cases for model, shape in SHAPES.items() if name in shape.suites}


SUITES = (
    suite_of(
        "llama_layers", "eight layers of Llama-3.3-70B's shape", {"llama-70b": LLAMA_CASES},
        ("llama-70b", "prefill:512"), (REMOVED,),
    ),
    suite_of(
        "attention_layers", "layers with and without the rewrite of their attention", of_suite("attention_layers"),
        ("llama-70b", "prefill:512"), (WITHOUT, ALONE),
    ),
    suite_of(
        "moe_layers", "layers with and without the rewrite of their mixtures", of_suite("moe_layers"),
        ("qwen3-30b-a3b", "decode:8"), (WITHOUT_EXPERTS,),
    ),
)  # fmt: skip
