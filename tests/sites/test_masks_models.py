"""Masks in the graphs of transformers' models, as AOTAutograd leaves them; nothing is compiled further."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch._inductor.compile_fx import compile_fx
from transformers import (
    DynamicCache,
    Gemma3TextConfig,
    Gemma3TextModel,
    Llama4TextConfig,
    Llama4TextModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    StaticCache,
)

from weaveopt.integrations.transformers.cache_argument import cache_argument, with_cache
from weaveopt.sites.shared.masks import Mask, MaskCache, MaskKind, MaskReading, read_mask

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SIZES = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32, **HEADS}
TOKENS = torch.arange(80).reshape(2, 40) % 32


class _Stop(Exception):
    pass


def readings(model: torch.nn.Module, tokens: torch.Tensor = TOKENS, **inputs: object) -> list[MaskReading]:
    """Readings of the masks of each attention call in the model's first graph, in order."""
    graphs: list[fx.Graph] = []

    def inner_compile(module: fx.GraphModule, *_: object, **__: object) -> object:
        graphs.append(module.graph)
        raise _Stop("before Inductor")

    def backend(module: fx.GraphModule, examples: list[torch.Tensor]) -> object:
        return compile_fx(module, examples, inner_compile=inner_compile)  # type: ignore[arg-type]

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="before Inductor"):
        torch.compile(model.eval(), backend=backend)(input_ids=tokens, **inputs)
    (graph,) = graphs
    cache, found = MaskCache(), []
    for node in graph.nodes:
        if node.op == "call_function" and "scaled_dot_product" in str(node.target):
            query, key = (argument.meta["val"] for argument in node.args[:2])
            is_causal = bool(node.args[4]) if len(node.args) > 4 else False
            mask = node.kwargs.get("attn_mask")
            found.append(read_mask(mask, is_causal, query.shape[-2], key.shape[-2], cache))
    return found


def llama(num_layers: int = 1) -> LlamaModel:
    return LlamaModel(LlamaConfig(num_hidden_layers=num_layers, **SIZES))


def gemma3() -> Gemma3TextModel:
    layers = ["sliding_attention", "full_attention"]
    return Gemma3TextModel(Gemma3TextConfig(num_hidden_layers=2, sliding_window=16, layer_types=layers, **SIZES))


def filled(model: torch.nn.Module) -> DynamicCache:
    with torch.no_grad():
        cache = getattr(model(input_ids=TOKENS, use_cache=True), cache_argument())
    assert isinstance(cache, DynamicCache)
    return cache


def test_prompts() -> None:
    first, second = readings(llama(2), use_cache=False)
    assert first.mask == second.mask == Mask(MaskKind.CAUSAL)
    assert first.admitted is second.admitted and first.fill == float("-inf")


def test_a_window_shorter_than_the_prompt() -> None:
    model = MistralModel(MistralConfig(num_hidden_layers=1, sliding_window=16, **SIZES))
    (reading,) = readings(model, use_cache=False)
    assert reading.mask == Mask(MaskKind.WINDOW, window=16)


def test_chunks_beside_causal_layers() -> None:
    layers = ["chunked_attention", "full_attention"]
    experts = {"num_local_experts": 2, "interleave_moe_layer_step": 3, "intermediate_size_mlp": 16}
    chunk = {"attention_chunk_size": 16, "layer_types": layers}
    config = Llama4TextConfig(num_hidden_layers=2, **chunk, **experts, **SIZES)
    chunked, causal = readings(Llama4TextModel(config), use_cache=False)
    assert chunked.mask == Mask(MaskKind.CHUNKED, chunk=16)
    assert causal.mask == Mask(MaskKind.CAUSAL)


def test_a_second_chunk_over_a_cache() -> None:
    """Sliding layers keep 15 keys of the first chunk, the others all 40."""
    model = gemma3()
    window, causal = readings(model, TOKENS[:, :8], use_cache=True, **with_cache(filled(model)))
    assert window.mask == Mask(MaskKind.WINDOW, 15, window=16)
    assert causal.mask == Mask(MaskKind.CAUSAL, 40)


def test_inputs_that_decide() -> None:
    padding = torch.ones(2, 40, dtype=torch.int64)
    padding[0, :5] = 0
    packed = torch.cat([torch.arange(15), torch.arange(25)])[None]
    model = llama()
    for name, value in (("attention_mask", padding), ("position_ids", packed)):
        (reading,) = readings(model, use_cache=False, **{name: value})
        assert reading.mask is None and reading.admitted is not None and reading.fill == float("-inf")
        assert reading.reason is not None and reading.reason.code == "depends_on_input"
        (decides,) = reading.inputs
        assert decides.meta["val"].shape == value.shape and decides.meta["val"].dtype is torch.int64
        assert not reading.hangs_on_lengths_only


def test_a_static_cache() -> None:
    """The first chunk writes into the cache and reads what it wrote; a later one reads the cache to its end."""
    model = llama()
    cache = StaticCache(model.config, max_cache_len=64)
    for reading in readings(model, use_cache=True, **with_cache(cache)):
        assert reading.mask is not None and reading.mask.kind is MaskKind.CAUSAL and reading.mask.offset == 0
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=True, **with_cache(cache))
    for reading in readings(model, TOKENS[:, :1], use_cache=True, **with_cache(cache)):
        assert reading.mask is None and reading.admitted is not None
        assert reading.hangs_on_lengths_only
