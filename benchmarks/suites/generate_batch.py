"""A step of `generate_batch` (continuous batching): transformers' loop, eager and compiled by Inductor, against weave.

Models with random weights under transformers' own tensor-parallel plan; all requests come at once and are as long as
one another but for a few tokens. A step is what a pass of transformers' loop takes, the median of the second half of a
call, where all requests decode; ways take turns, the first turn compiles and does not count; a time is the median of
the rounds, of the ranks the slowest. Tokens a second are those of whole calls, with transformers' warm-up, which
captures graphs; `first_call_s` is a call of few tokens that compiles. `_graphs`: with transformers' own CUDA graphs,
which it leaves off by default where attention needs a mask. weave has what `weaveopt.continuous_batching` chooses.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import (
    CompileConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed import DistributedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import weaveopt
from benchmarks import record
from benchmarks.ranks import Place, barrier, slowest
from benchmarks.suite import CPU, GPU, Asked, Needs, Setting, Suite, product
from benchmarks.suites import generate

SHAPES: Mapping[str, PreTrainedConfig] = {
    "test": LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=4096, tie_word_embeddings=False,
    ),
    "8b": generate.SHAPES["8b"],
    "qwen3-30b-a3b": Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False,
    ),
}  # fmt: skip
CLASSES = {LlamaConfig: LlamaForCausalLM, Qwen3MoeConfig: Qwen3MoeForCausalLM}
PAGES = {"test": (16, 256, 256), "8b": (256, 512, 4096), "qwen3-30b-a3b": (256, 512, 4096)}
"""Tokens of a page, number of pages, most tokens of a step."""
BASELINES = {CPU: ("eager", "inductor"), GPU: ("eager", "eager_graphs", "inductor", "inductor_graphs")}
REQUESTS = {CPU: Setting("requests", (4, 16), quick=(4,)), GPU: Setting("requests", (32, 128, 256), quick=(32,))}
MODELS = {CPU: Setting("models", ("test",)), GPU: Setting("models", ("8b", "qwen3-30b-a3b"), quick=("8b",))}
LAYERS = Setting("layers", 0, "at most so many (default: all that the model has)", quick=2)
PROMPT = {CPU: Setting("prompt", 16, quick=8), GPU: Setting("prompt", 128)}
NEW_TOKENS = Setting("new_tokens", 72, quick=8)
WAYS = {device: Setting("ways", names, among=names) for device, names in BASELINES.items()}
WARM_UP_TOKENS = 4
ROUNDS = {CPU: 5, GPU: 2}


@dataclass(frozen=True)
class Case:
    model: str
    requests: int


def cases(device: str, asked: Asked) -> list[Case]:
    return product(Case, asked.of(MODELS[device]), asked.of(REQUESTS[device]))


def make(place: Place, name: str, layers: int) -> PreTrainedModel:
    most = SHAPES[name].num_hidden_layers
    kind = type(SHAPES[name])
    config = kind(**{**SHAPES[name].to_diff_dict(), "num_hidden_layers": min(layers or most, most)})
    torch.manual_seed(0)
    with place.device:
        model = CLASSES[kind]._from_config(
            config, dtype=torch.float32 if place.device.type == "cpu" else torch.bfloat16
        )
    if place.world == 1:
        return model.eval()
    distributed, _, mesh = CLASSES[kind].prepare_distribute_model(DistributedConfig(tp_size=place.world))
    return CLASSES[kind].maybe_distribute_model(model, distributed, mesh).eval()


def batching(way: str, paged: tuple[int, int, int]) -> ContinuousBatchingConfig:
    """transformers' config of a way; `paged`: tokens of a page, number of pages, most tokens of a step."""
    page, pages, tokens = paged
    config = ContinuousBatchingConfig(page_size=page, num_blocks=pages, max_batch_tokens=tokens)
    if way == "weave":
        return weaveopt.continuous_batching(config)["continuous_batching_config"]
    config.use_cuda_graph = way.endswith("_graphs")
    if way.startswith("inductor"):
        config.varlen_compile_config = CompileConfig(backend="inductor", mode="default", dynamic=True)
    return config


Replay = tuple[torch.cuda.Event, torch.cuda.Event]


@contextmanager
def timed_passes() -> Iterator[tuple[list[float], list[Replay]]]:
    """When each pass of transformers' loop ended, in seconds, and the events around each replay of a CUDA graph."""
    own: Callable[..., bool] = ContinuousBatchingManager._generation_loop_body
    own_replay: Callable[..., None] = torch.cuda.CUDAGraph.replay
    ends: list[float] = []
    replays: list[Replay] = []

    @functools.wraps(own)
    def body(*args: object, **kwargs: object) -> bool:
        goes_on = own(*args, **kwargs)
        ends.append(time.perf_counter())
        return goes_on

    @functools.wraps(own_replay)
    def replay(graph: torch.cuda.CUDAGraph) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        own_replay(graph)
        end.record()
        replays.append((begin, end))

    ContinuousBatchingManager._generation_loop_body = body
    torch.cuda.CUDAGraph.replay = replay  # type: ignore[assignment]
    try:
        yield ends, replays
    finally:
        ContinuousBatchingManager._generation_loop_body = own
        torch.cuda.CUDAGraph.replay = own_replay  # type: ignore[method-assign]


@dataclass(frozen=True)
class Call:
    """One call of `generate_batch`."""

    seconds: float
    step_us: float
    replay_us: float
    """The time of a step's CUDA graph; 0 where there is none."""
    tokens: list[list[int]]


