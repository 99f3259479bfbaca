"""Requests for `generate_batch`, its config with a small cache, and the tokens that it finds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api

import weaveopt

# It has Python look for garbage twice a call, through all that was traced: most of what a call takes.
continuous_api.gc = SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined]

MOST_TOKENS = 128
"""More than a step has. Up to here choices are looked for by token count, which takes as long as tracing up to 8192."""


def prompts(count: int, seed: int = 0, longest: int = 20) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, 120) for _ in range(numbers.randint(1, longest))] for _ in range(count)]


def batching(compiled: CompileConfig | None = None, num_blocks: int = 32) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        num_blocks=num_blocks, page_size=16, max_batch_tokens=64, use_cuda_graph=False, varlen_compile_config=compiled
    )


def tokens(
    model: PreTrainedModel, inputs: Sequence[list[int]], config: ContinuousBatchingConfig, new: int = 5
) -> list[list[int]]:
    how = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)
    found = model.generate_batch(
        inputs=list(inputs), generation_config=how, continuous_batching_config=config, progress_bar=False
    )
    assert [each.error for each in found.values()] == [None] * len(inputs)
    return [found[f"req_{at}"].generated_tokens for at in range(len(inputs))]


def compiled(options: dict[str, object] | None = None, **settings: int) -> ContinuousBatchingConfig:
    options = {"max_tokens": MOST_TOKENS, **(options or {})}
    return weaveopt.continuous_batching(batching(**settings), options)["continuous_batching_config"]  # type: ignore[arg-type]
