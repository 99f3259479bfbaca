"""Calls that transformers' own loop takes: its result, and every reason in the report."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FalconConfig, GPTNeoConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

import weaveopt
from tests.graphs.generating import Heard, assert_same, build, ours, ragged, theirs
from weaveopt.integrations.transformers.cache_argument import with_cache
from weaveopt.records.generation import GenerationReport, LeftCall
from weaveopt.records.report import Report
from weaveopt.reporting.document import to_json
from weaveopt.reporting.document_reader import from_json
from weaveopt.reporting.text import text


class Mine(TemperatureLogitsWarper):
    """A user's subclass of a known processor may do anything."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, dims=-1)


class Never(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


CASES: list[tuple[dict[str, object], str, str]] = [
    ({"logits_processor": LogitsProcessorList([Mine(2.0)])}, "_sample", "logits_processor"),
    ({"stopping_criteria": StoppingCriteriaList([Never()])}, "_sample", "stopping_criterion"),
    ({"num_beams": 2}, "_beam_search", "mode"),
    ({"output_hidden_states": True}, "_sample", "outputs"),
    ({"max_time": 100.0}, "_sample", "stopping_criterion"),
    ({"no_repeat_ngram_size": 2}, "_sample", "logits_processor"),
    ({"use_cache": False}, "_sample", "cache"),
    ({"prefill_chunk_size": 8}, "_sample", "chunked_prefill"),
]


@pytest.mark.parametrize(("settings", "loop", "code"), CASES, ids=lambda value: str(value)[:40])
def test_a_call_that_is_left(llama: PreTrainedModel, settings: dict[str, object], loop: str, code: str) -> None:
    inputs, heard = ragged(2), Heard() if loop == "_sample" else None
    found = ours(llama, inputs, streamer=heard, **settings)
    assert torch.equal(found.sequences, theirs(llama, inputs, **settings).sequences)  # type: ignore[attr-defined]
    assert heard is None or (len(heard.tokens), heard.ends) == (17, 1), "streamers get their tokens in any loop"
    (left,) = weaveopt.report(llama).generation.left
    assert left.loop == loop and code in [reason.code for reason in left.reasons]
    assert left.reasons[0].message in str(weaveopt.report(llama)).replace("\n", " ")


def test_every_reason_is_told() -> None:
    model = build("llama")
    settings = {"no_repeat_ngram_size": 2, "max_time": 100.0}
    for _ in range(2):
        ours(model, ragged(), **settings)
    (left,) = weaveopt.report(model).generation.left
    assert [reason.code for reason in left.reasons] == ["stopping_criterion", "logits_processor"]
    assert left.count == 2


def test_an_assistant_model_is_found(llama: PreTrainedModel) -> None:
    model, inputs = build("llama"), ragged(1)
    found = ours(model, inputs, assistant_model=llama, output_scores=False, output_logits=False)
    assert torch.equal(found.sequences, theirs(model, inputs).sequences)  # type: ignore[attr-defined]
    assert "_assisted_decoding" in [left.loop for left in weaveopt.report(model).generation.left]


def test_what_transformers_checks_is_checked(llama: PreTrainedModel) -> None:
    """A function in `custom_generate` gets none of the arguments that these errors are about."""
    smaller = build("llama", vocab_size=100)
    for settings, words in (
        ({"num_beams": 2, "streamer": Heard()}, "cannot be used with beam search"),
        ({"assistant_model": smaller, "output_scores": False, "output_logits": False}, "different tokenizers"),
        ({"assistant_model": build("llama"), "do_sample": True, "num_return_sequences": 2}, "has to be 1"),
    ):
        for call in (theirs, ours):
            with pytest.raises(ValueError, match=words):
                call(llama, ragged(1), **settings)


def test_tokenizers_and_the_input_of_an_encoder_are_found(llama: PreTrainedModel) -> None:
    tokenizer, seen = object(), []

    def assisted(
        self: PreTrainedModel, input_ids: Tensor, inputs_tensor: Tensor, tokenizer: object,
        assistant_tokenizer: object, **_: object,
    ) -> Tensor:  # fmt: skip
        seen.append((inputs_tensor, tokenizer, assistant_tokenizer))
        return input_ids

    inputs = ragged(1)
    with mock.patch.object(type(llama), "_assisted_decoding", assisted):
        settings = {"tokenizer": tokenizer, "assistant_tokenizer": tokenizer}
        ours(llama, inputs, assistant_model=build("llama", vocab_size=100), **settings)
    ((tensor, *tokenizers),) = seen
    assert tokenizers == [tokenizer, tokenizer] and torch.equal(tensor, inputs["input_ids"])


def test_caches_that_are_too_short_or_of_another_batch_are_transformers_to_refuse(llama: PreTrainedModel) -> None:
    def filled(cache: Cache) -> Cache:
        with torch.no_grad():
            llama(input_ids=torch.ones(1, 4, dtype=torch.int64), **with_cache(cache))
        return cache

    whole = {"input_ids": torch.ones(3, 6, dtype=torch.int64)}
    for inputs, make, wanted in (
        (ragged(), lambda: StaticCache(config=llama.config, max_cache_len=24), "out of bounds"),
        (whole, lambda: filled(StaticCache(config=llama.config, max_cache_len=40)), "same slice shapes"),
        (whole, lambda: filled(DynamicCache(config=llama.config)), "Sizes of tensors must match"),
    ):
        for call in (theirs, ours):
            with pytest.raises((IndexError, RuntimeError), match=wanted):
                call(llama, inputs, past_key_values=make())
    exact = [StaticCache(config=llama.config, max_cache_len=20 + 16 - 1) for _ in range(2)]
    assert_same(ours(llama, ragged(), past_key_values=exact[0]), theirs(llama, ragged(), past_key_values=exact[1]))
    assert [left.reasons[0].code for left in weaveopt.report(llama).generation.left] == ["cache"] * 2


@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_that_is_longer_than_the_prompt(llama: PreTrainedModel, padded: bool) -> None:
    """A mask of ones is dropped by transformers, which keeps its length."""
    inputs = ragged(2)
    mask = inputs["attention_mask"] if padded else torch.ones_like(inputs["attention_mask"])
    inputs["attention_mask"] = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], dim=1)
    assert torch.equal(ours(llama, inputs).sequences, theirs(llama, inputs).sequences)  # type: ignore[attr-defined]
    (left,) = weaveopt.report(llama).generation.left
    assert "23 positions, for 20 tokens" in left.reasons[0].message


