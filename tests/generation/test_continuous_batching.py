"""`generate_batch` compiled with weave: tokens are eager's, and the report says what keeps it from being one graph."""

from __future__ import annotations

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import weaveopt
from tests.graphs.executing import without_code
from tests.graphs.generating import build

PROMPTS = [list(range(3, 12))]


def tokens(model: PreTrainedModel, compiled: CompileConfig | None) -> list[list[int]]:
    batching = ContinuousBatchingConfig(
        num_blocks=16, page_size=16, max_batch_tokens=32, use_cuda_graph=False, varlen_compile_config=compiled
    )
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    found = model.generate_batch(
        inputs=PROMPTS, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    assert [each.error for each in found.values()] == [None] * len(PROMPTS)
    return [found[f"req_{at}"].generated_tokens for at in range(len(PROMPTS))]


def test_compiled_batches_make_eagers_tokens() -> None:
    """Everything of weave but Inductor's code, whose C++ takes half a minute to compile."""
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    eager = tokens(model, None)
    with without_code():
        assert tokens(model, CompileConfig(backend="weave", mode="default", dynamic=True)) == eager
    report = weaveopt.report(model)
    assert report.num_graphs > 2 and report.graphs
    assert any("PagedAttentionCache.update" in found.reason + found.hint for found in report.breaks), report.breaks
    assert "graph break" in str(report)
