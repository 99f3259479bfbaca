"""Experts that resemble those that are rewritten, and compute something else: each is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers grouped_mm_fallback)
from torch import Tensor

from tests.graphs.capturing import captured, context_of
from weaveopt.records.candidate import Rejection
from weaveopt.sites.mixture.matcher import MixtureMatcher

EXPERTS, HIDDEN, WIDTH, TOKENS, CHOICES = 4, 32, 24, 6, 2
Change = Callable[[Tensor], Tensor]


def _same(value: Tensor) -> Tensor:
    return value


def _rejections(
    act: Change = F.silu,
    cut: Change = _same,
    cut_for_bias: Change = _same,
    masks: bool = False,
    factors: Change | None = None,
    tokens: int = TOKENS,
    rows_of: Change = lambda x: x[:, None].expand(-1, CHOICES, -1).reshape(-1, HIDDEN),
) -> tuple[Rejection, ...]:
    """Why experts are not known, with ids that are changed by `cut`, and by `cut_for_bias` where they have biases."""
    up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
    bias = torch.randn(EXPERTS, 2 * WIDTH)

    def experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids = chosen.reshape(-1)
        here = cut(ids)
        rows = rows_of(x)
        z = torch.bmm(up[here], rows[..., None]).squeeze(-1)
        if cut_for_bias is not _same:
            z = z + bias[cut_for_bias(ids)]
        gate, wide = z.chunk(2, -1)
        y = torch.bmm(down[here], (act(gate) * wide)[..., None]).squeeze(-1)
        if factors is not None:
            return (y.view(tokens, CHOICES, HIDDEN) * factors(weights)).sum(1)
        flat = weights.reshape(-1)
        y = y * (flat.masked_fill(ids >= EXPERTS, 0.0) if masks else flat)[:, None]
        return y.view(tokens, CHOICES, HIDDEN).sum(1)

    chosen = torch.randint(0, EXPERTS, (tokens, CHOICES))
    with torch.no_grad():
        (graph,) = captured(experts, torch.randn(tokens, HIDDEN), chosen, torch.rand(tokens, CHOICES))
    (site,) = MixtureMatcher().find(graph.graph, context_of(graph.groups, 1))
    return site.site.rejections


@pytest.mark.parametrize(
    "act",
    [
        lambda gate: F.silu(torch.minimum(gate, torch.full((), 20.0))),
        lambda gate: F.silu(gate - F.relu(gate - 20)),
    ],
    ids=["least", "difference"],
)
def test_an_activation_that_is_cut_off_far_out(act: Change) -> None:
    assert [each.code for each in _rejections(act)] == ["activation_not_known"]


@pytest.mark.parametrize("cut", [lambda ids: ids.clamp(max=2), lambda ids: ids.clamp(1, 3)], ids=["most", "least"])
def test_masked_choices_whose_ids_are_cut_to_others_here(cut: Change) -> None:
    assert [each.code for each in _rejections(cut=cut, masks=True)] == ["form_not_known"]
    assert _rejections(cut=lambda ids: ids.clamp(max=EXPERTS - 1), masks=True) == ()


@pytest.mark.parametrize("masks", [False, True])
def test_a_bias_of_other_experts(masks: bool) -> None:
    here = torch.clamp
    found = _rejections(
        cut=lambda ids: here(ids, max=EXPERTS - 1), cut_for_bias=lambda ids: here(ids, max=1), masks=masks
    )
    assert [each.code for each in found] == ["form_not_known"]


@pytest.mark.parametrize(
    "factors",
    [lambda weights: weights.reshape(-1), lambda weights: weights[:, :1, None], lambda weights: weights[:1, :, None]],
    ids=["column", "token", "choice"],
)
def test_factors_that_are_not_one_a_choice(factors: Change) -> None:
    """One a column is as many as choices where the rows of all of them are as many as columns."""
    assert [each.code for each in _rejections(factors=factors, tokens=HIDDEN // CHOICES)] == ["form_not_known"]
    assert _rejections(factors=lambda weights: weights[..., None]) == ()


def test_rows_that_are_gathered() -> None:
    found = _rejections(rows_of=lambda x: x[torch.arange(TOKENS * CHOICES) // CHOICES])
    assert [each.code for each in found] == ["shape_not_known"]


@dataclass(frozen=True)
class Masked:
    """Places at which batched experts of one rank mask the choices of other ranks' experts."""

    inside: bool = False
    result: bool = False
    weights: bool = False
    fill: float = 0.0
    """Number that masked rows between the GEMMs become."""
    of_columns: bool = False
    down_bias: bool = False


