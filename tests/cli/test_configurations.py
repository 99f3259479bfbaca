"""Configurations that explain meets: layers that differ, no plan, few positions, numbers that JSON has not."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.graphs.preview import without_sensitivity
from weaveopt import cost_model
from weaveopt.cli import model_file, model_source, preview
from weaveopt.cli.explain import request_of
from weaveopt.cli.layers import shortened
from weaveopt.cli.main import main, parser
from weaveopt.cli.model_source import CaptureRequest, Source
from weaveopt.cli.question import question
from weaveopt.integrations.transformers.layer_settings import values_of
from weaveopt.reporting.document_reader import from_json

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def _gemma4(num_layers: int) -> PreTrainedConfig:
    """Every sixth layer attends to all positions, with heads of another size."""
    own = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "hidden_size_per_layer_input": 0}
    config: PreTrainedConfig = CONFIG_MAPPING["gemma4_text"](**SIZES, **own, num_hidden_layers=num_layers)
    return config


def test_values_of_a_field_are_those_of_the_layers() -> None:
    config = _gemma4(12)
    with pytest.raises(Exception, match="per-layer attribute"):
        _ = config.head_dim
    assert values_of(config, "head_dim") == [16, 32]
    assert values_of(config, "num_key_value_heads") == [2]
    assert values_of(config, "num_experts_that_nobody_has") == [None]


def test_a_model_whose_layers_have_fields_of_their_own_is_explained(tmp_path: Path) -> None:
    _gemma4(6).save_pretrained(tmp_path)
    file = tmp_path / "report.json"
    words = ["--tp", "2", "--tokens", "64", "--machine", "h100x2", "--format", "json", "--output", str(file)]
    with without_sensitivity():
        assert main(["explain", str(tmp_path), *words]) == 0
    (graph,) = from_json(file.read_text(encoding="utf-8")).graphs
    assert sum(decision.site.count for decision in graph.decisions if decision.site.kind == "reduction") == 1 + 2 * 6


def test_fields_of_layers_that_are_cut_off_are_cut_too() -> None:
    config = shortened(_gemma4(18), 6)
    assert config.num_hidden_layers == 6 and values_of(config, "head_dim") == [16, 32]
    assert values_of(shortened(config, 5), "head_dim") == [16]


def test_ranks_divide_the_heads_of_every_layer() -> None:
    config = CONFIG_MAPPING["llama"](**{**SIZES, "num_attention_heads": 8, "num_key_value_heads": 8},
                                     num_hidden_layers=3, per_layer_config={1: {"num_key_value_heads": 4}})  # fmt: skip
    assert model_source._heads(Source("mine", config)) == (8, 4)
    assert model_source.default_ranks(Source("mine", config), 8, 1) == (4, 0)


@pytest.mark.parametrize(
    ("model_type", "nodes", "ranks"), [("gpt2", 1, (1, 0)), ("gpt2", 2, (8, 0)), ("gpt_oss", 1, (0, 8))]
)
def test_a_model_without_a_plan_is_explained_on_one_rank(model_type: str, nodes: int, ranks: tuple[int, int]) -> None:
    source = Source("mine", CONFIG_MAPPING[model_type](num_attention_heads=16))
    assert model_source.default_ranks(source, 8, nodes) == ranks


@pytest.mark.parametrize(("model_type", "seq"), [("gpt2", 1024), ("llama", 2048)])
def test_a_prompt_is_no_longer_than_the_model_has_positions(model_type: str, seq: int) -> None:
    given = parser().parse_args(["explain", "llama-3.3-70b"])
    del given.command
    asked = question(given)
    assert request_of(asked, Source("mine", CONFIG_MAPPING[model_type]()), cost_model.load("h100x8")).seq == seq


def test_a_residual_that_is_scaled_by_the_number_of_layers(tmp_path: Path) -> None:
    """A shorter model has another scale, and the same graph."""
    config = CONFIG_MAPPING["minicpm3"](**SIZES, num_hidden_layers=12)
    assert preview.plan_layers(Source("mine", config), CaptureRequest("mine", tp=2)).counts == (1, 10, 1)


def test_infinite_numbers_as_transformers_writes_them(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["granitemoehybrid"](**SIZES, num_hidden_layers=2, layer_types=["mamba", "attention"])
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    found = model_file.find(str(tmp_path))
    assert found is not None and found.fields["time_step_limit"] == [0.0, inf]
    assert model_source.load(str(tmp_path)).config.model_type == "granitemoehybrid"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": {"__float__": "much"}}))
    with pytest.raises(model_file.CaptureError, match="not JSON that can be read: ValueError"):
        model_file.find(str(tmp_path))


def test_modules_that_convert_themselves_are_built_of_fake_tensors() -> None:
    """As DeepSeek-V4's norms do, which torch refuses in place."""
    with FakeTensorMode(), preview._parameters_are_replaced():
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
        module[0].weight.requires_grad_(False)
        module = module.to(torch.float64)
    assert {each.dtype for each in module.parameters()} == {torch.float64}
    assert [each.requires_grad for each in module.parameters()] == [False, True, True, True]
    assert module[1].running_mean.dtype == torch.float64 and module[1].num_batches_tracked.dtype == torch.int64
    assert module[0].weight is next(iter(module.parameters()))
