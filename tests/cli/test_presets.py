"""Shipped presets: they are configurations and nothing else, and their numbers fit together."""

from __future__ import annotations

import json

import pytest

from weaveopt import presets
from weaveopt.cli import model_source

PARAMETERS = {
    "deepseek-v3": 671e9,
    "gemma-3-27b": 27.0e9,
    "gpt-oss-120b": 116.8e9,
    "llama-3.1-405b": 405.9e9,
    "llama-3.3-70b": 70.6e9,
    "mixtral-8x22b": 140.6e9,
    "qwen2.5-72b": 72.7e9,
    "qwen3-235b-a22b": 235.1e9,
}
"""Parameter counts that the publishers state."""


def test_the_promised_presets_are_there() -> None:
    assert set(presets.names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_numbers_of_a_preset_fit_together(name: str) -> None:
    raw = json.loads(presets.text(name))
    assert not {"auto_map", "quantization_config"} & set(raw)
    config = model_source.load(name).config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    assert heads % kv_heads == 0
    assert config.hidden_size % 64 == 0
    assert 0 < config.rms_norm_eps < 1e-4
    layer_types = raw.get("layer_types")
    assert layer_types is None or len(layer_types) == config.num_hidden_layers
    assert config.base_model_tp_plan or config.base_model_ep_plan


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_preset_has_as_many_parameters_as_its_publisher_says(name: str) -> None:
    import torch

    from weaveopt.cli import preview

    model = preview.build(model_source.load(name).config, torch.device("meta"), "bfloat16")
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.005)