def _codes_of_masked(where: Masked) -> list[str]:
    """Why such experts are not known; there are as many rows as columns, so that masks of either fit."""
    tokens = HIDDEN // CHOICES
    up, down = torch.randn(EXPERTS, HIDDEN, HIDDEN), torch.randn(EXPERTS, HIDDEN, HIDDEN)
    bias = torch.randn(EXPERTS, HIDDEN)

    def experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, flat = chosen.reshape(-1), weights.reshape(-1)
        here, remote = ids.clamp(max=EXPERTS - 1), ids >= EXPERTS
        mask = remote[None] if where.of_columns else remote[:, None]
        rows = x[:, None].expand(-1, CHOICES, -1).reshape(-1, HIDDEN)
        h = F.relu(torch.bmm(up[here], rows[..., None]).squeeze(-1))
        h = h.masked_fill(mask, where.fill) if where.inside else h
        y = torch.bmm(down[here], h[..., None]).squeeze(-1)
        y = y + bias[here] if where.down_bias else y
        y = y.masked_fill(mask, 0.0) if where.result else y
        flat = flat.masked_fill(remote, 0.0) if where.weights else flat
        return (y * flat[:, None]).view(tokens, CHOICES, HIDDEN).sum(1)

    chosen = torch.randint(0, EXPERTS + 1, (tokens, CHOICES))
    with torch.no_grad():
        (graph,) = captured(experts, torch.randn(tokens, HIDDEN), chosen, torch.rand(tokens, CHOICES))
    (site,) = MixtureMatcher().find(graph.graph, context_of(graph.groups, 1))
    return [each.code for each in site.site.rejections]


@pytest.mark.parametrize(
    ("where", "code"),
    [
        (Masked(result=True, of_columns=True), "form_not_known"),
        (Masked(inside=True, of_columns=True), "activation_not_known"),
        (Masked(inside=True, weights=True, of_columns=True), "activation_not_known"),
        (Masked(inside=True, fill=1.0), "activation_not_known"),
        (Masked(inside=True, down_bias=True), "form_not_known"),
    ],
)
def test_masks_that_hide_other_numbers_than_remote_choices(where: Masked, code: str) -> None:
    assert _codes_of_masked(where) == [code]


@pytest.mark.parametrize(
    "where",
    [
        Masked(inside=True),
        Masked(result=True, down_bias=True),
        Masked(inside=True, weights=True, down_bias=True),
        Masked(inside=True, result=True, down_bias=True),
    ],
)
def test_masks_after_which_remote_choices_add_nothing(where: Masked) -> None:
    assert _codes_of_masked(where) == []


@pytest.mark.parametrize(("start", "step"), [(0, 1), (TOKENS * CHOICES - 1, -1)], ids=["forward", "backward"])
def test_an_order_that_is_not_undone(start: int, step: int) -> None:
    """Sorted choices return to their tokens by the inverse of the order, which counts from 0 on."""
    up, down = torch.randn(EXPERTS, HIDDEN, WIDTH), torch.randn(EXPERTS, WIDTH, HIDDEN)
    grouped = torch.ops.transformers.grouped_mm_fallback

    def experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, order = chosen.reshape(-1).sort()
        ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        y = grouped(F.relu(grouped(x[order // CHOICES], up, ends)), down, ends) * weights.reshape(-1)[order][:, None]
        places = torch.ops.prims.iota(
            len(order), start=start, step=step, dtype=torch.int64, device="cpu", requires_grad=False
        )
        inverse = torch.empty_like(order).index_put([order], places)
        return y[inverse].view(TOKENS, CHOICES, HIDDEN).sum(1)

    chosen = torch.randint(0, EXPERTS, (TOKENS, CHOICES))
    with torch.no_grad():
        (graph,) = captured(experts, torch.randn(TOKENS, HIDDEN), chosen, torch.rand(TOKENS, CHOICES))
    (site,) = MixtureMatcher().find(graph.graph, context_of(graph.groups, 1))
    assert [each.code for each in site.site.rejections] == ([] if step == 1 else ["form_not_known"])
