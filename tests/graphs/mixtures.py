"""Experts of transformers' mixtures, tiny and random, in each of the forms that transformers has for them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

HIDDEN, WIDTH, EXPERTS = 24, 16, 5
FORMS = ("grouped_mm", "batched_mm")


@dataclass(frozen=True)
class Family:
    """A model family: the class of its experts in transformers, and the settings of its config apart from sizes."""

    name: str
    experts: str
    settings: tuple[tuple[str, str | float | bool], ...] = ()

    def __str__(self) -> str:
        return self.name


FAMILIES = (
    Family("mixtral", "MixtralExperts"),
    Family("qwen2_moe", "Qwen2MoeExperts"),
    Family("qwen3_moe", "Qwen3MoeExperts"),
    Family("deepseek_v3", "DeepseekV3Experts"),
    Family("glm4_moe", "Glm4MoeExperts"),
    Family("olmoe", "OlmoeExperts", (("hidden_act", "gelu"),)),
    Family("granitemoe", "GraniteMoeExperts", (("hidden_act", "gelu_pytorch_tanh"),)),
    Family("ernie4_5_moe", "Ernie4_5_MoeExperts", (("hidden_act", "relu"),)),
    Family("gpt_oss", "GptOssExperts", (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702))),
    Family("nemotron_h", "NemotronHExperts", (("mlp_hidden_act", "relu2"),)),
    Family("deepseek_v4", "DeepseekV4Experts", (("swiglu_limit", 1.5),)),
)
"""The families of the project's coverage, with activations that others have, experts without gates and with limits."""


def experts_of(family: Family, form: str, dtype: torch.dtype, remote: bool = False) -> torch.nn.Module:
    """The module, all its parameters random; with `remote`, as expert parallelism leaves it on one rank."""
    module = importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    config = _Config(**dict(family.settings), _experts_implementation=form)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made: torch.nn.Module = getattr(module, family.experts)(config).to(dtype)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn_like(parameter, dtype=torch.float32) * 0.3)
    made._is_expert_parallel = remote  # type: ignore[assignment]
    return made.eval()


class _Config(SimpleNamespace):
    """Any model's config, as far as experts read one."""

    def __getattr__(self, name: str) -> int | str | bool | float | None:
        if name.startswith("__"):
            raise AttributeError(name)
        if "expert" in name and ("num" in name or name.startswith("n_")):
            return EXPERTS
        if "hidden_act" in name or name.endswith("_act"):
            return "silu"
        if "latent" in name or name == "pretraining_tp":
            return None
        if "intermediate" in name:
            return WIDTH
        return HIDDEN if "size" in name or "dim" in name else 0


def routed(tokens: int, choices: int, dtype: torch.dtype, weights_dtype: torch.dtype, remote: bool) -> list[Tensor]:
    """Rows, the experts that they chose and the weights of these; with `remote`, some of no expert here."""
    generator = torch.Generator().manual_seed(tokens * 10 + choices)
    rows = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    scores = torch.randn(tokens, EXPERTS + (2 if remote else 0), generator=generator).softmax(-1)
    weights, experts = scores.topk(choices)
    if remote:
        weights = weights.masked_fill(experts >= EXPERTS, 0.0)
        experts = experts.clamp(max=EXPERTS)
    return [rows, experts, weights.to(weights_dtype)]