def prompts(model: PreTrainedModel, requests: int, length: int) -> list[list[int]]:
    """Prompts of `length` tokens and up to four more."""
    vocabulary = model.config.vocab_size
    return [[(7 * at + each) % (vocabulary - 3) + 3 for each in range(length + at % 5)] for at in range(requests)]


def call(model: PreTrainedModel, case: Case, length: int, way: str, num_new: int) -> Call:
    how = GenerationConfig(max_new_tokens=num_new, do_sample=False, pad_token_id=0, eos_token_id=-1)
    barrier()
    begin = time.perf_counter()
    with timed_passes() as (ends, replays):
        found = model.generate_batch(
            inputs=prompts(model, case.requests, length), generation_config=how, progress_bar=False,
            continuous_batching_config=batching(way, PAGES[case.model]),
        )  # fmt: skip
    taken_s = time.perf_counter() - begin
    wrong = [each.error for each in found.values() if each.error]
    assert not wrong and len(found) == case.requests, f"{way}: {wrong[0] if wrong else 'requests are missing'}"
    # The last passes find no request.
    passes = [after - before for before, after in itertools.pairwise(ends)][num_new // 2 : num_new - 1]
    step_us = statistics.median(passes) * 1e6
    replay_us = [begin.elapsed_time(end) * 1e3 for begin, end in replays[len(replays) // 2 :]]
    return Call(
        taken_s,
        step_us,
        statistics.median(replay_us or [0.0]),
        [found[f"req_{at}"].generated_tokens for at in range(case.requests)],
    )


def alike(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, float]:
    """How many requests begin with the same token, and the mean number of tokens until they differ."""
    lengths = [
        next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(ours, theirs, strict=True)
    ]
    return sum(length > 0 for length in lengths), statistics.mean(lengths)


def measure(
    device: str, place: Place, ways: Sequence[str], run: Callable[[str, int], Call], new: int
) -> tuple[dict[str, float], dict[str, list[Call]]]:
    """Seconds of each way's first call, and its other calls."""
    calls: dict[str, list[Call]] = {way: [] for way in ways}
    first_s: dict[str, float] = {}
    for turn in range((1 if place.quick else ROUNDS[device]) + 1):
        for way in ways:
            found = run(way, new if turn else WARM_UP_TOKENS)
            if turn:
                calls[way].append(found)
            else:
                first_s[way] = found.seconds
                place.say(f"  {way}: first call took {found.seconds:.1f} s")
    for way in ways[1:]:
        ours, theirs = (calls[each][-1].tokens for each in (way, ways[0]))
        same, mean = alike(ours, theirs)
        place.say(f"  {way} against {ways[0]}: {same} of {len(ours)} first tokens, {mean:.1f} of {new} in a row")
    return first_s, calls


def named(values: Mapping[str, float]) -> str:
    return " ".join(f"{way}={value:.0f}" for way, value in values.items() if value)


def rows(device: str, place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    torch._dynamo.reset()
    models: dict[str, PreTrainedModel] = {}
    new, ways = asked.of(NEW_TOKENS), (*asked.of(WAYS[device]), "weave")
    for case in cases:
        if case.model not in models:
            models.clear()
            models[case.model] = make(place, case.model, asked.of(LAYERS))
        model = models[case.model]
        first_s, calls = measure(
            device, place, ways, functools.partial(call, model, case, asked.of(PROMPT[device])), new
        )
        medians = slowest([statistics.median(each.step_us for each in calls[way]) for way in ways])
        us = dict(zip(ways, medians, strict=True))
        rates = {way: new * case.requests / statistics.median(each.seconds for each in calls[way]) for way in ways}
        replays = {way: statistics.median(each.replay_us for each in calls[way]) for way in ways}
        report = weaveopt.report(model)
        times = {"tokens_per_s": named(rates)} | ({"replay_us": named(replays)} if any(replays.values()) else {})
        own_s = Counter[str]()
        for graph in report.graphs:
            own_s.update({step: float(lap_us) * 1e-6 for step, lap_us in graph.steps_us})
        place.say(f"  weave: {len(report.graphs)} graphs; steps of its own {own_s.total():.1f} s, of which "
                  + ", ".join(f"{step} {seconds:.1f}" for step, seconds in own_s.most_common(4)))  # fmt: skip
        rewritten = {each.chosen.choice for graph in report.graphs for each in graph.decisions if each.rewritten}
        yield record.row(
            case={"model": case.model, "layers": model.config.num_hidden_layers, "ranks": place.world,
                  "requests": case.requests},
            weave_us=us["weave"],
            baselines={way: us[way] for way in ways if way != "weave"},
            parameters={"prompt": asked.of(PROMPT[device]), "new_tokens": new,
                        "first_call_s": named(first_s), "graphs": len(report.graphs),
                        "chosen": " ".join(sorted(rewritten))} | times,
        )  # fmt: skip


def suite_of(device: str) -> Suite[Case]:
    return Suite(
        "generate_batch", "a step of `generate_batch`: continuous batching",
        Needs(device, worlds=(2,) if device == CPU else (2, 1)),
        functools.partial(cases, device), functools.partial(rows, device), ours=("weave",),
        baselines=BASELINES[device],
        settings=(MODELS[device], REQUESTS[device], LAYERS, PROMPT[device], NEW_TOKENS, WAYS[device]),
    )  # fmt: skip


SUITES = (suite_of(CPU), suite_of(GPU))
