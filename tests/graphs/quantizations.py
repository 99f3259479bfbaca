"""Quantizations of normed rows to e4m3, as models with FP8 linears write them, and some that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.graphs import forms
from weaveopt.records.norm import Quant

E4M3 = torch.float8_e4m3fn
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Normed rows [..., hidden] -> quantized rows [tokens, hidden] and what `_scaled_mm` takes as their scale."""
Form = Callable[[forms.Weights, Tensor, Tensor], tuple[Tensor, ...]]
STORED = torch.tensor(0.0237)
STORED_2 = torch.tensor(0.05)
STORED_11 = torch.full((1, 1), 0.0237)


def saturated(x: Tensor, largest: float = 448.0) -> Tensor:
    return x.clamp(-largest, largest).to(E4M3)


def torchao_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """torchao's `Float8Tensor.from_hp` and `preprocess_scale`, by row: amax and scale in the rows' dtype, no bound."""
    scale = x.view(x.shape).abs().amax(dim=[x.ndim - 1], keepdim=True) / torch.finfo(E4M3).max
    scale = scale.reshape(*x.shape[:-1], 1).to(torch.float32)
    rows = saturated(x.to(torch.float32) / scale)
    return rows.reshape(-1, x.shape[-1]), scale.unsqueeze(-1).reshape(-1, 1)


def inverse(x: Tensor) -> tuple[Tensor, Tensor]:
    """The flat rows times 448 / amax; the GEMM gets the inverse of that."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    factor = 448.0 / flat.abs().max(dim=-1, keepdim=True).values.float().clamp(min=1e-12)
    return saturated(flat * factor), factor.reciprocal()


def no_keepdim(x: Tensor) -> tuple[Tensor, Tensor]:
    """fbgemm's `quantize_fp8_per_row` in plain torch: scales [tokens], made [tokens, 1] where they are read."""
    flat = x.view(-1, x.shape[-1])
    scale = flat.float().abs().amax(-1).clamp(min=1e-10) * (1.0 / 448.0)
    return saturated(flat.float() * (1.0 / scale.unsqueeze(-1))), scale.unsqueeze(-1)


def bounded_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(-1, keepdim=True).float() / 448.0).clamp_min(1e-8)
    return saturated(x.float() / scale).view(-1, x.shape[-1]), scale.view(-1, 1).contiguous()


