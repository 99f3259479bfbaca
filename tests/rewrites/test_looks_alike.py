"""Computations that resemble a form that a rewrite knows, and are another one: they give what eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.graphs import forms
from tests.graphs.executing import FORCED, executing_alone
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.ranks.simulated import equal_ranks
from weaveopt.records.report import GraphReport

WORLD = 2
E4M3 = torch.float8_e4m3fn
Form = Callable[[forms.Weights, Tensor, Tensor], Tensor]


def _total(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    return residual + forms.all_reduce(x @ w.product)


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def _eps_twice(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    total = _total(w, x, residual)
    return total * torch.rsqrt(torch.add(total.pow(2).mean(-1, keepdim=True), 1.0, alpha=2)) * w.norm


def _varies_otherwise(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    total = _total(w, x, residual)
    by_token = total - total.mean(1, keepdim=True)
    return (total - total.mean(-1, keepdim=True)) * torch.rsqrt(by_token.pow(2).mean(-1, keepdim=True) + 1) * w.norm


def _mean_of_tokens(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    total = _total(w, x, residual)
    variance, _ = torch.var_mean(total, -1, correction=0, keepdim=True)
    return (total - total.mean(1, keepdim=True)) * torch.rsqrt(variance + 1) * w.norm


def _weight_turned(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    return _rms(_total(w, x, residual)) * w.norm.view(8, 8).t().reshape(-1)


def _sum_of_fewer_rows(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    total = forms.all_reduce(x @ w.product) + forms.all_reduce(x[:1].relu() @ w.second)
    return _rms(residual + total) * w.norm


def _whole_weight(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    return _rms(_total(w, x, residual)) * (w.norm * 3).to(torch.int32).to(torch.float32)


def _weight_switched(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    return _rms(_total(w, x, residual)) * w.bias.clamp_min(0).bool().to(torch.float32)


def _weight_of_8_bits(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    return _rms(_total(w, x, residual)) * w.norm.to(E4M3).to(torch.float32)


def _whole_offset(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    return _rms(_total(w, x, residual)) * (1.5 + (w.norm * 3).int().float())


def _whole_sum(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    return _rms(_total(w, x, residual)) * (1 + (w.norm * 3).int()).float()


def _whole_bias(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    return _rms(_total(w, x, residual)) * w.norm + (w.bias * 3).to(torch.int32).float()


def _number_added_by_the_product(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    partial = torch.addmm(w.norm.sum(), x.view(-1, x.shape[-1]), w.product).view(residual.shape)
    return _rms(residual + forms.all_reduce(partial)) * w.norm


def _column_added_by_the_product(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    partial = torch.addmm(x.view(-1, x.shape[-1])[:, :1], x.view(-1, x.shape[-1]), w.product).view(residual.shape)
    return _rms(residual + forms.all_reduce(partial)) * w.norm


def _scores_scaled_by_the_mask(w: forms.Weights, x: Tensor, residual: Tensor) -> Tensor:
    heads = residual.view(*residual.shape[:2], 2, -1).transpose(1, 2)
    later = torch.full((1, 1, residual.shape[1], residual.shape[1]), -1e9).triu(1)
    weights = torch.softmax(torch.add(later, heads @ heads.transpose(-1, -2), alpha=0.01), -1)
    return (weights @ heads).transpose(1, 2).reshape(residual.shape)


@pytest.mark.parametrize(
    "form",
    [
        _eps_twice, _varies_otherwise, _mean_of_tokens, _weight_turned, _sum_of_fewer_rows, _whole_weight,
        _weight_switched, _weight_of_8_bits, _whole_offset, _whole_sum, _whole_bias, _number_added_by_the_product,
        _column_added_by_the_product, _scores_scaled_by_the_mask,
    ],
)  # fmt: skip
def test_it_computes_as_eager(form: Form) -> None:
    reports: list[GraphReport] = []
    w = forms.make_weights(torch.float32)
    x = torch.randn(2, 7, forms.INNER, generator=torch.Generator().manual_seed(1))
    residual = torch.randn(2, 7, forms.HIDDEN, generator=torch.Generator().manual_seed(2))
    torch._dynamo.reset()
    with torch.no_grad(), equal_ranks(WORLD):
        compiled = torch.compile(lambda a, b: form(w, a, b), backend=executing_alone(FORCED, reports, WORLD))
        found, wanted = compiled(x, residual), form(w, x, residual)
    assert len(reports) == 1 and reports[0].fallbacks == ()
    assert_close(found, wanted, LIBRARY, form.__name__)
