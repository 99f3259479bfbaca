"""Eight layers of Llama-3.3-70B's shape on the GPUs of one host: weave, Inductor, and Inductor without collectives.

Hidden 8192, intermediate 28672, 64/8 heads, bf16, random weights, tensor parallel over all ranks by the model's own
plan. Prefill is a batch of 1 without a cache, decode one token a sequence against a static cache. Dynamo captures a
case once; each variant compiles that graph, and one call of it is captured in a CUDA graph. The variants' graphs take
turns; a time is the median of the replays, of the ranks the slowest.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache
from transformers.distributed import DistributedConfig

import weaveopt
from benchmarks import gpu_clocks, gpu_ranks, record
from benchmarks.gpu_ranks import Place
from benchmarks.llama_layers import Case, largest_error, without_all_reduce
from weaveopt.integrations.cache_argument import with_cache
from weaveopt.reporting.timeline import total

SHAPE = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=8, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=32768, max_position_embeddings=16384, tie_word_embeddings=False,
)  # fmt: skip
CACHE_POSITIONS = 2048
FILLED_POSITIONS = 512
PREFILLS = (512, 1024, 2048, 4096, 8192)
DECODES = (1, 8, 32)
CASES = (*(Case("prefill", 1, seq) for seq in PREFILLS), *(Case("decode", batch, 1) for batch in DECODES))
CLOCK_US = 1e6
"""How long clocks are watched: replays of about a second."""
INDUCTOR, WEAVE, WITHOUT = "inductor", "weave", "without_collectives"
Forward = Callable[..., object]
Compile = Callable[[fx.GraphModule, list[torch.Tensor]], Forward]


@dataclass(frozen=True)
class Asked:
    cases: tuple[Case, ...] = CASES
    profile: str | None = None
    """Machine profile for weave; None: the one that fits the GPUs."""
    with_eager: bool = False
    quick: bool = False


def make(place: Place) -> PreTrainedModel:
    """The layers, made on the device and then sharded: every rank draws the same weights and keeps its part."""
    from transformers.initialization import no_init_weights

    config = LlamaConfig.from_dict(SHAPE.to_dict())
    distributed, _, mesh = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=place.world))
    with place.device, no_init_weights():
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    generator = torch.Generator(place.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                deviation = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0.0, deviation, generator=generator)
            else:
                parameter.fill_(1.0)
    model = LlamaForCausalLM.maybe_distribute_model(model, distributed, mesh)
    gc.collect()
    decoder: PreTrainedModel = model.model
    return decoder


class Variants:
    """One capture by Dynamo, compiled in every way; `forward` runs the one that is `chosen`."""

    def __init__(self, model: PreTrainedModel, ways: Mapping[str, Compile]) -> None:
        self.ways = ways
        self.compiled: dict[str, Forward] = {}
        self.seconds: dict[str, float] = {}
        self.chosen = INDUCTOR
        self.forward = torch.compile(model, backend=self._compile, dynamic=False, fullgraph=True)

    def _compile(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Forward:
        assert not self.compiled, "a case was captured a second time"
        for name, way in self.ways.items():
            begin = time.perf_counter()
            self.compiled[name] = way(copied(gm), inputs)
            self.seconds[name] = time.perf_counter() - begin
        return lambda *arguments: self.compiled[self.chosen](*arguments)

    @staticmethod
    def usual(profile: str | None) -> dict[str, Compile]:
        from torch._inductor.compile_fx import compile_fx

        from weaveopt.backend import weave

        options = {"machine": profile} if profile else {}
        return {
            INDUCTOR: compile_fx,
            WEAVE: lambda gm, inputs: weave(gm, inputs, options=options),
            WITHOUT: without_all_reduce,
        }

    def running(self, name: str) -> Forward:
        def run(*arguments: object, **named: object) -> object:
            self.chosen = name
            return self.forward(*arguments, **named)

        return run


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A module with its own graph: compiling changes it. What Dynamo noted beside the graph comes along."""
    graph = fx.Graph(tracer_cls=getattr(gm.graph, "_tracer_cls", None))
    nodes: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, nodes))
    for old, new in nodes.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    module = fx.GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        module._param_name_to_source = gm._param_name_to_source
    return module


