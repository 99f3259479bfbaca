"""The parts of the decode benchmark that need no GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.suite import Asked, UsageError
from benchmarks.suites import generate
from benchmarks.suites.generate import LAYERS, SHAPES, Case, bytes_read, cases, num_layers


@pytest.mark.parametrize(("name", "tied"), [("8b", False), ("1b", True)])
def test_bytes_that_a_step_reads(name: str, tied: bool) -> None:
    """An embedding that is not also the head counts only the rows of the step's tokens."""
    config = LlamaConfig(**{**SHAPES[name].to_diff_dict(), "num_hidden_layers": 2})
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    head_dim, vocabulary = config.head_dim, config.vocab_size * config.hidden_size
    layer = 2 * config.hidden_size * (32 + 8) * head_dim + 3 * config.hidden_size * config.intermediate_size
    norms = 5 * config.hidden_size
    weights = 2 * layer + norms + vocabulary + (0 if tied else 16 * config.hidden_size)
    filled = 2 * 2 * 16 * 8 * head_dim * 160
    assert bytes_read(model, 16, 160) == 2 * (weights + filled)


def test_arguments() -> None:
    given = {"models": "1b", "layers": "4", "batches": "1", "variants": "weave,inductor_graphs", "choices": "greedy"}
    asked = Asked("gpu", values=given)
    assert cases(asked) == [Case("1b", 1, "greedy")] and asked.of(LAYERS) == 4
    assert num_layers("1b", 4) == 4 and num_layers("1b", 99) == num_layers("1b", 0) == 16
    for wrong in ({"variants": "eager,inductor"}, {"new_tokens": "4"}, {"models": "7b"}):
        with pytest.raises(UsageError):
            cases(Asked("gpu", values=wrong))


def test_a_step_is_the_time_between_tokens_once_all_is_recorded() -> None:
    clock = generate.TokenClock([0.0, 10.0, 20.0, 30.0, 40.0, *[50.0 + at for at in range(9)]])
    assert clock.step_us() == pytest.approx(1e6)
