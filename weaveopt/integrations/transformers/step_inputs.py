"""Inputs of steps of continuous batching that are made on the device, from the lengths and pages of the requests.

For every step transformers fills on the host the row of the cache of every key that is read and, where attention is not
a flash kernel's, a mask [tokens of the step, tokens of the cache], request by request; masks of the largest step are
allocated at first. In steps that are compiled with this backend both are expressions of the graph in place of that
(`ops.attention.packed`): the host lists the pages of each request, and a rule that replaces all readers of a mask
removes it. Layers with sliding windows have transformers' own rows, as new ones may take the place of those that are
read. Steps that this backend does not compile have all of it from transformers.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch._dynamo
from torch.fx.experimental import _config as shape_config
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import input_outputs
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner

from weaveopt.integrations.transformers.batching_loop import BatchingConfig
from weaveopt.ops.attention.packed import packed_mask, rows_of_pages

Tensor = torch.Tensor
Arguments = MutableMapping[str, Any]
LAYER_MASKS = "layer_masks"
"""Keyword argument of the model: the masks of a step by layer type."""
_WINDOWS, _PAGES, _DTYPE = "layer_windows", "page_starts", "mask_dtype"
"""Entries of a step's arguments, which the model is not given. By layer type: which of the indices its layers read by,
and the window of its mask, 0 for none. The arguments of `rows_of_pages`, with the layer type that they are for and its
index. The masks' dtype."""
_building = threading.local()


class CacheIndices(Protocol):
    """One of transformers' cache allocators, with `sliding_window` where it has one."""

    index: int
    supports_block_table: bool
    """True if rows never move: full attention."""
    tokens_per_page: int
    block_physical_stride: int
    """Rows from one page of a layer to the next."""
    read_trash_index: int
    block_table: Mapping[str, Sequence[int]]
    """Pages by request."""

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]: ...


class IndexedCache(Protocol):
    """transformers' PagedAttentionCache."""

    cache_allocators: Mapping[str, CacheIndices]
    max_tokens_read: int
    max_batch_tokens: int


class StepInputs(Protocol):
    """transformers' ContinuousBatchingIOs; `page_starts` is of steps that this backend compiles alone."""

    cache: IndexedCache
    device: torch.device
    model_dtype: torch.dtype
    max_requests_per_batch: int
    max_kv_read: int
    use_block_table: bool
    makes_masks: bool
    page_starts: Tensor | None
    """First row of each page of each request, one request after the other; int32."""
    num_pages: int


class HostInputs(Protocol):
    """Inputs that the host fills for one step of an asynchronous loop."""

    req_id_to_new_token_position: Mapping[str, int]


class StepPair(Protocol):
    """transformers' HostDeviceIOPair."""

    host_io: HostInputs


class StepPairs(Protocol):
    """transformers' ContinuousBatchingAsyncIOs: the inputs of this step and of the one before, in turn."""

    io_pairs: Sequence[StepPair]
    current_pair: int
    max_batch_tokens: int


class StepRunner(Protocol):
    """transformers' ModelRunner."""

    cb_config: BatchingConfig


def is_compiled(config: BatchingConfig) -> bool:
    """True if this backend compiles steps of any lengths."""
    settings = config.varlen_compile_config
    return settings is not None and settings.backend == "weave"


def window_of(allocator: object) -> int:
    """How many keys a query reads at most, 0 for all before it; as in transformers' masks, where a window of 1 is
    none."""
    window = int(getattr(allocator, "sliding_window", None) or 0)
    return window if window > 1 else 0


def _paged(cache: IndexedCache) -> CacheIndices | None:
    """The allocator whose rows are made from pages."""
    return next((each for each in cache.cache_allocators.values() if each.supports_block_table), None)


@dataclass(frozen=True)
class _Reads:
    """Pages and rows that a step reads, gathered request by request."""

    table: Mapping[str, Sequence[int]]
    """Pages by request, of the allocator whose rows are made from pages."""
    page_size: int
    stride: int
    others: tuple[tuple[int, CacheIndices], ...]
    """The other allocators, whose rows are listed one by one, with their positions."""
    pages: list[int] = field(default_factory=list)
    """First rows."""

    @classmethod
    def of(cls, cache: IndexedCache) -> _Reads:
        paged = _paged(cache)
        assert paged is not None, "pages are listed where an allocator has them"
        others = tuple(each for each in enumerate(cache.cache_allocators.values()) if each[1] is not paged)
        return cls(paged.block_table, paged.tokens_per_page, paged.block_physical_stride, others)


