"""Whole mixture blocks of transformers on the GPUs of one host: weave beside Inductor.

    python -m benchmarks.moe_blocks_gpu --machine h200x4 [--profile h200x4] [--ranks 2] [--models ...] [--tokens ...]

Suite `moe_blocks`. Of one layer everything behind attention: RMSNorm, router, experts, their all-reduce, the residual's
addition and the next RMSNorm; unmodified modules of transformers, bf16, random weights, tensor parallel over all ranks
by the model's own plan, so that every rank has all tokens. Baselines are Inductor's graphs of both forms of experts:
`grouped_mm`, which models take in prefill, and `batched_mm`, which `generate` decodes with (left out where it would
copy more weights than fit). weave compiles the first. Each graph is captured in a CUDA graph that goes over several
inputs, so that experts of one call are not found in the L2 by the next; the captures take turns.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weaveopt
from benchmarks import gpu_ranks, record
from benchmarks.attention_layers_gpu import SHAPES, make
from benchmarks.gpu_ranks import Place
from benchmarks.llama_layers_gpu import INDUCTOR, WEAVE, Variants
from weaveopt.reporting.timeline import total

SUITE = "moe_blocks"
MODELS = ("mixtral-8x22b", "qwen3-30b-a3b")
TOKENS = (1, 8, 64, 512, 2048, 8192)
GROUPED, BATCHED = "grouped_mm", "batched_mm"
MOST_BATCHED_BYTES = 16e9
"""Of weights that `batched_mm` would copy."""
FEW_TOKENS = 512
"""Up to so many the captures go over more inputs."""
LARGEST_ERROR = 3e-2
"""Of the difference to eager, by the norm of both: a token whose router was near a tie may choose another expert."""


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
        """By `batched_mm`, for one token."""
        experts = self.mixture.experts
        weights = (experts.gate_up_proj, experts.down_proj)
        return int(sum(weight[0].numel() * weight.element_size() for weight in weights) * self.mixture.gate.top_k)


def variants(block: Block, form: str, profile: str | None, with_weave: bool) -> Variants:
    from torch._inductor.compile_fx import compile_fx

    from weaveopt.backend import weave

    options = {"machine": profile} if profile else {}
    torch._dynamo.reset()
    block.take(form)
    ways: dict[str, Callable[..., Callable[..., object]]] = {INDUCTOR: compile_fx}
    if with_weave:
        ways[WEAVE] = lambda gm, inputs: weave(gm, inputs, options=options)
    return Variants(block, ways)  # type: ignore[arg-type]


def row_of(place: Place, name: str, block: Block, tokens: int, profile: str | None) -> record.Row:
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

        graphs[title] = gpu_ranks.capture(over_all, pool)

    grouped = variants(block, GROUPED, profile, with_weave=True)
    captured(grouped.running(INDUCTOR), GROUPED)
    captured(grouped.running(WEAVE), WEAVE)
    report = weaveopt.report().graphs[-1]
    if tokens * block.copied_bytes <= MOST_BATCHED_BYTES:
        captured(variants(block, BATCHED, profile, with_weave=False).running(INDUCTOR), BATCHED)
    us = {title: value / number for title, value in gpu_ranks.replayed_us(graphs, 8, 2, place.device).items()}
    chosen = [" ".join(filter(None, (each.chosen.choice, each.chosen.variant))) for each in report.decisions]
    ours = us.pop(WEAVE)
    row = record.row(
        case={"model": name, "tokens": tokens, "ranks": place.world, "dtype": "bfloat16"},
        weave_us=ours, baselines=us, predicted_us=total(report, fused=True).us,
        parameters={"chosen": ", ".join(chosen)},
    )  # fmt: skip
    times = ", ".join(f"{title} {value:.1f}" for title, value in us.items())
    place.say(f"{name:14} {tokens:5} tokens: {ours:8.1f} us | {times} | {row.ratio:.2f}x | {'; '.join(chosen)}")
    return row


def program(place: Place, asked: argparse.Namespace) -> None:
    dist.all_reduce(torch.zeros(1, device=place.device))
    rows: list[record.Row] = []
    with torch.no_grad():
        for name in asked.models:
            decoder = make(place, SHAPES[name], 1)
            block = Block(decoder)
            for tokens in asked.tokens:
                rows.append(row_of(place, name, block, tokens, asked.profile))
                if place.rank == 0:
                    record.write(SUITE, asked.machine, rows, beside=True)
                gc.collect()
                torch.cuda.empty_cache()
            del block, decoder
            gc.collect()
            torch.cuda.empty_cache()


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu", help="folder of benchmarks/results that the figures go to")
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--profile", default=None, help="whose prices choose; default: the one that fits the GPUs")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    return parser.parse_args(arguments)


def main() -> int:
    asked = parsed(sys.argv[1:])
    if not dist.is_torchelastic_launched():
        return gpu_ranks.start(__spec__.name, asked.ranks or torch.cuda.device_count(), sys.argv[1:])
    gpu_ranks.run_and_exit(lambda place: program(place, asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
