"""Where the bytes of weights lie that a kernel loads into L2 beside its exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.cost_model.l2_prefetch import LINE_BYTES, Order
from weaveopt.reductions.call import Prefetch

MOST_WEIGHTS = 4
"""As many as native code takes; see `_native.MAX_PREFETCH_RANGES`."""
PrefetchRange = tuple[int, int, int, int]
"""Address, bytes from row to row, rows, bytes of each."""


def ranges_of(weights: Sequence[torch.Tensor], prefetch: Prefetch) -> tuple[PrefetchRange, ...]:
    """The bytes of `weights` [n, k] that are prefetched, none of them outside a weight.

    `FRONT`: of the first weight as many as there are, and so on. `COLUMNS`: equally many of every row of all.
    """
    known = [each for each in weights[:MOST_WEIGHTS] if each.ndim == 2 and each.is_contiguous() and each.numel()]
    found = []
    left = prefetch.num_bytes
    a_row = left // max(sum(each.shape[0] for each in known), 1) // LINE_BYTES * LINE_BYTES
    for weight in known:
        if prefetch.order is Order.FRONT:
            take = min(left, weight.nbytes)
            left -= take
            pitch, rows = take, 1
        else:
            pitch, rows = weight.shape[1] * weight.element_size(), weight.shape[0]
            take = min(a_row, pitch)
        if take > 0:
            found.append((weight.data_ptr(), pitch, rows, take))
    return tuple(found)
