"""A training step of a tensor-parallel Llama on the GPUs of one host: weave against Inductor, forward and backward.

    python -m benchmarks.training_step --machine h200x4 [--tokens 512 4096] [--layers 4] [--quick]

Llama-3-8B's shape, random weights, transformers' own plan; a step is the loss and its gradients, without an optimizer
and without CUDA graphs. `bfloat16` has everything in bf16; `autocast` has weights, residual and norms in fp32 and GEMMs
in bf16, the usual way to train. Backends take turns; a time is the median of the steps, of the ranks the slowest. Rows
hold how far each backend's gradients are from eager's.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import weaveopt
from benchmarks import gpu_ranks, record
from benchmarks.gpu_ranks import Place
from weaveopt.wording import counted

SUITE = "training_step"
TOKENS = (512, 2048, 4096)
MODES = ("bfloat16", "autocast")
INDUCTOR, WEAVE = "inductor", "weave"
WARM_STEPS, ROUNDS, STEPS = 3, 4, 5


@dataclass(frozen=True)
class Asked:
    machine: str
    tokens: tuple[int, ...]
    layers: int
    quick: bool


def make(place: Place, layers: int, dtype: torch.dtype) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32768, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    distributed, _, mesh = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=place.world))
    torch.manual_seed(0)
    with place.device:
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    return LlamaForCausalLM.maybe_distribute_model(model, distributed, mesh).train()


def step(forward: torch.nn.Module, model: PreTrainedModel, ids: Tensor, autocast: bool) -> float:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def gradients(model: PreTrainedModel) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        found.append((grad.to_local() if isinstance(grad, DTensor) else grad).float().clone())
    return found


def largest_error(got: list[Tensor], want: list[Tensor]) -> float:
    errors = [float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(got, want, strict=True)]
    return gpu_ranks.slowest([max(errors)])[0]


def run_case(place: Place, model: PreTrainedModel, mode: str, tokens: int, asked: Asked) -> record.Row:
    torch._dynamo.reset()
    num_before = len(weaveopt.report().graphs)
    autocast = mode == "autocast"
    numbers = torch.Generator(place.device).manual_seed(tokens)
    ids = torch.randint(1, model.config.vocab_size, (1, tokens), generator=numbers, device=place.device)
    step(model, model, ids, autocast)
    eager = gradients(model)
    forwards = {name: torch.compile(model, backend=name, dynamic=False) for name in (INDUCTOR, WEAVE)}
    errors = {}
    for name, forward in forwards.items():
        for _ in range(WARM_STEPS):
            step(forward, model, ids, autocast)
        errors[name] = largest_error(gradients(model), eager)
    del eager
    steps = {name: (lambda forward=forward: step(forward, model, ids, autocast)) for name, forward in forwards.items()}
    settle = torch.zeros(1, device=place.device)
    rounds = 2 if asked.quick else ROUNDS
    us = gpu_ranks.median_us(steps, lambda: None, rounds, STEPS, settle)
    found = weaveopt.report().graphs[num_before:]
    sites = {phase: sum(len(g.decisions) for g in found if g.phase == phase) for phase in ("forward", "backward")}
    rewritten = {phase: sum(g.num_rewritten for g in found if g.phase == phase) for phase in sites}
    place.say(
        f"{mode} {tokens} tokens, ms: inductor {us[INDUCTOR] / 1e3:.2f}, weave {us[WEAVE] / 1e3:.2f}, "
        f"{us[INDUCTOR] / us[WEAVE]:.3f}x; rewritten {rewritten} of {sites}; gradients off by {errors}"
    )
    assert errors[WEAVE] <= 2 * errors[INDUCTOR] + 1e-3, f"{mode}, {tokens} tokens: {errors}"
    return record.row(
        case={
            "mode": mode, "tokens": tokens, "ranks": place.world, "layers": asked.layers,
            "hidden": model.config.hidden_size,
        },
        weave_us=us[WEAVE],
        baselines={INDUCTOR: us[INDUCTOR]},
        parameters={
            "weave_error": errors[WEAVE], "inductor_error": errors[INDUCTOR],
            **{f"{phase}_sites": count for phase, count in sites.items()},
            **{f"{phase}_rewritten": count for phase, count in rewritten.items()},
        },
    )  # fmt: skip


def program(place: Place, asked: Asked) -> None:
    rows = []
    for mode in MODES:
        model = make(place, asked.layers, torch.float32 if mode == "autocast" else torch.bfloat16)
        for tokens in asked.tokens:
            rows.append(run_case(place, model, mode, tokens, asked))
            if place.rank == 0 and not asked.quick:
                record.write(SUITE, asked.machine, rows, beside=True)
        del model
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu", help="folder of benchmarks/results that the figures go to")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="few rounds, and nothing is written")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        if torch.cuda.device_count() < 2:
            raise SystemExit(
                f"found {counted(torch.cuda.device_count(), 'CUDA device')}, the benchmark needs at least 2"
            )
        return gpu_ranks.start("benchmarks.training_step", torch.cuda.device_count(), sys.argv[1:])
    asked = Asked(args.machine, tuple(args.tokens), args.layers, args.quick)
    gpu_ranks.run_and_exit(lambda place: program(place, asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
