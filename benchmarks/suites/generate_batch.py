"""A step of `generate_batch` (continuous batching): transformers' loop, eager and compiled by Inductor, against weave.

Llamas with random weights under transformers' own tensor-parallel plan; all requests come at once and are as long as
one another but for a few tokens. A step is what more tokens of a request take: the time of a long call less that of a
short one, over the tokens between. Ways take turns, the first turn compiles and does not count; a time is the median of
the rounds, of the ranks the slowest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import CompileConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import weaveopt
from benchmarks import record
from benchmarks.ranks import Place, barrier, slowest
from benchmarks.suite import CPU, GPU, Asked, Needs, Setting, Suite, product
from benchmarks.suites import generate

SHAPES = {
    "test": LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=4096, tie_word_embeddings=False,
    ),
    "8b": generate.SHAPES["8b"],
}  # fmt: skip
PAGES = {"test": (16, 256, 256), "8b": (256, 512, 4096)}
"""Tokens of a page, number of pages, most tokens of a step."""
WAYS = ("eager", "inductor", "weave")
REQUESTS = {CPU: Setting("requests", (4, 16), quick=(4,)), GPU: Setting("requests", (32, 128, 256), quick=(32,))}
MODELS = {CPU: Setting("models", ("test",)), GPU: Setting("models", ("8b",))}
LAYERS = Setting("layers", 0, "at most so many (default: all that the model has)", quick=2)
PROMPT = {CPU: Setting("prompt", 16, quick=8), GPU: Setting("prompt", 128)}
NEW_TOKENS = Setting("new_tokens", 72, quick=6)
SHORT, ROUNDS = 4, 5


@dataclass(frozen=True)
class Case:
    model: str
    requests: int


def cases(device: str, asked: Asked) -> list[Case]:
    return product(Case, asked.of(MODELS[device]), asked.of(REQUESTS[device]))


def make(place: Place, name: str, layers: int) -> PreTrainedModel:
    most = SHAPES[name].num_hidden_layers
    config = LlamaConfig(**{**SHAPES[name].to_diff_dict(), "num_hidden_layers": min(layers or most, most)})
    distributed, _, mesh = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=place.world))
    torch.manual_seed(0)
    with place.device:
        model = LlamaForCausalLM._from_config(
            config, dtype=torch.float32 if place.device.type == "cpu" else torch.bfloat16
        )
    return LlamaForCausalLM.maybe_distribute_model(model, distributed, mesh).eval()


def batching(way: str, name: str) -> ContinuousBatchingConfig:
    page, pages, tokens = PAGES[name]
    config = ContinuousBatchingConfig(page_size=page, num_blocks=pages, max_batch_tokens=tokens)
    if not torch.cuda.is_available():
        config.use_cuda_graph = False
    if way == "inductor":
        config.varlen_compile_config = CompileConfig(backend="inductor", mode="default", dynamic=True)
    return weaveopt.continuous_batching(config)["continuous_batching_config"] if way == "weave" else config


def call(model: PreTrainedModel, case: Case, length: int, way: str, num_new: int) -> tuple[float, list[list[int]]]:
    """Seconds of a call, and its tokens."""
    vocabulary = model.config.vocab_size
    prompts = [
        [(7 * at + each) % (vocabulary - 3) + 3 for each in range(length + at % 5)] for at in range(case.requests)
    ]
    how = GenerationConfig(max_new_tokens=num_new, do_sample=False, pad_token_id=0, eos_token_id=-1)
    barrier()
    begin = time.perf_counter()
    found = model.generate_batch(
        inputs=prompts, generation_config=how, continuous_batching_config=batching(way, case.model), progress_bar=False
    )
    taken_s = time.perf_counter() - begin
    wrong = [each.error for each in found.values() if each.error]
    assert not wrong, f"{way}: {wrong[0]}"
    return taken_s, [found[f"req_{at}"].generated_tokens for at in range(case.requests)]


def measure(
    place: Place, case: Case, run: Callable[[str, int], tuple[float, list[list[int]]]], new: int
) -> Mapping[str, float]:
    """Microseconds of a step of each way."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens: dict[str, list[list[int]]] = {}
    for turn in range((1 if place.quick else ROUNDS) + 1):
        for way, found in times.items():
            short_s, _ = run(way, SHORT)
            long_s, tokens[way] = run(way, new)
            if turn:
                found.append((long_s - short_s) * 1e6 / (new - SHORT))
            else:
                place.say(f"  {way}: first call took {short_s:.1f} s")
    same = sum(a == b for a, b in zip(tokens["weave"], tokens["eager"], strict=True))
    place.say(f"  tokens as eager's: {same} of {case.requests} requests")
    medians = slowest([statistics.median(found) for found in times.values()])
    return dict(zip(times, medians, strict=True))


def rows(device: str, place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for case in cases:
        torch._dynamo.reset()
        model = make(place, case.model, asked.of(LAYERS))
        us = dict(measure(place, case, partial(call, model, case, asked.of(PROMPT[device])), asked.of(NEW_TOKENS)))
        report = weaveopt.report(model)
        rewritten = {each.chosen.choice for graph in report.graphs for each in graph.decisions if each.rewritten}
        yield record.row(
            case={"model": case.model, "layers": model.config.num_hidden_layers, "ranks": place.world,
                  "requests": case.requests},
            weave_us=us.pop("weave"),
            baselines=us,
            parameters={"prompt": asked.of(PROMPT[device]), "new_tokens": asked.of(NEW_TOKENS),
                        "chosen": " ".join(sorted(rewritten))},
        )  # fmt: skip
        del model


def suite_of(device: str) -> Suite[Case]:
    return Suite(
        "generate_batch", "a step of `generate_batch`: continuous batching", Needs(device, 2, worlds=(2,)),
        partial(cases, device), partial(rows, device), ours=("weave",), baselines=WAYS[:2],
        settings=(MODELS[device], REQUESTS[device], LAYERS, PROMPT[device], NEW_TOKENS),
    )  # fmt: skip


SUITES = (suite_of(CPU), suite_of(GPU))
