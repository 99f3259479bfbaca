"""Caches in and out: what a user's cache holds goes into ours, and afterwards back; they never share memory."""

from __future__ import annotations

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from weaveopt.generation.layers import FullLayer
from weaveopt.records.candidate import Rejection
from weaveopt.wording import counted

TAKEN = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def may_be_filled(target: Cache, cache: StaticCache, batch: int, length: int) -> Rejection | None:
    """Reason why `target` could not take `length` positions of `batch` sequences from `cache`; None if it can."""
    kinds = {type(layer).__name__ for layer in target.layers if type(layer) not in TAKEN}
    if kinds:
        names = ", ".join(sorted(kinds))
        return Rejection("cache", f"the cache has layers of type {names}", (("type", names),))
    for index, layer in enumerate(cache.layers):
        sliding = index < len(target.layers) and target.layers[index].is_sliding
        if layer.is_sliding and not sliding:
            return Rejection("cache", "the user's cache keeps positions outside a sliding window; make it with config=")
    for layer in target.layers:
        kept = layer.keys.shape[0] if layer.is_initialized and layer.keys.dim() == 4 else batch
        if kept != batch:
            return Rejection("cache", f"the user's cache is of {counted(kept, 'sequence')}, the call of {batch}")
        if isinstance(layer, StaticLayer) and not layer.is_sliding and layer.max_cache_len < length:
            message = f"the user's cache has {layer.max_cache_len} positions, and the call may need {length}"
            return Rejection("cache", message)
    return None


def take(cache: StaticCache, source: Cache, past: int) -> None:
    """Copies the first `past` positions of `source`, whose layers are all of full attention."""
    for own, theirs in zip(cache.layers, source.layers, strict=True):
        own.keys[:, :, :past] = theirs.keys[:, :, :past]
        own.values[:, :, :past] = theirs.values[:, :, :past]
    cache.layers[0].cumulative_length.fill_(past)


def fill(target: Cache, cache: StaticCache, length: int) -> None:
    """Fill `target` with the first `length` positions, as if they had been computed into it."""
    for index, own in enumerate(cache.layers):
        assert isinstance(own, FullLayer)
        keys, values = own.held(length)
        while len(target.layers) <= index:  # a dynamic cache made without a config grows as it is used
            target.layers.append(target.layer_class_to_replicate())
        theirs = target.layers[index]
        if not theirs.is_initialized:
            theirs.lazy_initialization(keys, values)
        if isinstance(theirs, StaticLayer):
            _fill_static(theirs, keys, values, length)
        else:
            kept = theirs.sliding_window - 1 if isinstance(theirs, DynamicSlidingWindowLayer) else length
            first = max(0, keys.shape[2] - kept)
            theirs.keys, theirs.values = keys[:, :, first:].clone(), values[:, :, first:].clone()
            if isinstance(theirs, DynamicSlidingWindowLayer):
                theirs.cumulative_length = length


def _fill_static(theirs: StaticLayer, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
    kept = min(keys.shape[2], theirs.max_cache_len)
    first = keys.shape[2] - kept
    theirs.keys[:, :, :kept] = keys[:, :, first:]
    theirs.values[:, :, :kept] = values[:, :, first:]
    theirs.cumulative_length.fill_(min(length, theirs.max_cache_len))
    if isinstance(theirs, StaticSlidingWindowLayer):
        theirs.cumulative_length_int = length
