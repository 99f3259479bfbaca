"""Whole steps of continuous batching on one GPU: in CUDA graphs, prepared while others run, and where no profile is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import weaveopt
from tests.graphs.batching import prompts, tokens
from tests.graphs.nonempty import some
from weaveopt.fabrics import gpus

pytestmark = pytest.mark.gpu
NEW_TOKENS = 20
CLOSE = 0.02
"""Share of the span of a position's logits by which a token chosen in bf16 may be below eager's."""


def model_of(layers: int = 2) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def batching(**settings: bool) -> ContinuousBatchingConfig:
    config = ContinuousBatchingConfig(page_size=64, num_blocks=256, max_batch_tokens=1024)
    for name, value in settings.items():
        setattr(config, name, value)
    return weaveopt.continuous_batching(config)["continuous_batching_config"]


def assert_chosen_as_eager(model: PreTrainedModel, asked: list[list[int]], answers: list[list[int]]) -> None:
    """Every token is eager's choice after what precedes it, but for rounding."""
    for prompt, answer in zip(some(asked), answers, strict=True):
        ids = torch.tensor([prompt + answer], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        picked = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        span = logits.amax(1) - logits.amin(1)
        assert bool((logits.amax(1) - picked <= CLOSE * span).all()), (prompt, answer)


def variants(model: PreTrainedModel) -> set[str]:
    report = weaveopt.report(model)
    [graph] = report.graphs
    assert report.breaks == ()
    return {each.chosen.variant for each in graph.decisions if each.site.kind == "attention"}


@pytest.mark.parametrize(
    "settings", [{}, {"use_cuda_graph": False, "use_async_batching": False}], ids=["graphs", "plain"]
)
def test_every_token_is_chosen_as_eager_does(settings: dict[str, bool]) -> None:
    torch._dynamo.reset()
    model, asked = model_of(), prompts(24, longest=150)
    answers = tokens(model, asked, batching(**settings), new=NEW_TOKENS)
    assert all(len(each) == NEW_TOKENS for each in answers)
    assert_chosen_as_eager(model, asked, answers)


def test_a_gpu_without_a_profile_times_its_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Nobody sets an option: times alone say that each request reads its own rows."""
    monkeypatch.delenv("WEAVE_TUNE_BUDGET_S", raising=False)
    monkeypatch.setenv("WEAVE_TUNE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    model, asked = model_of(), prompts(24, longest=150)
    other = {**gpus.describe(), "gpu": "NVIDIA X77", "bytes_per_s": 1_900_000_000_000}
    with mock.patch.object(gpus, "describe", lambda index=None: other):
        answers = tokens(model, asked, batching(), new=NEW_TOKENS)
    report = weaveopt.report(model)
    assert report.machine is not None and report.machine.stands_in_for == ("NVIDIA X77",)
    assert any("paged" in each.kernel for graph in report.graphs for each in graph.kernels)
    assert variants(model) == {"paged"}
    assert_chosen_as_eager(model, asked, answers)