@pytest.mark.parametrize("name", ["t5"])
def test_models_of_another_kind(name: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).eval()
    inputs = {"input_ids": torch.arange(3, 12)[None]}
    found, wanted = ours(model, inputs), theirs(model, inputs)
    assert torch.equal(found.sequences, wanted.sequences)  # type: ignore[attr-defined]
    (left,) = weaveopt.report(model).generation.left
    assert "encoder_decoder" in [reason.code for reason in left.reasons]


def test_the_report_as_json_and_back(llama: PreTrainedModel) -> None:
    ours(llama, ragged())
    ours(llama, ragged(), no_repeat_ngram_size=2)
    report = weaveopt.report(llama)
    written = to_json(report)
    assert from_json(written).generation == report.generation
    step = json.loads(written)["generate"]["steps"][-1]
    assert step["steps"] == 15 and 0 < step["host_share"] < 1
    assert "generate: batch 3, cache of 64, greedy" in text(report)


def test_reports_from_before_it_are_read() -> None:
    document = json.loads(to_json(Report("m", 1, None)))
    del document["generate"]
    assert from_json(json.dumps(document)).generation == GenerationReport()
    assert LeftCall("_sample", ()).count == 1


def test_a_model_that_does_not_run_with_a_mask_of_four_dimensions() -> None:
    """Falcon with ALiBi makes its biases from a mask [batch, positions]."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128}
    model = AutoModelForCausalLM.from_config(FalconConfig(**sizes, alibi=True, pad_token_id=0)).eval()
    inputs = ragged(2)
    found = ours(model, inputs)
    assert torch.equal(found.sequences, theirs(model, inputs).sequences)  # type: ignore[attr-defined]
    (left,) = weaveopt.report(model).generation.left
    assert [reason.code for reason in left.reasons] == ["step"] and "ValueError" in str(left.reasons[0].values)


def test_a_model_whose_masks_go_by_the_length_of_its_keys() -> None:
    """GPT-Neo hides keys by how many there are, so a static cache makes other tokens; transformers says so."""
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128, "max_position_embeddings": 64}
    config = GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]], window_size=5)
    model = AutoModelForCausalLM.from_config(config).eval()
    inputs = ragged(2)
    found = ours(model, inputs)
    assert torch.equal(found.sequences, theirs(model, inputs).sequences)  # type: ignore[attr-defined]
    (left,) = weaveopt.report(model).generation.left
    assert [reason.code for reason in left.reasons] == ["static_cache"]
