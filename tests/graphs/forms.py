"""Hand-written blocks in the forms that model families have: GEMM, all-reduce, addition, norm, GEMM.

Every form is `form(weights, x, residual) -> outputs` on one rank; `x` differs by rank, everything else is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

HIDDEN, INNER = 64, 48


@dataclass(frozen=True)
class Weights:
    """Random parameters of one block; `norm` and `bias` in the dtype of the activations, `norm_32` in fp32."""

    product: Tensor
    second: Tensor
    after: Tensor
    norm: Tensor
    norm_2: Tensor
    norm_32: Tensor
    bias: Tensor
    scale: Tensor


def make_weights(dtype: torch.dtype, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    return Weights(
        product=random(INNER, HIDDEN),
        second=random(INNER, HIDDEN),
        after=random(HIDDEN, INNER),
        norm=random(HIDDEN) + 1,
        norm_2=random(HIDDEN) + 1,
        norm_32=(random(HIDDEN) + 1).float(),
        bias=random(HIDDEN),
        scale=torch.tensor(0.5, dtype=dtype),
    )


def all_reduce(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Llama: round, then weigh."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rms_fp32(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """OLMo 2, gpt-oss: weigh in fp32, then round."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * y).to(x.dtype)


def rms_plus_one(x: Tensor, weight: Tensor, eps: float = 3e-6) -> Tensor:
    """Gemma: (1 + w), in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).type_as(x)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (HIDDEN,), weight, bias, 1e-5)


def layer_cohere(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    mean = y.mean(-1, keepdim=True)
    variance = (y - mean).pow(2).mean(-1, keepdim=True)
    return (weight.float() * ((y - mean) * torch.rsqrt(variance + 1e-5))).to(x.dtype)


def pre_norm(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + all_reduce(x @ w.product)
    return rms(total, w.norm) @ w.after, total


def other_order(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = all_reduce(x @ w.product) + residual
    return rms_fp32(total, w.norm) @ w.after, total


def residual_dead(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return (rms(residual + all_reduce(x @ w.product), w.norm) @ w.after,)


def gemma_norm(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + all_reduce(x @ w.product)
    return rms_plus_one(total, w.norm) @ w.after, total


def fp32_weight(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + all_reduce(x @ w.product)
    return rms(total, w.norm_32) * 2, total


def library_norm(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + all_reduce(x @ w.product)
    return torch.nn.functional.rms_norm(total, (HIDDEN,), w.norm, 1e-4) @ w.after, total


def no_weight(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + all_reduce(x @ w.product)
    return torch.nn.functional.rms_norm(total, (HIDDEN,), None, 1e-4) @ w.after, total


def layer_norm(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + all_reduce(x @ w.product)
    return layer(total, w.norm, w.bias) @ w.after, total


def cohere(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + all_reduce(x @ w.product) + all_reduce(x.relu() @ w.second)
    return layer_cohere(total, w.norm) @ w.after, total


def mixture(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    experts = all_reduce((x @ w.product).reshape(-1, HIDDEN) * 2)
    shared = all_reduce(x @ w.second)
    total = residual + (experts.view(residual.shape) + shared)
    return rms(total, w.norm) @ w.after, total


def post_norm(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + rms_fp32(all_reduce(x @ w.product), w.norm)
    return total @ w.after, total


def gemma_sandwich(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + rms_plus_one(all_reduce(x @ w.product), w.norm)
    return rms_plus_one(total, w.norm_2) @ w.after, total


def embedding(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = all_reduce(residual * 0.5) * w.scale
    return rms(total, w.norm) @ w.after, total


def scaled(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + all_reduce(x @ w.product) * 0.22
    return rms(total, w.norm) @ w.after, total


def reduced_bias(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + (all_reduce(x @ w.product) + w.bias)
    return rms(total, w.norm) @ w.after, total


def parallel_biases(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """GPT-NeoX: attention and MLP side by side, each with a bias after its all-reduce."""
    attention = all_reduce(x @ w.product) + w.bias
    total = (all_reduce(x.relu() @ w.second) + w.norm) + attention + residual
    return layer(total, w.norm, w.bias) @ w.after, total


def two_residuals(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + (all_reduce(x @ w.product) + residual.relu())
    return rms(total, w.norm) @ w.after, total


def product_bias(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    flat = torch.addmm(w.bias, x.reshape(-1, INNER), w.product)
    total = residual + all_reduce(flat).view(residual.shape)
    return rms(total, w.norm) @ w.after, total


def scaled_product(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    flat = torch.addmm(w.bias, x.reshape(-1, INNER), w.product, beta=0.5, alpha=2.0)
    total = residual + all_reduce(flat).view(residual.shape)
    return rms(total, w.norm) @ w.after, total


def two_dimensions(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual.flatten(0, 1) + all_reduce(x.flatten(0, 1) @ w.product)
    return rms(total, w.norm) @ w.after, total


def no_residual(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = all_reduce(x @ w.product)
    return rms(total, w.norm) @ w.after, total


def norm_read_twice(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + all_reduce(x @ w.product)
    normed = rms(total, w.norm)
    return normed @ w.after, normed * 2, total


def chain(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Three sites in a row; the residual between them is read by nothing else."""
    total = residual
    hidden = x
    for weight in (w.norm, w.norm_2, w.norm):
        total = total + all_reduce(hidden @ w.product)
        hidden = rms(total, weight) @ w.after
    return (hidden,)


def sum_alone(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """The last row-parallel layer of a head, or any all-reduce of a backward pass."""
    return (all_reduce(x @ w.product),)


def layer_end(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """The end of a layer that is compiled by itself: the next norm is in another graph."""
    return (residual + all_reduce(x @ w.product),)


def read_by_several(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    reduced = all_reduce(x @ w.product)
    return rms(residual + reduced, w.norm), reduced * 2


def other_work(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return ((residual + all_reduce(x @ w.product)).relu(),)


def residual_in_fp32(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Block under autocast: partial results in two bytes, with a residual and a norm in fp32."""
    total = residual.float() + all_reduce((x @ w.product).bfloat16())
    return rms(total, w.norm.float()).bfloat16().to(x.dtype) @ w.after, total


def heads_normed(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    heads = all_reduce(x @ w.product).unflatten(-1, (4, 16))
    return (rms(heads, w.norm[:16]),)


def normed_in_double(w: Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return (rms(residual + all_reduce(x @ w.product), w.norm.double()),)


FORMS: tuple[Callable[[Weights, Tensor, Tensor], tuple[Tensor, ...]], ...] = (
    pre_norm,
    other_order,
    residual_dead,
    gemma_norm,
    fp32_weight,
    library_norm,
    no_weight,
    layer_norm,
    cohere,
    mixture,
    post_norm,
    gemma_sandwich,
    embedding,
    scaled,
    reduced_bias,
    parallel_biases,
    two_residuals,
    product_bias,
    scaled_product,
    two_dimensions,
    no_residual,
    norm_read_twice,
    chain,
    sum_alone,
    layer_end,
    read_by_several,
    other_work,
    residual_in_fp32,
    heads_normed,
    normed_in_double,
)
