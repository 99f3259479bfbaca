"""Rollouts with continuous batching, a reward, a policy-gradient step and rollouts again; tensor-parallel.

    accelerate launch --config_file examples/configs/accelerate_one_host.yaml --num_processes 2 examples/rollout.py
    torchrun --nproc-per-node 2 examples/rollout.py --model path/to/checkpoint --dtype bfloat16
    python examples/rollout.py

Without `--model` a small random Llama is made. The reward of a completion is the share of its tokens in the lower half
of the vocabulary. Steps of `generate_batch` are compiled with weave, once: later rollouts run the same code with the
weights as the optimizer left them. Exits with 1 if a rollout compiled anything after the first, or if ranks sampled
different tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import tiny_llama
import weaveopt

PAGE = 16
"""Tokens of a page on CPU ranks."""


@dataclass(frozen=True)
class Rollout:
    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: torch.Tensor
    """One a completion."""
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.completions)) / self.seconds


def reward(completion: list[int], vocabulary: int) -> float:
    return sum(token < vocabulary // 2 for token in completion) / max(len(completion), 1)


def make_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Lengths differ; every prompt is there twice, so that completions of the same prompt can be compared."""
    numbers = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 24, (count,), generator=numbers).tolist()
    return [torch.randint(1, vocabulary, (length,), generator=numbers).tolist() for length in lengths for _ in range(2)]


def config_of(model: PreTrainedModel, prompts: list[list[int]], num_new: int, seed: int) -> ContinuousBatchingConfig:
    """transformers sizes its cache by a GPU's free memory; on a CPU it would take the host's, with masks as large."""
    if model.device.type == "cuda":
        return ContinuousBatchingConfig(seed=seed)
    pages = sum(-(-(len(each) + num_new) // PAGE) for each in prompts)
    return ContinuousBatchingConfig(seed=seed, page_size=PAGE, num_blocks=2 * pages, max_batch_tokens=256)


def sample(model: PreTrainedModel, prompts: list[list[int]], num_new: int, seed: int) -> Rollout:
    """Sampled completions, the same on all ranks."""
    how = GenerationConfig(max_new_tokens=num_new, do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1,
                           pad_token_id=0)  # fmt: skip
    batching = weaveopt.continuous_batching(config_of(model, prompts, num_new, seed))
    begin = time.perf_counter()
    found = model.generate_batch(prompts, how, **batching)
    seconds = time.perf_counter() - begin
    failed = [each.error for each in found.values() if each.error]
    if failed or len(found) != len(prompts):
        raise SystemExit(f"rollout: {failed[0] if failed else 'requests are missing'}")
    completions = [found[f"req_{at}"].generated_tokens for at in range(len(prompts))]
    rewards = [reward(each, model.config.vocab_size) for each in completions]
    return Rollout(prompts, completions, torch.tensor(rewards), seconds)


def log_likelihood(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Mean log-probability of the completion's tokens."""
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None]).mean()


def learn(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollout: Rollout) -> float:
    """One step of REINFORCE, the mean reward as the baseline; returns the loss."""
    advantages = (rollout.rewards - rollout.rewards.mean()) / (rollout.rewards.std() + 1e-6)
    optimizer.zero_grad()
    total = 0.0
    for prompt, completion, advantage in zip(rollout.prompts, rollout.completions, advantages.tolist(), strict=True):
        loss = -advantage * log_likelihood(model, prompt, completion) / len(rollout.prompts)
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total


def same_everywhere(rollout: Rollout, world: int) -> bool:
    every: list[list[list[int]] | None] = [None] * world
    dist.all_gather_object(every, rollout.completions)
    return all(each == rollout.completions for each in every)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory or hub id (default: a small random Llama)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8, help="each is completed twice")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=4, help="rollouts; a step of the optimizer between any two")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: at least 2")
    dtype = getattr(torch, args.dtype)

    with tiny_llama.ranks() as here:
        if args.model:
            model = tiny_llama.load(args.model, dtype, here.world).to(here.device)
        else:
            model = tiny_llama.make(tiny_llama.config(args.hidden, args.layers, here.world), dtype, here)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, foreach=False)
        prompts = make_prompts(args.prompts, model.config.vocab_size)
        sharded = sum(isinstance(each, DTensor) for each in model.parameters())
        here.say(
            f"{type(model).__name__}, {args.dtype}, {here.device.type} ranks: {here.world}, {sharded} weights sharded"
        )

        wrong, graphs = "", 0
        for turn in range(args.rounds):
            rollout = sample(model, prompts, args.new_tokens, turn)
            compiles = " (compiles)" if turn == 0 else ""
            here.say(
                f"round {turn}: mean reward {rollout.rewards.mean():.3f}, tokens per second: "
                f"{rollout.tokens_per_second:.0f}{compiles}"
            )
            if not same_everywhere(rollout, here.world):
                wrong = f"round {turn}: ranks sampled different tokens"
            now = weaveopt.report(model).num_graphs
            if turn > 0 and now != graphs:
                wrong = f"round {turn}: compiled again ({now - graphs} more)"
            graphs = now
            if wrong:
                break
            if turn + 1 < args.rounds:
                loss = learn(model, optimizer, rollout)
                here.say(f"         policy-gradient step, loss {loss:+.4f}")
        here.say()
        here.say(str(weaveopt.report(model)))
        here.say(wrong or f"graphs that all rounds ran: {graphs}")
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
