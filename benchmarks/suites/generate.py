"""A decode step of `generate` on the GPUs of one host: transformers' loop, eager and compiled, against weave's.

Shapes of Llama-3-8B and Llama-3.2-1B with random weights, under transformers' own tensor-parallel plan. A step is the
time from one token to the next, as a streamer gets them, after the second one: loops take turns, a time is the median
of the rounds, of the ranks the slowest. `inductor_graphs` is `reduce-overhead`. Rows also hold what the captured step
takes to replay back to back, and the bytes that it has to read (weights, and the keys and values that are filled); the
bound is those bytes at the rate of `gpu_limits`. With fewer layers or variants than all, a row says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.generation.streamers import BaseStreamer

import weaveopt
from benchmarks import gpu_limits, record
from benchmarks.ranks import Place, barrier, slowest
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, UsageError, product
from weaveopt.generation import sessions

SKIPPED = 4
"""Tokens of a call that come before the clock starts: graphs may be recorded meanwhile."""
ROUNDS = 3
SHAPES = {
    "8b": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False,
    ),
    "1b": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
HOW_CHOSEN = ("greedy", "sampled")
LOOPS = ("eager", "inductor", "inductor_graphs", "weave")
MODELS = Setting("models", tuple(SHAPES), quick=("1b",), among=tuple(SHAPES))
BATCHES = Setting("batches", (1, 16, 64), quick=(1,))
CHOICES = Setting("choices", HOW_CHOSEN, quick=HOW_CHOSEN[:1], among=HOW_CHOSEN)
VARIANTS = Setting("variants", LOOPS, quick=("inductor", "weave"), among=LOOPS)
LAYERS = Setting("layers", 0, "at most so many (default: all that the model has)", quick=2)
PROMPT = Setting("prompt", 128)
NEW_TOKENS = Setting("new_tokens", 64)


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    choice: str


def cases(asked: Asked) -> list[Case]:
    if "weave" not in asked.of(VARIANTS) or len(asked.of(VARIANTS)) < 2:
        raise UsageError("--set variants: expected weave and at least one other")
    if asked.of(NEW_TOKENS) < SKIPPED + 8:
        raise UsageError(f"--set new_tokens: expected at least {SKIPPED + 8}")
    return product(Case, asked.of(MODELS), asked.of(BATCHES), asked.of(CHOICES))


@dataclass
class TokenClock(BaseStreamer):
    """Notes when tokens come; the first `put` is the prompt's."""

    times: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def step_us(self) -> float:
        first, last = self.times[1 + SKIPPED], self.times[-1]
        return (last - first) * 1e6 / (len(self.times) - 2 - SKIPPED)


def make(place: Place, name: str, layers: int) -> PreTrainedModel:
    config = LlamaConfig(**{**SHAPES[name].to_diff_dict(), "num_hidden_layers": num_layers(name, layers)})
    distributed, _, mesh = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=place.world))
    torch.manual_seed(0)
    # In the order of from_pretrained: shared weights are joined after they were sharded.
    is_tied, config.tie_word_embeddings = config.tie_word_embeddings, False
    with place.device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model = LlamaForCausalLM.maybe_distribute_model(model, distributed, mesh).eval()
    config.tie_word_embeddings = model.config.tie_word_embeddings = is_tied
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def num_layers(name: str, layers: int) -> int:
    return min(layers or 1 << 10, SHAPES[name].num_hidden_layers)


def bytes_read(model: PreTrainedModel, batch: int, filled: int) -> int:
    """Bytes that one step reads on this rank: keys, values and weights, but of an untied embedding a row a token."""
    weights = 0
    for name, parameter in model.named_parameters():  # a tied head counts once, and is read whole
        local = getattr(parameter, "_local_tensor", parameter)
        if "embed_tokens" in name and not model.config.tie_word_embeddings:
            weights += batch * local.shape[1] * local.element_size()
        else:
            weights += local.numel() * local.element_size()
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    world = dist.get_world_size() if dist.is_initialized() else 1
    heads = config.num_key_value_heads // world
    return weights + 2 * config.num_hidden_layers * batch * heads * head_dim * filled * 2


