"""A training step of a tensor-parallel Llama on the GPUs of one host: weave against Inductor, forward and backward.

Llama-3-8B's shape, random weights, transformers' own plan; a step is the loss and its gradients, without an optimizer
and without CUDA graphs. `bfloat16` has everything in bf16; `autocast` has weights, residual and norms in fp32 and GEMMs
in bf16, the usual way to train. Rows hold how far each backend's gradients are from eager's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import weaveopt
from benchmarks import record
from benchmarks.ranks import Place, slowest
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.timing import Effort, enqueued_us

MODES = ("bfloat16", "autocast")
TOKENS = Setting("tokens", (512, 2048, 4096), quick=(512,))
MODE = Setting("modes", MODES, quick=MODES[:1], among=MODES)
LAYERS = Setting("layers", 4, quick=1)
INDUCTOR, WEAVE = "inductor", "weave"
WARM_STEPS, ROUNDS, STEPS = 3, 4, 5


@dataclass(frozen=True)
class Case:
    mode: str
    tokens: int


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
    return slowest([max(errors)])[0]


def run_case(place: Place, model: PreTrainedModel, mode: str, tokens: int) -> record.Row:
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
    us = enqueued_us(place, steps, Effort(ROUNDS, STEPS))
    found = weaveopt.report().graphs[num_before:]
    sites = {phase: sum(len(g.decisions) for g in found if g.phase == phase) for phase in ("forward", "backward")}
    rewritten = {phase: sum(g.num_rewritten for g in found if g.phase == phase) for phase in sites}
    assert errors[WEAVE] <= 2 * errors[INDUCTOR] + 1e-3, f"{mode}, {tokens} tokens: {errors}"
    return record.row(
        case={
            "mode": mode, "tokens": tokens, "ranks": place.world, "layers": model.config.num_hidden_layers,
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


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for mode in dict.fromkeys(case.mode for case in cases):
        model = make(place, asked.of(LAYERS), torch.float32 if mode == "autocast" else torch.bfloat16)
        for case in (case for case in cases if case.mode == mode):
            yield run_case(place, model, mode, case.tokens)
        del model
        torch.cuda.empty_cache()


SUITES = (
    Suite(
        "training_step", "loss and gradients of a tensor-parallel Llama", Needs(GPU, 2),
        lambda asked: product(Case, asked.of(MODE), asked.of(TOKENS)), rows, ours=(WEAVE,), baselines=(INDUCTOR,),
        settings=(MODE, TOKENS, LAYERS), trains=True,
    ),
)  # fmt: skip