@functools.cache
def install() -> None:
    """Have steps that are compiled with `weave` make these inputs, and transformers make none of them."""
    _install_storage()
    _install_pages()
    _install_carry_over()
    _install_step()


def _install_storage() -> None:
    is_needed: Callable[[object], bool] = input_outputs.attn_mask_is_needed
    own: Callable[..., None] = ContinuousBatchingIOs.__init__
    signature = inspect.signature(own)

    @functools.wraps(is_needed)
    def attn_mask_is_needed(config: object) -> bool:
        return is_needed(config) and not getattr(_building, "without_masks", False)

    @functools.wraps(own)
    def __init__(self: StepInputs, *args: object, **kwargs: object) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        ours = is_compiled(given["continuous_batching_config"])
        self.makes_masks, self.page_starts, self.num_pages = ours and is_needed(given["config"]), None, 0
        with _without_masks(ours):
            own(self, *args, **kwargs)
        paged = _paged(self.cache) if ours else None
        if paged is not None:
            rows = self.cache.max_tokens_read + self.cache.max_batch_tokens
            size = -(-rows // paged.tokens_per_page) + self.max_requests_per_batch
            pinned = self.device.type == "cpu" and torch.cuda.is_available()
            self.page_starts = torch.zeros(size, dtype=torch.int32, device=self.device, pin_memory=pinned)

    input_outputs.attn_mask_is_needed = attn_mask_is_needed
    ContinuousBatchingIOs.__init__ = __init__


@contextmanager
def _without_masks(without: bool) -> Iterator[None]:
    _building.without_masks = without
    try:
        yield
    finally:
        _building.without_masks = False


def _install_pages() -> None:
    prepare: Callable[..., None] = ContinuousBatchingIOs.prepare_batch_tensors
    extend: Callable[..., None] = PagedAttentionCache.extend_read_and_write_indices
    transfer: Callable[..., None] = ContinuousBatchingIOs._transfer_inputs

    @functools.wraps(prepare)
    def prepare_batch_tensors(self: StepInputs, *args: object, **kwargs: object) -> None:
        if self.page_starts is None:
            prepare(self, *args, **kwargs)
            return
        reads = _building.reads = _Reads.of(self.cache)
        try:
            prepare(self, *args, **kwargs)
        finally:
            _building.reads = None
        self.num_pages = len(reads.pages)
        if reads.pages:
            self.page_starts[: self.num_pages] = torch.tensor(reads.pages, dtype=torch.int32)

    @functools.wraps(extend)
    def extend_read_and_write_indices(
        self: IndexedCache,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        reads: _Reads | None = getattr(_building, "reads", None)
        if reads is None or read_index is None:
            extend(self, request_id, past_length, query_length, read_index, write_index)
            return
        extend(self, request_id, past_length, query_length, None, write_index)
        count = -(-(past_length + query_length) // reads.page_size)
        reads.pages.extend([page * reads.stride for page in reads.table[request_id][:count]])
        for position, allocator in reads.others:
            read_index[position] += allocator.get_read_indices(request_id, past_length, query_length)

    @functools.wraps(transfer)
    def transfer_inputs(
        self: StepInputs, other: StepInputs, stream: torch.cuda.Stream, non_blocking: bool = False
    ) -> None:
        transfer(self, other, stream, non_blocking)
        if self.page_starts is not None and other.page_starts is not None and self.num_pages:
            with torch.cuda.stream(stream):
                other.page_starts[: self.num_pages].copy_(self.page_starts[: self.num_pages], non_blocking=non_blocking)

    ContinuousBatchingIOs.prepare_batch_tensors = prepare_batch_tensors
    PagedAttentionCache.extend_read_and_write_indices = extend_read_and_write_indices
    ContinuousBatchingIOs._transfer_inputs = transfer_inputs


def _install_carry_over() -> None:
    own: Callable[[StepPairs], Tensor] = ContinuousBatchingAsyncIOs.infer_carry_over_ids

    @functools.wraps(own)
    def infer_carry_over_ids(self: StepPairs) -> Tensor:
        """The same with work by requests, not by the tokens of the largest step, which the host spends every step."""
        inputs, before = (self.io_pairs[at].host_io for at in (self.current_pair, 1 - self.current_pair))
        if getattr(inputs, "page_starts", None) is None:
            return own(self)
        place, places = inputs.req_id_to_new_token_position, before.req_id_to_new_token_position
        moves = [(place[request], at) for at, request in enumerate(places) if request in place]
        found = torch.full((self.max_batch_tokens,), -1, dtype=torch.int32)
        if moves:
            to, at = torch.tensor(moves, dtype=torch.int32).unbind(1)
            found[to] = at
        return found

    ContinuousBatchingAsyncIOs.infer_carry_over_ids = infer_carry_over_ids


def _install_step() -> None:
    arguments: Callable[..., Arguments] = ContinuousBatchingIOs.get_model_kwargs
    forward: Callable[..., None] = ModelRunner._forward_process_and_sample

    @functools.wraps(arguments)
    def get_model_kwargs(self: StepInputs, *args: object, **kwargs: object) -> Arguments:
        found = arguments(self, *args, **kwargs)
        if self.use_block_table:
            return found
        if self.makes_masks:
            allocators = self.cache.cache_allocators.items()
            found[_WINDOWS] = {name: (each.index, window_of(each)) for name, each in allocators}
            found[_DTYPE] = self.model_dtype
        paged = _paged(self.cache)
        if self.page_starts is not None and paged is not None and self.max_kv_read > 0:
            [name] = [name for name, each in self.cache.cache_allocators.items() if each is paged]
            found[_PAGES] = (name, paged.index, self.page_starts, paged.tokens_per_page, paged.read_trash_index)
        return found

    @functools.wraps(forward)
    def forward_process_and_sample(
        self: StepRunner,
        model: PreTrainedModel,
        batch_data: Arguments,
        carry_over_ids: Tensor,
        prev_output_ids: Tensor,
        output_ids: Tensor,
    ) -> None:
        forward(self, model, with_inputs(batch_data), carry_over_ids, prev_output_ids, output_ids)

    choose: Callable[..., tuple[Callable[..., None], bool]] = ModelRunner._get_forward_fn

    @functools.wraps(choose)
    def get_forward_fn(self: StepRunner, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        step, use_cuda_graph = choose(self, use_block_table=use_block_table)
        return _with_constants(step) if is_compiled(self.cb_config) else step, use_cuda_graph

    ModelRunner._get_forward_fn = get_forward_fn
    ContinuousBatchingIOs.get_model_kwargs = get_model_kwargs
    ModelRunner._forward_process_and_sample = forward_process_and_sample


def _with_constants(step: Callable[..., None]) -> Callable[..., None]:
    """`step`, traced with the numbers of modules as constants: where sizes are symbolic Dynamo makes inputs of them,
    and no site whose scale or limit is one is known then. And with a symbol for every size: sizes that were equal in
    the first call would share one, and the step be compiled again when they are not. Dynamo's settings are those of a
    thread."""

    def call(*args: object) -> None:
        sizes = shape_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        with torch._dynamo.config.patch(specialize_float=True), sizes:
            step(*args)

    return call


def with_inputs(batch_data: Arguments) -> Arguments:
    """The arguments of a step as the model takes them: with rows of the cache, and masks of all layer types."""
    found = {name: value for name, value in batch_data.items() if name not in (_WINDOWS, _PAGES, _DTYPE)}
    if _PAGES in batch_data:
        name, index, starts, page_size, nowhere = batch_data[_PAGES]
        rows, bounds = list(found["read_index"]), found["cu_seq_lens_k"][name]
        rows[index] = rows_of_pages(bounds, starts, rows[index].shape[0], page_size, nowhere)
        found["read_index"] = rows
    if _WINDOWS in batch_data:
        queries, masks = found["input_ids"].shape[1], {}
        for name, (index, window) in batch_data[_WINDOWS].items():
            keys = found["read_index"][index].shape[0] or queries
            bounds = found["cu_seq_lens_q"], found["cu_seq_lens_k"][name]
            masks[name] = packed_mask(*bounds, queries, keys, window, batch_data[_DTYPE])
        found[LAYER_MASKS] = masks
        # Models with one layer type take its mask itself.
        found["attention_mask"] = masks if len(masks) > 1 else next(iter(masks.values()))
        found["is_causal"] = False
    return found
