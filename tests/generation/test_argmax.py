"""The token of the largest score, found by parts of the vocabulary: the one that `torch.argmax` gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weaveopt.generation.nucleus import PARTS
from weaveopt.generation.step import argmax

INFINITY = float("inf")
SIZES = (1, 7, PARTS - 1, PARTS, PARTS + 1, 1000, 32000)


def rows(size: int) -> Tensor:
    """Random ones, few different values, one value, all minus infinity, infinities, and NaN."""
    numbers = torch.Generator().manual_seed(size)
    plain = torch.randn(6, size, generator=numbers)
    few = torch.randint(0, 3, (6, size), generator=numbers).float()
    same, nothing = torch.ones(1, size), torch.full((1, size), -INFINITY)
    infinite, not_numbers = plain[:1].clone(), plain[:2].clone()
    infinite[:, size // 2 :: 3] = INFINITY
    not_numbers[0, size // 2 :: 5] = float("nan")
    not_numbers[1, -1:] = float("nan")
    last = nothing.clone()
    last[:, -1] = -1e30
    return torch.cat([plain, few, same, nothing, infinite, not_numbers, last])


@pytest.mark.parametrize(
    "make", [lambda: argmax, lambda: torch.compile(argmax, dynamic=False)], ids=["eager", "compiled"]
)
def test_is_that_of_torch(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    found = make()
    for size in SIZES if found is argmax else (PARTS + 1, 32000):
        scores = rows(size)
        assert torch.equal(found(scores), scores.argmax(dim=-1)), size
        assert torch.equal(found(scores[:1]), scores[:1].argmax(dim=-1)), size
