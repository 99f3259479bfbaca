"""Linear layers of one input, whose GEMMs become one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Projected(nn.Module):
    """Queries, keys and values of a block, and what becomes of them."""

    def __init__(self, bias: bool = False, widths: tuple[int, ...] = (32, 8, 8), hidden: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, width, bias=bias) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        q, *others = (layer(x) for layer in self.layers)
        return q.sin() + torch.cat([each.cos() for each in others], dim=-1).repeat(1, 1, 2)


def weights(model: Projected) -> list[Tensor]:
    return [layer.weight for layer in model.layers]  # type: ignore[misc]
