"""Random programs of tensor-parallel layers: what hand-written models do around an all-reduce, in any order.

The same seed makes the same program on every rank; shards of weights are a rank's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.graphs import forms
from tests.graphs.functional_collectives import all_gather_single, reduce_scatter_single
from weaveopt.rewrites import RULES

HIDDEN, HEADS = 64, 4
SHAPES = ((1, 1), (1, 5), (2, 3), (1, 16), (3, 7), (4, 8))
"""Batches and lengths."""
NORMS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    forms.rms, forms.rms_fp32, forms.rms_plus_one,
    lambda x, w: F.rms_norm(x, (HIDDEN,), w, 1e-5),
    lambda x, w: F.rms_norm(x, (HIDDEN,), None, 1e-5),
    lambda x, w: F.layer_norm(x, (HIDDEN,), w),
    lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w,
)  # fmt: skip


@dataclass
class State:
    """Values that a program carries from step to step."""

    hidden: Tensor
    """[batch, length, HIDDEN], normalized."""
    residual: Tensor
    norm: Callable[[Tensor, Tensor], Tensor]
    first_rank: bool
    results: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Weights:
    """A step's weights: [HIDDEN, HIDDEN], [2 * HIDDEN, HIDDEN], and two [HIDDEN] that are equal on all ranks."""

    shard: Tensor
    wide: Tensor
    norm: Tensor
    bias: Tensor

    @staticmethod
    def make(shared: torch.Generator, own: torch.Generator) -> Weights:
        wide = torch.randn(2 * HIDDEN, HIDDEN, generator=own) * HIDDEN**-0.5
        bias = torch.randn(HIDDEN, generator=shared) * 0.1
        return Weights(wide[:HIDDEN].clone(), wide, torch.randn(HIDDEN, generator=shared) * 0.1 + 1.0, bias)


def _added(state: State, w: Weights, change: Tensor) -> None:
    state.residual = state.residual + change
    state.hidden = state.norm(state.residual, w.norm)


def plain(s: State, w: Weights) -> None:
    _added(s, w, forms.all_reduce(F.linear(s.hidden, w.shard)))


def bias_of_the_first_rank(s: State, w: Weights) -> None:
    _added(s, w, forms.all_reduce(F.linear(s.hidden, w.shard, w.bias if s.first_rank else None)))


def bias_after_the_sum(s: State, w: Weights) -> None:
    _added(s, w, forms.all_reduce(F.linear(s.hidden, w.shard)) + w.bias)


def scaled(s: State, w: Weights) -> None:
    s.residual = s.residual * 1.1 + forms.all_reduce(F.linear(s.hidden, w.shard)) * 0.7
    s.hidden = s.norm(s.residual, w.norm)


def norm_after_the_sum(s: State, w: Weights) -> None:
    _added(s, w, s.norm(forms.all_reduce(F.linear(s.hidden, w.shard)), w.norm))


def gated(s: State, w: Weights) -> None:
    gate, up = F.linear(s.hidden, w.wide).chunk(2, -1)
    _added(s, w, forms.all_reduce(F.linear(F.silu(gate) * up, w.shard)))


def attention(s: State, w: Weights) -> None:
    heads = F.linear(s.hidden, w.shard).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    found = F.scaled_dot_product_attention(heads, heads * 0.9, heads + 0.1, is_causal=True)
    _added(s, w, forms.all_reduce(F.linear(found.transpose(1, 2).flatten(-2), w.shard)))


def two_sums(s: State, w: Weights) -> None:
    product = F.linear(s.hidden, w.shard)
    _added(s, w, forms.all_reduce(product) + forms.all_reduce(product.relu()))


def sum_is_a_result(s: State, w: Weights) -> None:
    total = forms.all_reduce(F.linear(s.hidden, w.shard))
    s.results.append(total)
    _added(s, w, total)


def part_is_a_result(s: State, w: Weights) -> None:
    plain(s, w)
    s.results.append(s.residual[..., :3])


def in_place(s: State, w: Weights) -> None:
    total = forms.all_reduce(F.linear(s.hidden, w.shard)).clone()
    s.residual = total.add_(s.residual)
    s.hidden = s.norm(s.residual, w.norm)


def residual_is_read_again(s: State, w: Weights) -> None:
    before = s.residual
    plain(s, w)
    s.hidden = s.hidden + before


def without_gemm(s: State, w: Weights) -> None:
    s.hidden = forms.all_reduce(s.hidden) * 0.5


def through_rows(s: State, w: Weights) -> None:
    rows = all_gather_single(s.hidden.flatten(0, 1), 0, dist.group.WORLD)
    shard = reduce_scatter_single(F.linear(rows, w.shard), "sum", 0, dist.group.WORLD)
    _added(s, w, shard.view_as(s.residual))


STEPS = (
    plain, plain, plain, bias_of_the_first_rank, bias_after_the_sum, scaled, norm_after_the_sum, gated, attention,
    two_sums, sum_is_a_result, part_is_a_result, in_place, residual_is_read_again, without_gemm, through_rows,
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A random program, its input, and the rules that are forced on it."""

    seed: int
    run: Callable[[Tensor], tuple[Tensor, ...]]
    shapes: tuple[tuple[int, int], ...]
    """Batch and length of each call; more than one for a program of symbolic sizes."""
    force: tuple[str, ...]
    text: str

    @staticmethod
    def of(seed: int, rank: int) -> Program:
        draw = random.Random(seed)
        steps = [draw.choice(STEPS) for _ in range(draw.randint(2, 6))]
        norm = draw.choice(NORMS)
        batch, length = draw.choice(SHAPES)
        lengths = (length, length + 3, length + 8) if draw.random() < 0.3 else (length,)
        force = tuple(name for name in RULES.names if draw.random() < 0.6) if draw.random() < 0.7 else ()
        shared, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed * 31 + rank)
        weights = [Weights.make(shared, own) for _ in steps]

        def run(x: Tensor) -> tuple[Tensor, ...]:
            state = State(norm(x, weights[0].norm), x, norm, rank == 0)
            for step, each in zip(steps, weights, strict=True):
                step(state, each)
            return (state.hidden, state.residual, *state.results)

        names = " ".join(step.__name__ for step in steps)
        text = f"seed {seed}: {names}, norm {NORMS.index(norm)}, {batch} x {lengths}, force {force}"
        return Program(seed, run, tuple((batch, each) for each in lengths), force, text)

    def inputs(self) -> list[Tensor]:
        """Equal on all ranks."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(*shape, HIDDEN, generator=generator) for shape in self.shapes]
