"""Unmodified models of the mixture families on one GPU, in prefill, in decode and in CUDA graphs: as in eager."""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import weaveopt
from tests.gpu.captured import captured

pytestmark = pytest.mark.gpu
Settings = dict[str, int | float | bool | None]
LAYERS = 2
_SIZES: Settings = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LOCAL: Settings = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128}
_NAMED: Settings = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
_LATENT: Settings = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "num_key_value_heads": 4,
}  # fmt: skip
_ROUTED: Settings = {
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0,
    "moe_intermediate_size": 128, "n_shared_experts": 1,
}  # fmt: skip
FAMILIES: dict[str, Settings] = {
    "mixtral": _LOCAL,
    "qwen2_moe": {**_NAMED, "shared_expert_intermediate_size": 256},
    "qwen3_moe": _NAMED,
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128},
    "granitemoe": _LOCAL,
    "gpt_oss": _LOCAL,
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "glm4_moe": _ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 128, "moe_layer_start_index": 0},
}
OPTIONS = {"machine": "h200x4", "force": ["moe_fused"], "strict": True}
SLACK = 0.01


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**_SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name and "lm_head" not in name:
                parameter.mul_(4.0)
    for module in model.modules():
        # transformers 5.17 hangs hooks of the backward pass on norms of queries and keys, at which graphs break.
        module._backward_hooks.clear()
        module._is_full_backward_hook = None
    return model


def prompt(batch: int, length: int, seed: int) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(3, 512, (batch, length), device="cuda", generator=random)


def logits_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def errors(got: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Relative errors of the positions' logits: the median, and the fraction that is off by a tenth or more.

    Where two experts are nearly equally likely, rounding picks either, so a few positions are always off.
    """
    off = (got.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(off.median()), float((off > 0.1).float().mean())


def check(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """As near to the model in fp32 as eager bf16 is."""
    (median, far), (eager_median, eager_far) = errors(got, exact), errors(eager, exact)
    assert median <= 1.3 * eager_median + SLACK, f"{what}: off by {median:.4f}, eager by {eager_median:.4f}"
    assert far <= 1.5 * eager_far + 5 * SLACK, f"{what}: {far:.2%} of the positions are off, of eager {eager_far:.2%}"


def exactly(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).float()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_eager(family: str) -> None:
    model = make(family)
    exact = exactly(model)
    compiled = torch.compile(model, backend="weave", options=OPTIONS, dynamic=False)  # type: ignore[call-overload]
    for batch, length in ((1, 7), (2, 150), (64, 1), (1, 601)):
        tokens = prompt(batch, length, length)
        want, best = (each(tokens, use_cache=False).logits for each in (model, exact))
        check(compiled(tokens, use_cache=False).logits, want, best, f"{batch} x {length}")
    graphs = weaveopt.report(compiled).graphs
    chosen = [d for graph in graphs for d in graph.decisions if d.site.kind == "mixture"]
    assert len(chosen) == 4 * LAYERS and all(d.rewritten for d in chosen), [d.chosen for d in chosen]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_captured_graphs_read_other_tokens(family: str) -> None:
    model = make(family)
    exact = exactly(model)
    compiled = torch.compile(model, backend="weave", options=OPTIONS, dynamic=False)  # type: ignore[call-overload]
    for batch, length in ((32, 1), (1, 600)):
        tokens = prompt(batch, length, 1)
        graph, result = captured(partial(logits_of, compiled, tokens))
        for seed in (2, 3):
            tokens.copy_(prompt(batch, length, seed))
            graph.replay()
            want, best = (each(tokens, use_cache=False).logits for each in (model, exact))
            check(result, want, best, f"{batch} x {length}, seed {seed}")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_generate_makes_the_tokens_of_eager(family: str) -> None:
    """`generate` decodes with another form of the experts than it reads the prompt with."""
    from transformers import CompileConfig

    model = make(family)
    asked = {
        "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "cache_implementation": "static",
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    tokens = prompt(4, 9, 5)
    mask = torch.ones_like(tokens)
    want = model.generate(tokens, attention_mask=mask, disable_compile=True, **asked)
    config = CompileConfig(backend="weave", mode=None, options=OPTIONS, fullgraph=False)
    got = model.generate(tokens, attention_mask=mask, compile_config=config, **asked)
    offs = []
    for row in range(len(tokens)):
        # Up to the first token that differs both read the same; there two were about as likely.
        differing = (got.sequences[row] != want.sequences[row]).nonzero()
        alike = (int(differing[0]) if len(differing) else got.sequences.shape[1]) - tokens.shape[1]
        for step in range(min(alike + 1, 12)):
            offs.append(errors(got.logits[step][row], want.logits[step][row].float())[0])
    assert len(offs) >= 24 and statistics.median(offs) < 0.05, offs
    modes = [d.rewritten for g in weaveopt.report().graphs[-1:] for d in g.decisions if d.site.kind == "mixture"]
    assert modes == [True] * LAYERS, modes
