"""One tensor-parallel training step under `backend="weave"`: forward, backward, and every gradient against eager's.

    torchrun --nproc-per-node 2 examples/train_step.py

In a training graph a site that no rule supports is left as it is; the report says why. Exits with 1 if the loss or a
gradient differs beyond rounding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import tiny_llama
import weaveopt

TOLERANCE = 1e-4


def step(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and this rank's part of every gradient."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        grad = parameter.grad
        grads[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
    return loss.item(), grads


def step_ms(model: PreTrainedModel, tokens: torch.Tensor, num_rounds: int) -> float:
    """Milliseconds of a step, the median; of the ranks the slowest."""
    times = []
    for _ in range(num_rounds):
        dist.barrier()
        begin = time.perf_counter()
        step(model, tokens)
        times.append((time.perf_counter() - begin) * 1e3)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=tokens.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--backend", default="weave")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps; 0 leaves the timing out")
    args = parser.parse_args()

    with tiny_llama.ranks() as here:
        model = tiny_llama.make(tiny_llama.config(args.hidden, args.layers, here.world), torch.float32, here).train()
        torch.manual_seed(1)
        tokens = torch.randint(1, model.config.vocab_size, (2, 64)).to(here.device)
        loss, grads = step(model, tokens)
        eager_ms = step_ms(model, tokens, args.rounds) if args.rounds else 0.0
        model.compile(backend=args.backend)
        compiled_loss, compiled_grads = step(model, tokens)

        worst, where = abs(loss - compiled_loss) / abs(loss), "loss"
        for name, grad in grads.items():
            error = float((grad - compiled_grads[name]).norm() / grad.norm().clamp_min(1e-12))
            worst, where = max((worst, where), (error, name))
        lines: list[str | None] = [None] * here.world
        line = (
            f"rank {here.rank}: loss {loss:.6f} eager, {compiled_loss:.6f} compiled; {len(grads)} gradients, "
            f"largest relative difference {worst:.1e} ({where})"
        )
        dist.all_gather_object(lines, line)
        here.say("\n".join(str(found) for found in lines))
        here.say(str(weaveopt.report(model)))
        if args.rounds:
            here.say(f"a step: eager {eager_ms:.1f} ms, {args.backend} {step_ms(model, tokens, args.rounds):.1f} ms")
        return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
