"""transformers' continuous batching compiled as one graph a step.

    model.generate_batch(inputs, generation_config=config, **weaveopt.continuous_batching())

transformers switches Dynamo off in `PagedAttentionCache.update`, so a compiled step is two graphs a layer. Once
`continuous_batching` was called, Dynamo traces for the backend `weave`, and for no other, `weave::paged_kv_update` in
its place (`ops.attention.paged`): it writes the new rows and returns all rows that are read. The operator also names
the mask of the layer's cache (`step_inputs`) and the lengths that this mask stands for, so that a rule knows what the
attention after it computes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypedDict

import torch
import torch._dynamo
from transformers import CompileConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.config import OptionValue
from weaveopt.errors import WeaveError
from weaveopt.integrations.transformers import batching_loop, step_inputs

Tensor = torch.Tensor
Arguments = MutableMapping[str, Any]
"""Keyword arguments of attention, which `update` edits."""
BACKEND = ("weaveopt.backend", "weave")
EAGER = "paged|eager"
QUERY_INTERVAL, KEY_INTERVAL = 8, 64
"""Granularity of the lengths of steps that no CUDA graph holds."""


class BatchingArguments(TypedDict):
    """Keyword arguments of `generate_batch`."""

    continuous_batching_config: ContinuousBatchingConfig


class Allocator(Protocol):
    """One of transformers' cache allocators."""

    index: int
    layer_type: str
    layer_indices: Sequence[int]
    tokens_per_page: int
    supports_block_table: bool
    sentinel_index: int
    cache_tensor: Tensor


def continuous_batching(
    config: ContinuousBatchingConfig | None = None, options: Mapping[str, OptionValue] | None = None
) -> BatchingArguments:
    """Arguments of `generate_batch` that compile its steps with this backend: a copy of `config` (default:
    transformers' own) whose path for steps of any lengths is compiled for symbolic sizes. On GPUs steps are held in
    CUDA graphs and prepared while others run, unless `config` says otherwise; without graphs they are padded less than
    transformers would for them. `options` are those of `torch.compile(backend="weave")`.

    The path by block tables is transformers' own still: attention there is a library's, which Dynamo does not trace.
    Raises `WeaveError` for another config, and where it names a compile config of its own.
    """
    if config is not None and not isinstance(config, ContinuousBatchingConfig):
        raise WeaveError(f"continuous_batching takes a ContinuousBatchingConfig, found {type(config).__name__}")
    own = ContinuousBatchingConfig() if config is None else copy.deepcopy(config)
    if own.varlen_compile_config is not None:
        raise WeaveError(
            "the ContinuousBatchingConfig has a varlen_compile_config already: leave it out, "
            "weaveopt.continuous_batching() sets it"
        )
    own.varlen_compile_config = CompileConfig(backend="weave", mode="default", dynamic=True)
    if options:  # torch takes a mode or options
        own.varlen_compile_config.mode, own.varlen_compile_config.options = None, dict(options)
    if not torch.cuda.is_available():
        own.use_cuda_graph = False
    elif own.use_cuda_graph not in (False, (False, False)):
        # transformers decides against both where steps need a mask: these make their own.
        own.use_cuda_graph = True if own.use_cuda_graph is None else own.use_cuda_graph
        if own.use_async_batching is None:
            own.use_async_batching = True
    if own.use_cuda_graph in (False, (False, False)):
        # Sizes are symbolic: padding saves no compile, and what is padded is computed.
        own.q_padding_interval_size = own.q_padding_interval_size or QUERY_INTERVAL
        own.kv_padding_interval_size = own.kv_padding_interval_size or KEY_INTERVAL
    _install()
    batching_loop.install()
    return {"continuous_batching_config": own}


@functools.cache
def _install() -> None:
    """Have Dynamo trace the operator where it compiles for `weave`; all other calls are transformers' own."""
    original: Callable[[PagedAttentionCache, Tensor, Tensor, int, Arguments], tuple[Tensor, Tensor]]
    original = PagedAttentionCache.update

    @functools.wraps(original)
    def update(
        self: PagedAttentionCache, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: Arguments
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_dynamo_compiling() and kwargs.get("block_table") is None and traced_for_weave():
            allocator = self.layer_to_allocator[layer_idx]
            return _traced(allocator, key_states, value_states, layer_idx, kwargs, self.cache_tensor)
        return original(self, key_states, value_states, layer_idx, kwargs)

    # What is wrapped says that Dynamo has to leave it alone, and so would this.
    for name in ("_torchdynamo_disable", "_torchdynamo_disable_msg", "_torchdynamo_disable_recursive"):
        update.__dict__.pop(name, None)
    PagedAttentionCache.update = update
    _install_eager()
    step_inputs.install()


def _install_eager() -> None:
    """transformers 5.23 keeps Dynamo out of the attention of models that the library's operator cannot express."""
    disabled: Callable[..., object] | None = ALL_ATTENTION_FUNCTIONS.get(EAGER)
    inner: Callable[..., object] | None = getattr(disabled, "_torchdynamo_orig_callable", None)
    if disabled is None or inner is None:
        return

    def eager(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_dynamo_compiling() and traced_for_weave():
            return inner(*args, **kwargs)
        return disabled(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[EAGER] = eager


@torch._dynamo.assume_constant_result
def traced_for_weave() -> bool:
    """True if the frame that Dynamo traces is compiled by this backend; called by Dynamo itself while it traces."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend: object = InstructionTranslator.current_tx().output.compiler_fn
    for _ in range(8):
        if isinstance(backend, functools.partial):
            backend = backend.func
        following = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        if following is None:
            break
        backend = following
    return (getattr(backend, "__module__", ""), getattr(backend, "__name__", "")) == BACKEND


def _traced(
    allocator: Allocator,
    key_states: Tensor,
    value_states: Tensor,
    layer_idx: int,
    kwargs: Arguments,
    memory: Tensor,
) -> tuple[Tensor, Tensor]:
    """`PagedAttentionCache.update` by index. `memory`: the bytes that all allocators share, and not their views of it,
    as AOTAutograd changes one of several inputs that are views of one another only where it sees what they view."""
    mask = kwargs.get(step_inputs.LAYER_MASKS, {}).get(allocator.layer_type)
    kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][allocator.layer_type].to(torch.int32)
    kwargs["max_length_k"] = kwargs["max_length_k"][allocator.layer_type]
    read_index, write_index = kwargs["read_index"][allocator.index], kwargs["write_index"][allocator.index]
    keys, values = (each.squeeze(0).transpose(0, 1) for each in (key_states, value_states))
    first = 2 * allocator.layer_indices.index(layer_idx) * allocator.tokens_per_page
    # Allocators that have block tables are those whose rows never move.
    sentinel = -1 if allocator.supports_block_table else allocator.sentinel_index
    read_keys, read_values = torch.ops.weave.paged_kv_update(
        memory,
        keys,
        values,
        read_index,
        write_index,
        first,
        first + allocator.tokens_per_page,
        sentinel,
        mask,
        kwargs.get("cu_seq_lens_q"),
        kwargs["cu_seq_lens_k"],
        kwargs["max_length_k"],
        step_inputs.window_of(allocator),
    )
    if read_index.shape[0] == 0:
        return key_states, value_states
    return read_keys.transpose(0, 1).unsqueeze(0), read_values.transpose(0, 1).unsqueeze(0)
