"""A decode step of `generate` on the GPUs of one host: transformers' loop, eager and compiled, against weave's.

    python -m benchmarks.generate_gpu --machine h200x4 [--models 8b 1b] [--batches 1 16 64] [--choices greedy sampled]
                                      [--layers N] [--variants eager inductor inductor_graphs weave] [--quick]

Shapes of Llama-3-8B and Llama-3.2-1B with random weights, under transformers' own tensor-parallel plan. A step is the
time from one token to the next, as a streamer gets them, after the second one: loops take turns, a time is the median
of the rounds, of the ranks the slowest. `inductor_graphs` is `reduce-overhead`. Rows also hold what the captured step
takes to replay back to back, and the bytes that it has to read (weights, and the keys and values that are filled); the
bound is those bytes at the rate of `gpu_limits`. With fewer layers or variants than all, a row says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.generation.streamers import BaseStreamer

import weaveopt
from benchmarks import gpu_limits, gpu_ranks, record
from benchmarks.gpu_ranks import Place
from weaveopt.generation import sessions
from weaveopt.wording import counted

SUITE = "generate"
BATCHES = (1, 16, 64)
CHOICES = ("greedy", "sampled")
VARIANTS = ("eager", "inductor", "inductor_graphs", "weave")
PROMPT = 128
NEW_TOKENS = 64
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


@dataclass(frozen=True)
class Asked:
    machine: str
    models: tuple[str, ...]
    batches: tuple[int, ...]
    choices: tuple[str, ...]
    variants: tuple[str, ...]
    layers: int | None
    prompt: int
    new_tokens: int
    quick: bool


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


def make(place: Place, name: str, layers: int | None) -> PreTrainedModel:
    config = LlamaConfig(**{**SHAPES[name].to_diff_dict(), "num_hidden_layers": num_layers(name, layers)})
    distributed, _, mesh = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=place.world))
    torch.manual_seed(0)
    with place.device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model = LlamaForCausalLM.maybe_distribute_model(model, distributed, mesh).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def num_layers(name: str, layers: int | None) -> int:
    return min(layers or 1 << 10, SHAPES[name].num_hidden_layers)


def bytes_read(model: PreTrainedModel, batch: int, filled: int) -> int:
    """By one step on this rank: every weight once (of an embedding of its own a row a token), keys and values."""
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
    times: dict[str, list[float]] = {variant: [] for variant in asked.variants}
    for turn in range((1 if asked.quick else ROUNDS) + 1):
        for variant, found in times.items():
            gpu_ranks.barrier()
            begin = time.perf_counter()
            us = step_us(model, prompt, variant, choice, asked.new_tokens)
            if turn:
                found.append(us)
            else:
                place.say(f"  {variant}: first call took {time.perf_counter() - begin:.1f} s")
    medians = gpu_ranks.slowest([statistics.median(found) for found in times.values()])
    return dict(zip(times, medians, strict=True))


def replay_us(model: PreTrainedModel, asked: Asked) -> float | None:
    """Of the step that was used last, back to back; None where it was not captured, on any rank."""
    session = sessions.sessions_of(model)[-1]
    chosen = session.forms[-1]
    if gpu_ranks.slowest([float(chosen.graph is None)])[0]:
        return None
    gpu_ranks.barrier()
    return gpu_ranks.slowest([session.replay_us(chosen, asked.prompt, asked.new_tokens - 2)])[0]


def rows(place: Place, asked: Asked) -> Iterator[record.Row]:
    for name in asked.models:
        model = make(place, name, asked.layers)
        for batch in asked.batches:
            torch._dynamo.reset()
            sessions.forget(model)
            prompt = prompt_of(place, model, batch, asked.prompt)
            for choice in asked.choices:
                place.say(f"{name}, batch {batch}, {choice}")
                yield row(place, model, name, prompt, choice, asked)
        sessions.forget(model)
        del model
        torch.cuda.empty_cache()


def row(place: Place, model: PreTrainedModel, name: str, prompt: Tensor, choice: str, asked: Asked) -> record.Row:
    us = measure(place, model, prompt, choice, asked)
    weave_us = us.pop("weave")
    num_bytes = bytes_read(model, prompt.shape[0], asked.prompt + asked.new_tokens // 2)
    bound_us = num_bytes / gpu_limits.limits(place.device).bytes_per_us
    parameters: dict[str, record.Scalar] = {"bytes": num_bytes, "prompt": asked.prompt, "new_tokens": asked.new_tokens}
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
    found = ", ".join(f"{variant} {value / 1e3:.3f}" for variant, value in us.items())
    place.say(f"  ms a step: {found}, weave {weave_us / 1e3:.3f}; bytes {bound_us / 1e3:.3f}; {parameters}")
    return record.row(case=case, weave_us=weave_us, baselines=us, bound_us=bound_us, parameters=parameters)


def program(place: Place, asked: Asked) -> None:
    found: list[record.Row] = []
    with torch.no_grad():
        for each in rows(place, asked):
            found.append(each)
            # After every row: a run that is cut short has the rows that it came to.
            if place.rank == 0 and not asked.quick:
                record.write(SUITE, asked.machine, found, beside=True)


def parse(arguments: list[str]) -> Asked:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu", help="folder of benchmarks/results that the figures go to")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--layers", type=int, help="at most so many (default: all that the model has)")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--quick", action="store_true", help="one round, and nothing is written")
    args = parser.parse_args(arguments)
    if "weave" not in args.variants or len(args.variants) < 2:
        parser.error("--variants: weave and at least one other")
    if args.new_tokens < SKIPPED + 8:
        parser.error(f"--new-tokens: at least {SKIPPED + 8}")
    return Asked(
        args.machine, tuple(args.models), tuple(args.batches), tuple(args.choices), tuple(args.variants), args.layers,
        args.prompt, args.new_tokens, args.quick,
    )  # fmt: skip


def main() -> int:
    asked = parse(sys.argv[1:])
    if not dist.is_torchelastic_launched():
        if torch.cuda.device_count() < 2:
            raise SystemExit(
                f"found {counted(torch.cuda.device_count(), 'CUDA device')}, the benchmark needs at least 2"
            )
        return gpu_ranks.start("benchmarks.generate_gpu", 2, sys.argv[1:])
    gpu_ranks.run_and_exit(lambda place: program(place, asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