def read_in_another_form(x: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse is used here and elsewhere: it is computed from the op's scale."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(1e-12) / 448.0
    factor = scale.reciprocal()
    return saturated(x.float() * factor).view(-1, x.shape[-1]), (factor * 2.0).square().view(-1, 1)


def stored(x: Tensor) -> tuple[Tensor, Tensor]:
    return saturated(x.float() / STORED).view(-1, x.shape[-1]), STORED


def stored_inverse(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 checkpoints of vLLM's and transformers' kind: times the inverse of the stored scale."""
    return saturated(x.view(-1, x.shape[-1]).float() * STORED_11.reciprocal()), STORED_11


def stored_factor(x: Tensor) -> tuple[Tensor, Tensor]:
    return saturated(x.view(-1, x.shape[-1]) * STORED_11), STORED_11.reciprocal()


def stored_narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """A quotient in 16 bits."""
    return saturated((x / STORED).view(-1, x.shape[-1])), STORED


@dataclass(frozen=True)
class Case:
    quantize: Quantize
    quant: Quant
    narrow: bool = False
    """The model rounds the scale or the quotient to 16 bits; the op does not."""
    bound: str = ""
    """Text of the report on the lower bound."""


CASES = (
    Case(torchao_rows, Quant.PER_TOKEN, narrow=True, bound="not bounded"),
    Case(inverse, Quant.PER_TOKEN),
    Case(no_keepdim, Quant.PER_TOKEN, bound="1e-10"),
    Case(read_in_another_form, Quant.PER_TOKEN),
    Case(bounded_scale, Quant.PER_TOKEN, bound="4.48e-06"),
    Case(stored, Quant.STATIC),
    Case(stored_inverse, Quant.STATIC),
    Case(stored_factor, Quant.STATIC),
    Case(stored_narrow, Quant.STATIC, narrow=True),
)


WEIGHTS = {
    out: torch.randn(forms.HIDDEN, out, generator=torch.Generator().manual_seed(out)).t().to(E4M3).t()
    for out in (48, 32, 16)
}
ONES = {out: torch.ones(1, out) for out in WEIGHTS}
ONE = torch.ones(())


def linear(rows: Tensor, scale: Tensor, out: int = forms.INNER) -> Tensor:
    """The FP8 GEMM that reads quantized rows."""
    b_scale = ONES[out] if scale.numel() > 1 else ONE
    return torch._scaled_mm(rows, WEIGHTS[out], scale_a=scale, scale_b=b_scale, out_dtype=torch.bfloat16)


def block(quantize: Quantize, norm: Callable[[Tensor, Tensor], Tensor] = forms.rms) -> Form:
    def form(w: forms.Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = residual + forms.all_reduce(x @ w.product)
        return linear(*quantize(norm(total, w.norm))), total

    return form


def chain(quantize: Quantize) -> Form:
    """Three layers; the residual between them is read by nothing else."""

    def form(w: forms.Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total, hidden = residual, x
        for weight in (w.norm, w.norm_2, w.norm):
            total = total + forms.all_reduce(hidden @ w.product)
            hidden = linear(*quantize(forms.rms(total, weight))).view(*x.shape[:-1], forms.INNER)
        return (hidden,)

    return form


def extra_reader(w: forms.Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """A router in 16 bits that reads the rows too, with FP8 experts."""
    total = residual + forms.all_reduce(x @ w.product)
    normed = forms.rms(total, w.norm)
    return linear(*torchao_rows(normed)), normed @ w.after, total


def wrong_saturation(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(-1, keepdim=True).float() / 448.0).clamp_min(1e-8)
    return saturated(x.float() / scale, 240.0).view(-1, x.shape[-1]), scale.view(-1, 1)


def no_saturation(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x.float() / STORED).to(E4M3).view(-1, x.shape[-1]), STORED


def wrong_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / 240.0
    return saturated(x.float() / scale).view(-1, x.shape[-1]), scale.view(-1, 1)


def large_bound(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(-1, keepdim=True).float() / 448.0).clamp_min(1.0 / (448.0 * 512.0))
    return saturated(x.float() / scale).view(-1, x.shape[-1]), scale.view(-1, 1)


def upper_bound(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(1e-12, 3.0) / 448.0
    return saturated(x.float() / scale).view(-1, x.shape[-1]), scale.view(-1, 1)


def whole_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale that the rows themselves decide."""
    scale = x.abs().amax().float() / 448.0
    return saturated(x.float() / scale).view(-1, x.shape[-1]), scale


def by_column(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(0, keepdim=True).float() / 448.0
    return saturated(x.float() / scale).view(-1, x.shape[-1]), STORED


def other_format(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x.float() / STORED).clamp(-448, 448).to(torch.float8_e5m2).view(-1, x.shape[-1]), STORED


def stored_by_channel(x: Tensor) -> tuple[Tensor, Tensor]:
    return saturated(x.float() / torch.full((forms.HIDDEN,), 0.03)).view(-1, x.shape[-1]), STORED


def two_scales(w: forms.Weights, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = residual + forms.all_reduce(x @ w.product)
    normed = forms.rms(total, w.norm)
    second = saturated(normed.float() / STORED_2).view(-1, forms.HIDDEN)
    return linear(*stored(normed)), linear(second, STORED_2), total


LEFT: tuple[tuple[Form, str], ...] = (
    (extra_reader, "aten.mm.default"),
    (block(wrong_saturation), "aten.clamp_min.default"),
    (block(no_saturation), "prims.convert_element_type.default"),
    (block(wrong_scale), "aten.div.Tensor"),
    (block(large_bound), "least 0.001953125, largest_allowed 0.0001"),
    (block(upper_bound), "aten.clamp_max.default"),
    (block(whole_tensor), "aten.amax.default"),
    (block(by_column), "aten.amax.default"),
    (block(other_format), "prims.convert_element_type.default"),
    (block(stored_by_channel), "aten.div.Tensor"),
    (two_scales, "num_scales 2"),
)
