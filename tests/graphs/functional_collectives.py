"""torch's functional collectives of one tensor, under the names of torch 2.13; before it they ended in `_tensor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import _functional_collectives as functional


def _named(name: str) -> Callable[..., Any]:
    old = name.replace("_single", "_tensor")
    return getattr(functional, name if hasattr(functional, name) else old)  # type: ignore[no-any-return]


all_gather_single = _named("all_gather_single")
all_gather_single_autograd = _named("all_gather_single_autograd")
reduce_scatter_single = _named("reduce_scatter_single")
reduce_scatter_single_autograd = _named("reduce_scatter_single_autograd")
