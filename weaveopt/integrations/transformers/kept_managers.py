"""A manager of continuous batching that is kept from call to call (`persistent_manager=True`), after weights changed.

It keeps pages of earlier requests, which later ones with the same prefix share, and captured steps, which read the
weights where they were.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from weaveopt.errors import WeaveError
from weaveopt.ops.captured_graphs import note_followed


class PagedCache(Protocol):
    """transformers' PagedAttentionCache."""

    dtype: torch.dtype

    def reset(self) -> None: ...


class KeptProcessor(Protocol):
    """transformers' ContinuousBatchProcessor."""

    cache: PagedCache
    inputs_and_outputs: Any


_fingerprints: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Fingerprint of the weights that captured steps read, by the processor's `inputs_and_outputs`, which keep them."""


def begin_loop(model: torch.nn.Module, processor: KeptProcessor) -> None:
    """Drop what earlier loops of the processor have left, before the first step of a loop.

    Pages go in any case: weights that were changed in place cannot be distinguished from others. Captured steps go
    where a weight has moved. Raises `WeaveError` where the model has another dtype than the pages.
    """
    check_dtype(model, processor)
    if processor.inputs_and_outputs in _fingerprints:
        processor.cache.reset()
    follow_weights(model, processor.inputs_and_outputs)


def follow_weights(model: torch.nn.Module, inputs: Any) -> None:
    """Drop captured steps of `inputs` where a weight has moved since the last time.

    Programs move weights between loops; compiled graphs do so in their first call, within a step
    (`weaveopt/inductor/prepared_inputs.py`), and steps of a path that is not compiled may be captured by then.
    """
    fingerprint = weights_fingerprint(model)
    if _fingerprints.get(inputs, fingerprint) != fingerprint:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a step may still run
        for each in _with_graphs(inputs):
            each.graphs = type(each.graphs)()
    _fingerprints[inputs] = fingerprint


def note_captured_steps(inputs: Any) -> None:
    """Say that captured steps of `inputs` go where weights move, so that compiled graphs may move them."""
    for each in _with_graphs(inputs):
        for graph in getattr(getattr(each, "graphs", None), "_storage", {}).values():
            note_followed(graph)


def _with_graphs(inputs: Any) -> list[Any]:
    """Objects of transformers that keep the captured steps of a processor."""
    pairs = getattr(inputs, "io_pairs", None)
    return [inputs] if pairs is None else [pair.device_io for pair in pairs]


def check_dtype(model: torch.nn.Module, processor: KeptProcessor) -> None:
    """Raise `WeaveError` where the model has another dtype than the pages.

    Asked before a step, whose requests then have the error; before a loop has requests nobody would.
    """
    dtype = getattr(model, "dtype", processor.cache.dtype)
    if dtype is not processor.cache.dtype:
        raise WeaveError(
            f"continuous batching: the model is {dtype} now, and its manager was made for {processor.cache.dtype} and "
            "kept: call model.destroy_cached_continuous_batching_manager() after changing the dtype"
        )


def weights_fingerprint(model: torch.nn.Module) -> int:
    """Changes with the memory of any weight: captured steps read addresses."""
    places = []
    for tensor in (*model.parameters(), *model.buffers()):
        local = getattr(tensor, "_local_tensor", tensor)
        places.append(local.data_ptr())
    return hash(tuple(places))
