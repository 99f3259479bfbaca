"""Attention whose views, heads, statistics or sinks are arranged otherwise than in the forms that are rewritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graphs.capturing import captured, context_of
from tests.graphs.executing import FORCED, executing_alone
from tests.graphs.tolerances import LIBRARY, assert_close
from weaveopt.records.report import GraphReport
from weaveopt.sites.attention.matcher import AttentionMatcher

BATCH, HEADS, ROWS, DIM = 3, 4, 11, 16
Form = Callable[[Tensor], Tensor]


def _heads(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.view(x.shape[0], ROWS, heads, -1).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], ROWS, -1)


def _hidden() -> Tensor:
    return torch.where(torch.ones(ROWS, ROWS, dtype=torch.bool).tril(), 0.0, -1e9)


def _weights(scores: Tensor) -> Tensor:
    return torch.softmax(scores * 0.25 + _hidden(), -1)


def _by_product(x: Tensor, value: Callable[[Tensor], Tensor], out: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention of which a batched GEMM [batch * heads, rows, dim] multiplies `value`; `out` is the view of it."""
    flat = _heads(x).reshape(BATCH * HEADS, ROWS, DIM)
    scores = torch.bmm(flat, _heads(x.flip(2)).transpose(2, 3).reshape(BATCH * HEADS, DIM, ROWS))
    weights = _weights(scores.view(BATCH, HEADS, ROWS, ROWS)).view(BATCH * HEADS, ROWS, ROWS)
    return out(torch.bmm(weights, value(x)))


def _heads_of_half(x: Tensor) -> Tensor:
    return _by_product(
        x,
        lambda value: _heads(value).reshape(BATCH * HEADS, ROWS, DIM),
        lambda out: out.view(BATCH, 2, 2 * ROWS, DIM).transpose(1, 2).reshape(BATCH, ROWS, HEADS * DIM),
    )


def _heads_by_sequence(x: Tensor) -> Tensor:
    return _by_product(
        x,
        lambda value: _heads(value).reshape(BATCH * HEADS, ROWS, DIM),
        lambda out: out.view(HEADS, BATCH, ROWS, DIM).permute(1, 2, 0, 3).reshape(BATCH, ROWS, HEADS * DIM),
    )


def _values_of_rows(x: Tensor) -> Tensor:
    return _by_product(
        x,
        lambda value: value.view(BATCH, ROWS, HEADS, DIM).view(BATCH * HEADS, ROWS, DIM),
        lambda out: _rows(out.view(BATCH, HEADS, ROWS, DIM)),
    )


def _scores_for_all_heads(x: Tensor) -> Tensor:
    one, other = x[..., None, :DIM].transpose(1, 2), x[..., None, -DIM:].transpose(1, 2)
    return _rows(_weights(one @ other.transpose(2, 3)).expand(BATCH, HEADS, ROWS, ROWS) @ _heads(x))


def _groups_of_values_differ(x: Tensor) -> Tensor:
    key = _heads(x[..., : 2 * DIM], 2)[:, :, None].expand(BATCH, 2, 2, ROWS, DIM).reshape(BATCH, HEADS, ROWS, DIM)
    value = _heads(x[..., :DIM], 1)[:, :, None].expand(BATCH, 1, HEADS, ROWS, DIM).reshape(BATCH, HEADS, ROWS, DIM)
    return _rows(F.scaled_dot_product_attention(_heads(x), key, value, is_causal=True))


def _all_heads_in_turn(x: Tensor) -> Tensor:
    few = _heads(x[..., : 2 * DIM], 2)
    turned = few[:, :, None].reshape(BATCH, 1, 2, ROWS, DIM).expand(BATCH, 2, 2, ROWS, DIM)
    many = turned.reshape(BATCH, HEADS, ROWS, DIM)
    return _rows(F.scaled_dot_product_attention(_heads(x), many, many, is_causal=True))


def _sums_of_other_rows(x: Tensor) -> Tensor:
    one = x[:1, None, :, :DIM]
    scores = one @ one.transpose(2, 3) * 0.25 + _hidden()
    exp = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (exp / exp.sum(-1)) @ one


@pytest.mark.parametrize(
    "form",
    [
        _heads_of_half, _heads_by_sequence, _values_of_rows, _scores_for_all_heads, _groups_of_values_differ,
        _all_heads_in_turn, _sums_of_other_rows,
    ],
)  # fmt: skip
def test_it_computes_as_eager(form: Form) -> None:
    reports: list[GraphReport] = []
    x = torch.randn(BATCH, ROWS, HEADS * DIM, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(form, backend=executing_alone(FORCED, reports, 1))(x)
    assert len(reports) == 1 and reports[0].fallbacks == ()
    assert_close(found, form(x), LIBRARY, form.__name__)


def _with_sinks(x: Tensor, sinks: Tensor, least: Callable[[Tensor], Tensor]) -> Tensor:
    scores = _heads(x) @ _heads(x).transpose(2, 3) * 0.25 + _hidden()
    logits = torch.cat([scores, sinks], -1)
    return torch.softmax(logits - least(logits), -1)[..., :ROWS] @ _heads(x)


def _largest(logits: Tensor) -> Tensor:
    return logits.max(-1, keepdim=True).values


SINKS = torch.linspace(-1, 1, HEADS * 3)
BY_HEAD = SINKS[:HEADS].reshape(1, -1, 1, 1).expand(BATCH, -1, ROWS, -1)


@pytest.mark.parametrize(
    ("sinks", "least", "is_known"),
    [
        (lambda: SINKS[:HEADS].reshape(1, -1, 1, 1).expand(BATCH, -1, ROWS, -1), _largest, True),
        (lambda: SINKS[:BATCH].reshape(-1, 1, 1, 1).expand(-1, HEADS, ROWS, -1), _largest, False),
        (lambda: SINKS[:ROWS].reshape(1, 1, -1, 1).expand(BATCH, HEADS, -1, -1), _largest, False),
        (lambda: (SINKS[:HEADS] * 4).int().float().reshape(1, -1, 1, 1).expand(BATCH, -1, ROWS, -1), _largest, True),
        (lambda: SINKS[: 2 * HEADS].reshape(1, HEADS, 1, 2).expand(BATCH, -1, ROWS, -1), _largest, False),
        (lambda: BY_HEAD, lambda logits: logits.amax(1, keepdim=True), False),
    ],
    ids=["head", "sequence", "query", "whole", "two", "largest-of-heads"],
)
def test_sinks_are_one_a_head(sinks: Callable[[], Tensor], least: Callable[[Tensor], Tensor], is_known: bool) -> None:
    x = torch.randn(BATCH, ROWS, HEADS * DIM)
    with torch.no_grad():
        (graph,) = captured(lambda x: _with_sinks(x, sinks(), least), x)
    found = AttentionMatcher().find(graph.graph, context_of(graph.groups, 1))
    assert [each.facts.has_sinks for each in found if each.facts is not None] == ([True] if is_known else [])
