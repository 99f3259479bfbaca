"""The same tokens, scores and logits as transformers' loop, for every kind of model and prompt."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.graphs.generating import assert_same, build, ours, ragged, steps_of, theirs

WINDOW = {"sliding_window": 8}
"""Shorter than the prompt."""
WIDE_WINDOW = {"sliding_window": 30}
"""Longer than the prompt, and passed while tokens are made."""
CASES = [
    ("llama", {}),
    ("qwen3", {}),
    ("gemma2", WINDOW),
    ("gemma3_text", WIDE_WINDOW),
    ("mistral", WINDOW),
    ("mistral", WIDE_WINDOW),
    ("gpt_oss", WINDOW),
    ("phi3", {}),
    ("cohere", {}),
    ("mixtral", {}),
    ("deepseek_v3", {}),
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda value: str(value))
def test_greedy_tokens_are_transformers(name: str, settings: dict[str, int]) -> None:
    model = build(name, **settings)
    inputs = ragged()
    assert_same(ours(model, inputs, max_new_tokens=24), theirs(model, inputs, max_new_tokens=24))
    assert steps_of(model) == (1, 1)


@pytest.mark.parametrize(("name", "settings"), [("llama", {}), ("gemma2", WINDOW), ("gpt_oss", WINDOW)])
def test_compiled_steps_make_the_same_tokens(name: str, settings: dict[str, int]) -> None:
    """`aot_eager` makes every write to the buffers explicit, as Inductor sees them."""
    model = build(name, **settings)
    inputs = ragged()
    torch._dynamo.utils.counters.clear()
    found = ours(model, inputs, "aot_eager", max_new_tokens=24)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "the model, and what chooses"
    assert_same(found, theirs(model, inputs, max_new_tokens=24))


def test_static_cache_is_the_same(llama: PreTrainedModel) -> None:
    inputs = ragged()
    wanted = theirs(llama, inputs, cache_implementation="static")
    assert_same(ours(llama, inputs, cache_implementation="static"), wanted)
    assert steps_of(llama) == (1, 1)


@pytest.mark.parametrize(("batch", "length", "new"), [(1, 1, 5), (1, 9, 1), (2, 70, 12), (4, 20, 45)])
def test_shapes(llama: PreTrainedModel, batch: int, length: int, new: int) -> None:
    inputs = ragged(batch, length) if length > 16 else {"input_ids": torch.arange(3, 3 + batch * length)[None]}
    wanted = theirs(llama, inputs, max_new_tokens=new)
    assert_same(ours(llama, inputs, max_new_tokens=new), wanted)


def test_a_plain_call_returns_tokens(llama: PreTrainedModel) -> None:
    inputs = ragged()
    plain = {"return_dict_in_generate": False, "output_scores": False, "output_logits": False}
    found = ours(llama, inputs, **plain)
    assert isinstance(found, torch.Tensor) and torch.equal(found, theirs(llama, inputs, **plain))


def test_stale_values_of_an_earlier_call_do_not_get_through(llama: PreTrainedModel) -> None:
    """A cache is used again; 0 * NaN would be NaN."""
    from weaveopt.generation.sessions import sessions_of

    inputs = ragged()
    wanted = ours(llama, inputs)
    for layer in sessions_of(llama)[-1].cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    assert_same(ours(llama, inputs), wanted)


def test_inference_mode_and_no_grad_share_a_session(llama: PreTrainedModel) -> None:
    inputs = ragged()
    with torch.inference_mode():
        first = ours(llama, inputs)
    assert_same(ours(llama, inputs), first)
    assert steps_of(llama) == (1, 2)


def test_processors_read_in_inference_mode_serve_later_calls(llama: PreTrainedModel) -> None:
    """Their numbers are kept with the session, and later calls write their own there."""
    inputs = ragged()
    with torch.inference_mode():
        first = ours(llama, inputs, repetition_penalty=1.3)
    again = ours(llama, inputs, repetition_penalty=1.3)
    assert_same(again, first)
