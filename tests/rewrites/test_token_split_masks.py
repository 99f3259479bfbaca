"""Masks that resemble causal ones, under which a part of a sequence may need keys of later parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.graphs import forms
from tests.graphs.split_graphs import BATCH, LENGTH, WORLD, Call, Compared, compared
from tests.ranks.simulated import equal_ranks

HEADS, VOCABULARY = 4, 101
NEVER = float("-inf")
Admits = Callable[[Tensor, Tensor], Tensor]
"""A boolean of positions of queries [queries, 1] and of keys [1, keys]."""


def _split(admits: Admits, fill: float) -> list[Compared]:
    """Embeddings, attention over them, and a projection: the graph, cut by sequence and by batch."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(VOCABULARY, forms.HIDDEN, generator=generator)
    keys, values, out = (torch.randn(forms.HIDDEN, forms.HIDDEN, generator=generator) * 0.3 for _ in range(3))

    def run(ids: Tensor) -> Tensor:
        x = forms.all_reduce(torch.nn.functional.embedding(ids, table) * 0.5)
        by_head = [each.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for each in (x, x @ keys, x @ values)]
        positions = torch.arange(LENGTH)
        mask = torch.where(admits(positions[:, None], positions[None]), 0.0, fill)
        read = torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=mask)
        return forms.all_reduce(read.transpose(1, 2).reshape(BATCH, LENGTH, -1) @ out)

    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    with equal_ranks(WORLD):
        return compared(Call(run, (ids,)))


def _as_switches(rows: Tensor, columns: Tensor) -> Tensor:
    return columns.bool() <= rows.bool()


def _as_bytes(rows: Tensor, columns: Tensor) -> Tensor:
    return (columns + 120).to(torch.int8) <= (rows + 120).to(torch.int8)


def _from_the_end(rows: Tensor, columns: Tensor) -> Tensor:
    return columns <= torch.arange(LENGTH)[torch.arange(LENGTH) - 1][:, None]


def _one_for_all(rows: Tensor, columns: Tensor) -> Tensor:
    return torch.arange(1).expand(1, LENGTH) <= rows


def _to_the_left(rows: Tensor, columns: Tensor) -> Tensor:
    return torch.nn.functional.pad(columns <= rows, (0, 1))[:, 1:]


def _earlier(rows: Tensor, columns: Tensor) -> Tensor:
    return columns < rows


def _late_window(rows: Tensor, columns: Tensor) -> Tensor:
    return (columns <= rows - 2) & (columns > rows - 5)


@pytest.mark.parametrize(
    ("admits", "fill"),
    [
        (_as_switches, NEVER), (_as_bytes, NEVER), (_from_the_end, NEVER), (_one_for_all, NEVER),
        (_to_the_left, NEVER), (_earlier, -1e9), (_late_window, -1e9),
    ],
)  # fmt: skip
def test_a_part_has_every_key_that_its_queries_see(admits: Admits, fill: float) -> None:
    """Queries that see no key take the mean of all values, where the bias of the others is a finite number."""
    found = _split(admits, fill)
    assert [each.axis for each in found] == ["sequence", "batch"]
    assert [each.differences for each in found] == [[], []]


def test_a_causal_mask_is_proven_with_any_bias() -> None:
    for fill in (NEVER, -1e9):
        found = _split(lambda rows, columns: columns <= rows, fill)
        assert [(each.differences, each.made.joins, each.made.late) for each in found] == [([], (), ())] * 2
