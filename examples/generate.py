"""Generates with a tensor-parallel model under `weaveopt.generate`, checks it against eager, and times it.

    accelerate launch --config_file examples/configs/accelerate_one_host.yaml --num_processes 2 examples/generate.py
    torchrun --nproc-per-node 2 examples/generate.py --model path/to/checkpoint --dtype bfloat16

Without `--model` a small random Llama is made. Exits with 1 if the tokens differ from eager's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from transformers import CompileConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import tiny_llama
import weaveopt
from weaveopt.generation.sessions import sessions_of

TIE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}
"""Largest gap between two logits of eager that rounding may turn over, by dtype."""


@dataclass
class TokenClock(BaseStreamer):
    """Notes when each token came. `generate` passes the prompt first, then every token it made."""

    times: list[float] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def token_us(self) -> float:
        """Mean time from one token to the next; the first token is the prefill's."""
        first, last = self.times[2], self.times[-1]
        return (last - first) * 1e6 / (len(self.times) - 3)


@dataclass(frozen=True)
class Generated:
    tokens: torch.Tensor
    scores: tuple[torch.Tensor, ...]
    token_us: float


def generate(model: PreTrainedModel, prompt: torch.Tensor, num_new: int, backend: str | None) -> Generated:
    """Greedy tokens, as `backend` makes them: None is eager, `weave` is `weaveopt.generate`."""
    # Of models that have no static cache transformers compiles nothing.
    static = {"cache_implementation": "static"} if model._can_compile_fullgraph else {}
    loop: dict[str, object] = {**static, "disable_compile": True}
    if backend == "weave":
        loop = {"custom_generate": weaveopt.generate}
    elif backend is not None:
        config = CompileConfig(backend=backend, mode="default")
        # transformers compiles `generate` on accelerators only, unless it is told that CPU ranks are meant.
        config._compile_all_devices = True
        loop = {**static, "compile_config": config}
    clock = TokenClock()
    with torch.no_grad():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            streamer=clock,
            return_dict_in_generate=True,
            output_logits=True,
            **loop,
        )
    return Generated(output.sequences[:, prompt.shape[1] :], output.logits, clock.token_us())


def difference(eager: Generated, other: Generated, tie: float) -> str | None:
    """First token at which `other` differs from eager by more than `tie` in eager's logits, in words; None if there is
    none."""
    for row in range(eager.tokens.shape[0]):
        unequal = (eager.tokens[row] != other.tokens[row]).nonzero()
        if len(unequal) == 0:
            continue
        step = int(unequal[0])
        logits = eager.scores[step][row].float()
        wanted, found = int(eager.tokens[row, step]), int(other.tokens[row, step])
        gap = float(logits[wanted] - logits[found])
        if gap > tie:
            return f"row {row}, new token {step}: eager {wanted}, found {found}, {gap:.4f} below it in eager's logits"
    return None


def compare_speed(model: PreTrainedModel, prompt: torch.Tensor, num_new: int, num_rounds: int) -> dict[str, float]:
    """Microseconds of a decode step per backend: rounds taken in turns so that drift hits all, slowest rank counts."""
    backends: dict[str, str | None] = {"eager": None, "inductor": "inductor", "weave": "weave"}
    times: dict[str, list[float]] = {name: [] for name in backends}
    for turn in range(num_rounds + 1):
        for name, backend in backends.items():
            dist.barrier()
            token_us = generate(model, prompt, num_new, backend).token_us
            if turn > 0:  # the first turn compiles
                times[name].append(token_us)
    medians = torch.tensor([statistics.median(found) for found in times.values()], dtype=torch.float64)
    medians = medians.to(prompt.device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def host_share(model: PreTrainedModel, prompt: torch.Tensor, num_new: int, step_us: float) -> str:
    """Share of weave's step that is not spent in its kernels, in words.

    On GPUs: the step's time beyond that of its captured graph back to back. On CPU ranks: the time outside of steps.
    A model whose step was left to transformers has no session.
    """
    sessions = sessions_of(model)
    if not sessions or not sessions[-1].forms:
        return "the step ran in transformers' own loop: the report above says why"
    session = sessions[-1]
    chosen = session.forms[-1]
    if chosen.graph is not None:
        replay_us = session.replay_us(chosen, prompt.shape[1], num_new - 1)
        return (
            f"{max(0.0, 1 - replay_us / step_us):.1%} of the step is not the GPU's (a replay takes {replay_us:.0f} us)"
        )
    before = chosen.report
    generate(model, prompt, num_new, "weave")
    after = chosen.report
    outside = 1 - (after.step_us - before.step_us) / (after.loop_us - before.loop_us)
    return f"{outside:.1%} of the loop's time is outside of steps (on CPU ranks nothing is captured)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory or hub id (default: a small random Llama)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds per backend; 0 leaves the timing out")
    args = parser.parse_args()
    if args.new_tokens < 4:
        parser.error("--new-tokens: at least 4")
    dtype = getattr(torch, args.dtype)

    with tiny_llama.ranks() as here:
        if args.model:
            model = tiny_llama.load(args.model, dtype, here.world)
        else:
            model = tiny_llama.make(tiny_llama.config(args.hidden, args.layers, here.world), dtype, here)
        torch.manual_seed(1)
        prompt = torch.randint(1, model.config.vocab_size, (args.batch, 16)).to(here.device)
        here.say(f"{type(model).__name__}, {args.dtype}, {here.device.type} ranks: {here.world}")

        eager = generate(model, prompt, args.new_tokens, None)
        begin = time.perf_counter()
        woven = generate(model, prompt, args.new_tokens, "weave")
        here.say(f"compiled and generated {args.new_tokens} tokens in {time.perf_counter() - begin:.1f} s")
        wrong = difference(eager, woven, TIE[dtype])
        here.say(f"tokens differ from eager: {wrong}" if wrong else "tokens agree with eager")
        here.say()
        here.say(str(weaveopt.report(model)))

        if args.rounds > 0:
            speed = compare_speed(model, prompt, args.new_tokens, args.rounds)
            per_second = {name: f"{args.batch * 1e6 / us:.0f}" for name, us in speed.items()}
            here.say(
                f"tokens per second: eager {per_second['eager']}, inductor {per_second['inductor']}, weave "
                f"{per_second['weave']}: {speed['inductor'] / speed['weave']:.2f}x the speed of inductor"
            )
            here.say(f"weave: {host_share(model, prompt, args.new_tokens, speed['weave'])}")
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
