"""Tiny random models of many families, under the tensor- or expert-parallel plan that transformers ships for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

VOCABULARY = 128
WINDOW = 5
"""Positions that a sliding layer sees: fewer than the prompts of the tests have."""
_SMALL: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """A model type, and what its config needs besides the small sizes."""

    name: str
    settings: dict[str, int | float | bool | None] = field(default_factory=dict)
    expert_parallel: bool = False

    @property
    def id(self) -> str:
        return self.name + ("-ep" if self.expert_parallel else "")


_MIXTURE: dict[str, int | float | bool | None] = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: tuple[Family, ...] = (
    Family("llama"),
    Family("qwen2"),
    Family("qwen3"),
    Family("mistral", {"sliding_window": WINDOW}),
    Family("phi3"),
    Family("gemma2", {"sliding_window": WINDOW}),
    Family("gemma3_text", {"sliding_window": WINDOW}),
    Family("olmo2"),
    Family("granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}),
    Family("glm4"),
    Family("cohere"),
    Family("mixtral", _MIXTURE),
    Family("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    Family(
        "deepseek_v3",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "num_key_value_heads": 4,
        },
    ),
    Family("gpt_oss", _MIXTURE),
    Family("gpt_oss", _MIXTURE, expert_parallel=True),
    Family("mixtral", _MIXTURE, expert_parallel=True),
)


def one_layer(family: Family, **settings: int) -> Family:
    """For tests in which a second layer would show nothing; two where the first is a dense layer before mixtures."""
    layers = 2 if family.settings.get("first_k_dense_replace") else 1
    return replace(family, settings={**family.settings, "num_hidden_layers": layers, **settings})


def config_of(family: Family) -> PretrainedConfig:
    return CONFIG_MAPPING[family.name](**{**_SMALL, **family.settings})


def save(family: Family, folder: str) -> None:
    """Random weights, the same wherever this runs; norm weights are moved off their initial ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name:
                parameter.mul_(4.0)
    model.save_pretrained(folder)


def load(family: Family, folder: str, world: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """This rank's part of the model, as a user gets it."""
    parallel = DistributedConfig(tp_size=world, tp_plan="auto")
    if family.expert_parallel:
        parallel = DistributedConfig(tp_size=world, ep_size=world)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=parallel).eval()
