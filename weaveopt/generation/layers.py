"""Cache layers whose every step is the same operations on the same memory, for any position.

transformers' `StaticLayer` advances a position in every layer, and its sliding-window layer branches in Python on a
full window and then moves the whole window by one place. Here all layers read one position on the device, which the
step advances once, and a sliding window is a ring: position `p` is stored in slot `p % slots`. The order of keys does
not matter to attention as long as the mask knows which position each slot holds; `masks.py` does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from weaveopt.records.candidate import Rejection

SPARE_SLOTS = 16
"""Slots of a ring beyond its window: as many steps may run beyond the stop without a key of the window being lost."""


class FullLayer(StaticLayer):
    """Keys and values `[batch, heads, slots, head size]`; position `p` is in slot `p`."""

    is_sliding = False

    def __init__(self, slots: int, length: Tensor) -> None:
        super().__init__(max_cache_len=slots)
        self.cumulative_length = length

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, new, head size]` to the cache, and return everything.

        Does not advance the position: every layer of a model reads the same one.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        slots = self.cumulative_length + torch.arange(new, device=key_states.device)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values

    def held(self, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the positions up to `length` that are still there, in their order."""
        return self.keys[:, :, :length], self.values[:, :, :length]


class RingLayer(FullLayer):
    """Keys and values of the last `slots` positions; position `p` is in slot `p % slots`.

    More than `slots` new positions are taken only by an empty cache: a prefill.
    """

    is_sliding = True

    def __init__(self, window: int, slots: int, length: Tensor) -> None:
        super().__init__(slots, length)
        self.window = window

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        kept = min(new, self.max_cache_len)
        positions = self.cumulative_length + torch.arange(new - kept, new, device=key_states.device)
        slots = positions % self.max_cache_len
        self.keys.index_copy_(2, slots, key_states[:, :, new - kept :])
        self.values.index_copy_(2, slots, value_states[:, :, new - kept :])
        if new > self.max_cache_len:
            # The first of the new positions look at keys that are no longer in the ring.
            return key_states, value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Size and offset of the masks that transformers makes for a prefill: an empty ring stores position `p` in
        slot `p`."""
        return max(query_length, self.max_cache_len), 0

    def held(self, length: int) -> tuple[Tensor, Tensor]:
        first = max(0, length - self.max_cache_len)
        slots = torch.arange(first, length, device=self.keys.device) % self.max_cache_len
        return self.keys[:, :, slots], self.values[:, :, slots]


def make(config: object, slots: int, length: Tensor) -> StaticCache | Rejection:
    """A cache for `slots` positions; every layer reads `length`, an int64 scalar on the model's device.

    Layers of other kinds than full and sliding-window attention are a rejection.
    """
    cache = StaticCache(config=config, max_cache_len=slots)
    windows = StaticCache(config=config, max_cache_len=1 << 40)
    layers: list[StaticLayer] = []
    for layer, unbounded in zip(cache.layers, windows.layers, strict=True):
        if type(layer) is StaticLayer:
            layers.append(FullLayer(slots, length))
        elif type(layer) is StaticSlidingWindowLayer:
            window = unbounded.max_cache_len
            layers.append(RingLayer(window, min(window + SPARE_SLOTS, slots), length))
        else:
            kind = type(layer).__name__
            return Rejection("cache_layer", f"the model's cache has layers of type {kind}", (("type", kind),))
    cache.layers = layers
    return cache
