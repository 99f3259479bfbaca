"""Whole mixture blocks of transformers on the GPUs of one host: weave against Inductor.

A block is what follows attention in a layer: RMSNorm, router, experts, their all-reduce, the residual's addition and
the next RMSNorm; unmodified modules of transformers, bf16, random weights, tensor parallel over all ranks by the
model's own plan, so that every rank has all tokens. Baselines are Inductor's graphs of both forms of experts:
`grouped_mm`, which models take in prefill, and `batched_mm`, which `generate` decodes with (left out where it would
copy more weights than fit). weave compiles the first. A step goes over several inputs, so that experts of one call are
not found in the L2 by the next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import weaveopt
from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.timing import Effort, capture, graphs_us
from benchmarks.workloads.decoder import INDUCTOR, SHAPES, WEAVE, Variants, make
from weaveopt.reporting.timeline import total

NAMES = ("mixtral-8x22b", "qwen3-30b-a3b")
MODELS = Setting("models", NAMES, quick=NAMES[1:], among=NAMES)
TOKENS = Setting("tokens", (1, 8, 64, 512, 2048, 8192), quick=(8,))
PROFILE = Setting("profile", "", "machine profile for weave (default: the one that fits the GPUs)")
GROUPED, BATCHED = "grouped_mm", "batched_mm"
MOST_BATCHED_BYTES = 16e9
"""Most weights that `batched_mm` may copy."""
FEW_TOKENS = 512
"""Up to so many the captures go over more inputs."""
LARGEST_ERROR = 3e-2
"""Largest norm of the difference to eager over eager's: a token near a tie of its router may go to another expert."""


@dataclass(frozen=True)
class Case:
    model: str
    tokens: int


class Block(nn.Module):
    """The modules of a decoder's first layer behind its attention, and the norm behind the layer."""

    norm: nn.Module
    mixture: Any
    next_norm: Any

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        layer = decoder.layers[0]
        self.norm, self.mixture, self.next_norm = layer.post_attention_layernorm, layer.mlp, decoder.norm

    def forward(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + self.mixture(self.norm(residual))
        return residual, self.next_norm(residual)

    def take(self, form: str) -> None:
        self.mixture.experts.config._experts_implementation = form

    @property
    def copied_bytes(self) -> int:
        """Bytes that `batched_mm` copies for one token."""
        experts = self.mixture.experts
        weights = (experts.gate_up_proj, experts.down_proj)
        return int(sum(weight[0].numel() * weight.element_size() for weight in weights) * self.mixture.gate.top_k)


def variants(block: Block, form: str, profile: str, with_weave: bool) -> Variants:
    from torch._inductor.compile_fx import compile_fx

    from weaveopt.backend import weave

    options = {"machine": profile} if profile else {}
    torch._dynamo.reset()
    block.take(form)
    ways: dict[str, Callable[..., Callable[..., object]]] = {INDUCTOR: compile_fx}
    if with_weave:
        ways[WEAVE] = lambda gm, inputs: weave(gm, inputs, options=options)
    return Variants(block, ways)  # type: ignore[arg-type]


def row_of(place: Place, name: str, block: Block, tokens: int, profile: str) -> record.Row:
    made = torch.Generator(place.device).manual_seed(tokens)
    hidden = block.next_norm.weight.shape[0]
    number = 8 if tokens <= FEW_TOKENS else 2
    inputs = torch.randn(number, 1, tokens, hidden, generator=made, device=place.device).to(torch.bfloat16)
    block.take(GROUPED)
    eager = block(inputs[0])
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def captured(run: Callable[..., Any], title: str) -> None:
        got = run(inputs[0])  # compiles
        for mine, theirs in zip(got, eager, strict=True):
            error = ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item()
            assert error < LARGEST_ERROR, f"{name}, {tokens} tokens: {title} is {error:.3f} from eager"

        def over_all() -> None:
            for each in inputs:
                run(each)

        graphs[title] = capture(over_all, pool)  # at once: the next compilation resets Dynamo

    grouped = variants(block, GROUPED, profile, with_weave=True)
    captured(grouped.running(INDUCTOR), GROUPED)
    captured(grouped.running(WEAVE), WEAVE)
    report = weaveopt.report().graphs[-1]
    if tokens * block.copied_bytes <= MOST_BATCHED_BYTES:
        captured(variants(block, BATCHED, profile, with_weave=False).running(INDUCTOR), BATCHED)
    us = graphs_us(place, graphs, Effort(8, 2), number)
    chosen = [" ".join(filter(None, (each.chosen.choice, each.chosen.variant))) for each in report.decisions]
    ours = us.pop(WEAVE)
    return record.row(
        case={"model": name, "tokens": tokens, "ranks": place.world, "dtype": "bfloat16"},
        weave_us=ours, baselines=us, predicted_us=total(report, fused=True).us,
        parameters={"chosen": ", ".join(chosen)},
    )  # fmt: skip


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for name in dict.fromkeys(case.model for case in cases):
        decoder = make(place, SHAPES[name], 1)
        block = Block(decoder)
        for case in (case for case in cases if case.model == name):
            yield row_of(place, name, block, case.tokens, asked.of(PROFILE))
            gc.collect()
            torch.cuda.empty_cache()
        del block, decoder
        gc.collect()
        torch.cuda.empty_cache()


SUITES = (
    Suite(
        "moe_blocks", "whole mixture blocks of transformers, tensor parallel", Needs(GPU, 2),
        lambda asked: product(Case, asked.of(MODELS), asked.of(TOKENS)), rows, ours=(WEAVE,),
        baselines=(GROUPED, BATCHED), predicted="the report's whole graph", settings=(MODELS, TOKENS, PROFILE),
    ),
)  # fmt: skip