def prompt_of(place: Place, model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Random tokens, the same on all ranks."""
    numbers = torch.Generator(place.device).manual_seed(batch)
    shape = (batch, length)
    return torch.randint(1, model.config.vocab_size, shape, generator=numbers, device=place.device)


def sampling_of(choice: str) -> dict[str, object]:
    """Arguments of `generate` for one of `CHOICES`."""
    if choice == "sampled":
        return {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
    return {"do_sample": False}


def step_us(model: PreTrainedModel, prompt: Tensor, variant: str, choice: str, num_new: int) -> float:
    """Microseconds from token to token in one call."""
    how: dict[str, object] = {"custom_generate": weaveopt.generate}
    if variant != "weave":
        how = {"cache_implementation": "static"}
        if variant == "eager":
            how["disable_compile"] = True
        else:
            mode = "reduce-overhead" if variant == "inductor_graphs" else "default"
            how["compile_config"] = CompileConfig(backend="inductor", mode=mode)
    torch.manual_seed(0)  # every rank draws the same
    clock = TokenClock()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_new,
        streamer=clock,
        **sampling_of(choice),
        **how,
    )
    return clock.step_us()


def measure(place: Place, model: PreTrainedModel, prompt: Tensor, choice: str, asked: Asked) -> dict[str, float]:
    """Microseconds of a step of each loop. Loops take turns; the first turn compiles and does not count."""
    times: dict[str, list[float]] = {variant: [] for variant in asked.of(VARIANTS)}
    for turn in range((1 if place.quick else ROUNDS) + 1):
        for variant, found in times.items():
            barrier()
            begin = time.perf_counter()
            us = step_us(model, prompt, variant, choice, asked.of(NEW_TOKENS))
            if turn:
                found.append(us)
            else:
                place.say(f"  {variant}: first call took {time.perf_counter() - begin:.1f} s")
    medians = slowest([statistics.median(found) for found in times.values()])
    return dict(zip(times, medians, strict=True))


def replay_us(model: PreTrainedModel, asked: Asked) -> float | None:
    """Time of the last step, replayed back to back; None where any rank did not capture it."""
    session = sessions.sessions_of(model)[-1]
    chosen = session.forms[-1]
    if slowest([float(chosen.graph is None)])[0]:
        return None
    barrier()
    return slowest([session.replay_us(chosen, asked.of(PROMPT), asked.of(NEW_TOKENS) - 2)])[0]


def row(place: Place, model: PreTrainedModel, name: str, prompt: Tensor, choice: str, asked: Asked) -> record.Row:
    us = measure(place, model, prompt, choice, asked)
    weave_us = us.pop("weave")
    num_bytes = bytes_read(model, prompt.shape[0], asked.of(PROMPT) + asked.of(NEW_TOKENS) // 2)
    bound_us = num_bytes / gpu_limits.limits(place.device).bytes_per_us
    parameters: dict[str, record.Scalar] = {
        "bytes": num_bytes,
        "prompt": asked.of(PROMPT),
        "new_tokens": asked.of(NEW_TOKENS),
    }
    again = replay_us(model, asked)
    if again is not None:
        parameters |= {"replay_us": round(again, 3), "step_over_replay": round(weave_us / again, 3)}
        parameters["replay_over_bytes"] = round(again / bound_us, 3)
    else:
        parameters["not_captured"] = weaveopt.report(model).generation.steps[-1].not_captured
    case = {
        "model": name, "layers": model.config.num_hidden_layers, "ranks": place.world, "batch": prompt.shape[0],
        "choice": choice,
    }  # fmt: skip
    return record.row(case=case, weave_us=weave_us, baselines=us, bound_us=bound_us, parameters=parameters)


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for name in dict.fromkeys(case.model for case in cases):
        model = make(place, name, asked.of(LAYERS))
        for batch in dict.fromkeys(case.batch for case in cases if case.model == name):
            torch._dynamo.reset()
            sessions.forget(model)
            prompt = prompt_of(place, model, batch, asked.of(PROMPT))
            for case in (case for case in cases if (case.model, case.batch) == (name, batch)):
                yield row(place, model, name, prompt, case.choice, asked)
        sessions.forget(model)
        del model
        torch.cuda.empty_cache()


SUITES = (
    Suite(
        "generate", "a decode step of `generate`, as a streamer sees it", Needs(GPU, 2, worlds=(2,)), cases, rows,
        ours=("weave",), baselines=LOOPS[:3], bound="the bytes that a step reads, at the memory's rate",
        settings=(MODELS, BATCHES, CHOICES, VARIANTS, LAYERS, PROMPT, NEW_TOKENS),
    ),
)  # fmt: skip