class Workload:
    """The call of one case, and the cache that it starts from each time."""

    def __init__(
        self,
        model: PreTrainedModel,
        case: Case,
        device: torch.device,
        positions: int = CACHE_POSITIONS,
        filled: int = FILLED_POSITIONS,
        gives_positions: bool = True,
    ) -> None:
        self.filled = filled
        generator = torch.Generator(device).manual_seed(case.tokens)

        def random_ids(seq: int) -> torch.Tensor:
            return torch.randint(1, model.config.vocab_size, (case.batch, seq), generator=generator, device=device)

        self.case, self.cache = case, None
        self.ids = random_ids(case.seq)
        # Positions that a caller gives may be those of packed sequences: then the mask is known at run time only.
        own_positions = torch.arange(case.seq, device=device)[None].expand(case.batch, -1).contiguous()
        self.positions = own_positions if gives_positions or case.phase == "decode" else None
        if case.phase == "decode":
            self.cache = StaticCache(config=model.config, max_cache_len=positions)
            model(input_ids=random_ids(filled), use_cache=True, **with_cache(self.cache))
            self.positions = own_positions + filled

    def reset(self) -> None:
        if self.cache is not None:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.filled)

    def __call__(self, forward: Forward) -> torch.Tensor:
        caching = self.cache is not None
        output = forward(input_ids=self.ids, position_ids=self.positions, use_cache=caching, **with_cache(self.cache))
        return output.last_hidden_state  # type: ignore[attr-defined, no-any-return]


def run_case(place: Place, model: PreTrainedModel, case: Case, asked: Asked) -> tuple[record.Row, str]:
    """One row, and what is wrong with it (empty: nothing)."""
    torch._dynamo.reset()
    workload = Workload(model, case, place.device)
    variants = Variants(model, Variants.usual(asked.profile))
    eager = workload(model).float()
    outputs: dict[str, torch.Tensor] = {}
    pool = torch.cuda.graph_pool_handle()

    def captured(name: str) -> torch.cuda.CUDAGraph:
        def step() -> None:
            outputs[name] = workload(variants.running(name))

        workload.reset()
        step()  # compiles
        workload.reset()
        return gpu_ranks.capture(step, pool)

    graphs = {name: captured(name) for name in (INDUCTOR, WEAVE, WITHOUT)}
    errors = []
    for name in (INDUCTOR, WEAVE):
        workload.reset()
        graphs[name].replay()
        gpu_ranks.barrier()
        errors.append(largest_error(outputs[name].float(), eager))
    inductor_error, weave_error = gpu_ranks.slowest(errors)
    del eager
    steps: dict[str, gpu_ranks.Step] = {name: graph.replay for name, graph in graphs.items()}
    if asked.with_eager:
        steps["eager"] = lambda: workload(model)
    settle = torch.zeros(1, device=place.device)
    num_rounds, num_replays = (2, 3) if asked.quick else (6, 4 if case.tokens > 2048 else 10)
    us = gpu_ranks.median_us(steps, workload.reset, num_rounds, num_replays, settle)
    gpu_ranks.barrier()

    def again(name: str) -> gpu_ranks.Step:
        def step() -> None:
            workload.reset()
            graphs[name].replay()

        return step

    clocks = {} if asked.quick else {name: observed(again(name), us[name], place) for name in graphs}
    for graph in graphs.values():
        graph.reset()
    found = weaveopt.report().graphs[-1]
    compiling = ", ".join(f"{name} {seconds:.1f}" for name, seconds in variants.seconds.items())
    for fallback in found.fallbacks:
        place.say(f"  weave left the graph as it is: {fallback.step}: {fallback.error}")
    times = ", ".join(f"{name} {time / 1e3:.3f}" for name, time in us.items())
    place.say(
        f"  {case.phase} {case.batch} x {case.seq}, ms: {times}; {found.num_rewritten} rewritten; "
        f"compiled in s: {compiling}"
    )
    row = record.row(
        case={
            "phase": case.phase, "batch": case.batch, "seq": case.seq, "dtype": "bfloat16", "ranks": place.world,
            "layers": model.config.num_hidden_layers, "hidden": model.config.hidden_size,
        },
        weave_us=us[WEAVE],
        baselines={name: us[name] for name in (INDUCTOR, "eager") if name in us},
        predicted_us=total(found, fused=True).us,
        bound_us=us[WITHOUT],
        parameters={
            "weave_error": weave_error, "inductor_error": inductor_error, "sites_rewritten": found.num_rewritten,
            "inductor_predicted_us": round(total(found, fused=False).us, 3),
            **{f"{name}_sm_mhz": round(clock.sm_mhz) for name, clock in clocks.items() if clock},
            **{f"{name}_power_limited": round(clock.limited, 3) for name, clock in clocks.items() if clock},
        },
    )  # fmt: skip
    # weave's error may be rounding, of which Inductor's is the measure.
    good = weave_error <= 2 * inductor_error + 1e-5
    return row, "" if good else f"{case}: weave is {weave_error:.1e} from eager, Inductor {inductor_error:.1e}"


