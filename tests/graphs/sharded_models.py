"""Small mixtures of transformers whose experts are spread over ranks, each of which has its own batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from tests.graphs.models import FAMILIES, Family

MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
FAMILY_OF = {
    family.name: replace(family, settings={**family.settings, "num_key_value_heads": 4})
    for family in FAMILIES
    if family.name in MIXTURES and not family.expert_parallel
}
"""Heads for four ranks."""


def ids_of(seed: int, tokens: int) -> Tensor:
    return torch.randint(3, 100, (1, tokens), generator=torch.Generator().manual_seed(seed))


def sharded(
    folder: Path,
    family: Family,
    implementation: str,
    world: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PreTrainedModel:
    """Every rank has its own batch and all weights but those of other ranks' experts."""
    model = AutoModelForCausalLM.from_pretrained(str(folder / family.name), dtype=dtype).eval().to(device)
    mesh = init_device_mesh(device, (world, 1), mesh_dim_names=("experts", "batch"))
    plan = {
        name.replace("*", str(layer)): style
        for layer in range(model.config.num_hidden_layers)
        for name, style in model.ep_plan.items()
    }
    names = {*dict(model.named_modules()), *dict(model.named_parameters())}
    plan = {name: style for name, style in plan.items() if name in names}
    return apply_expert_parallelism(model, mesh["experts"], mesh["batch"], plan, implementation)
