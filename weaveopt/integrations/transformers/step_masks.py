"""Masks of steps of continuous batching, made on the device from the lengths of the requests.

transformers fills a mask [tokens of a step, tokens of the cache] for every step, request by request, where attention is
not a flash kernel's, and allocates the largest at first. In steps that are compiled with this backend the mask is an
expression of the graph in place of it, `ops.attention.packed_mask`: a rule that replaces all readers of it removes it,
and no step waits for it. Steps that this backend does not compile have transformers' own masks.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import input_outputs
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner

from weaveopt.integrations.transformers.batching_loop import BatchingConfig
from weaveopt.ops.attention.packed_mask import packed_mask

Tensor = torch.Tensor
Arguments = MutableMapping[str, Any]
LAYER_MASKS = "layer_masks"
"""Keyword argument of the model: the masks of a step by layer type."""
_WINDOWS = "layer_windows"
"""Entry of a step's arguments: by layer type, which of the indices its layers read by, and the window of its mask, 0
for none. The model is not given it."""
_allocation = threading.local()


class CacheIndices(Protocol):
    """One of transformers' cache allocators, with `sliding_window` where it has one."""

    index: int


class IndexedCache(Protocol):
    """transformers' PagedAttentionCache."""

    cache_allocators: Mapping[str, CacheIndices]


class StepRunner(Protocol):
    """transformers' ModelRunner."""

    cb_config: BatchingConfig
    cache: IndexedCache


def is_compiled(config: BatchingConfig) -> bool:
    """True if this backend compiles steps of any lengths."""
    settings = config.varlen_compile_config
    return settings is not None and settings.backend == "weave"


def window_of(allocator: object) -> int:
    """How many keys a query reads at most, 0 for all before it; as in transformers' masks, where a window of 1 is
    none."""
    window = int(getattr(allocator, "sliding_window", None) or 0)
    return window if window > 1 else 0


@functools.cache
def install() -> None:
    """Have steps that are compiled with `weave` make their masks, and transformers allocate none for them."""
    _install_allocation()
    _install_step()


def _install_allocation() -> None:
    is_needed: Callable[[object], bool] = input_outputs.attn_mask_is_needed
    own: Callable[..., None] = ContinuousBatchingIOs.__init__
    signature = inspect.signature(own)

    @functools.wraps(is_needed)
    def attn_mask_is_needed(config: object) -> bool:
        return is_needed(config) and not getattr(_allocation, "without_masks", False)

    @functools.wraps(own)
    def __init__(self: ContinuousBatchingIOs, *args: object, **kwargs: object) -> None:
        config = signature.bind(self, *args, **kwargs).arguments["continuous_batching_config"]
        with _without_masks() if is_compiled(config) else _as_it_is():
            own(self, *args, **kwargs)

    input_outputs.attn_mask_is_needed = attn_mask_is_needed
    ContinuousBatchingIOs.__init__ = __init__


@contextmanager
def _without_masks() -> Iterator[None]:
    _allocation.without_masks = True
    try:
        yield
    finally:
        _allocation.without_masks = False


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _install_step() -> None:
    compute: Callable[..., None] = ModelRunner.compute_batch
    forward: Callable[..., None] = ModelRunner._forward_process_and_sample

    @functools.wraps(compute)
    def compute_batch(self: StepRunner, model: PreTrainedModel, batch_data: Arguments) -> None:
        is_ours = is_compiled(self.cb_config) and batch_data["block_table"] is None
        if is_ours and input_outputs.attn_mask_is_needed(model.config):
            found = self.cache.cache_allocators.items()
            batch_data[_WINDOWS] = {name: (each.index, window_of(each)) for name, each in found}
        compute(self, model, batch_data)

    @functools.wraps(forward)
    def forward_process_and_sample(
        self: StepRunner,
        model: PreTrainedModel,
        batch_data: Arguments,
        carry_over_ids: Tensor,
        prev_output_ids: Tensor,
        output_ids: Tensor,
    ) -> None:
        if _WINDOWS in batch_data:
            batch_data = with_masks(batch_data, model.dtype)
        forward(self, model, batch_data, carry_over_ids, prev_output_ids, output_ids)

    ModelRunner.compute_batch = compute_batch
    ModelRunner._forward_process_and_sample = forward_process_and_sample


def with_masks(batch_data: Arguments, dtype: torch.dtype) -> Arguments:
    """The arguments of a step with its masks, of all layer types and as models take them."""
    queries, masks = batch_data["input_ids"].shape[1], {}
    for name, (index, window) in batch_data[_WINDOWS].items():
        keys = batch_data["read_index"][index].shape[0] or queries
        bounds = batch_data["cu_seq_lens_q"], batch_data["cu_seq_lens_k"][name]
        masks[name] = packed_mask(*bounds, queries, keys, window, dtype)
    found = {name: value for name, value in batch_data.items() if name != _WINDOWS}
    found[LAYER_MASKS] = masks
    # Models with one layer type take its mask itself.
    found["attention_mask"] = masks if len(masks) > 1 else next(iter(masks.values()))
    found["is_causal"] = False
    return found