def observed(step: gpu_ranks.Step, us: float, place: Place) -> gpu_clocks.Clocks | None:
    """Of the rank with the lowest clock, and of the one most limited, while a step of `us` repeats; None if a rank
    cannot tell."""
    gpu_ranks.barrier()
    found = gpu_clocks.observe(step, math.ceil(CLOCK_US / us), place.device)
    mhz, limited = gpu_ranks.slowest([-found.sm_mhz, found.limited] if found else [0.0, 0.0])
    return gpu_clocks.Clocks(-mhz, limited) if mhz else None


def summary(rows: Sequence[record.Row]) -> str:
    columns = ["phase", "batch", "seq", "inductor", "weave", "without", "weave/inductor", "of what is possible"]
    lines = []
    for row in rows:
        inductor, without = row.baselines[INDUCTOR], row.bound_us or 0.0
        share = (inductor - row.weave_us) / (inductor - without) if inductor > without else 0.0
        lines.append([
            *(str(row.case[name]) for name in ("phase", "batch", "seq")),
            *(f"{us / 1e3:.3f}" for us in (inductor, row.weave_us, without)),
            f"{inductor / row.weave_us:.3f}x", f"{share:.0%}",
        ])  # fmt: skip
    title = f"{rows[0].case['layers']} Llama layers, hidden {rows[0].case['hidden']}, {rows[0].case['ranks']} GPUs, ms"
    return gpu_ranks.table(title, columns, lines)


def run(place: Place, asked: Asked, keep: Callable[[list[record.Row]], None]) -> tuple[list[record.Row], list[str]]:
    """Rows of all cases, and what is wrong with them; `keep` gets the rows so far after each case."""
    dist.all_reduce(torch.zeros(1, device=place.device))  # NCCL connects now, not in a first measurement
    rows, wrong = [], []
    with torch.no_grad():
        model = make(place)
        for case in asked.cases:
            row, complaint = run_case(place, model, case, asked)
            rows.append(row)
            keep(rows)
            wrong += [complaint] if complaint else []
            gc.collect()
            torch.cuda.empty_cache()
    return rows, wrong


def parse(word: str) -> Case:
    """`prefill:TOKENS` or `decode:BATCH`. Raises `ValueError`."""
    phase, _, number = word.partition(":")
    case = {"prefill": Case("prefill", 1, int(number)), "decode": Case("decode", int(number), 1)}.get(phase)
    if case is None or case.tokens < 1:
        raise ValueError(f"{word!r}: expected prefill:TOKENS or decode:BATCH")
    return case
