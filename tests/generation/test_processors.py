"""Each logits processor as transformers has it, in whole calls and against the class itself."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessor

from tests.graphs.generating import assert_same, ours, ragged, steps_of, theirs
from weaveopt.generation.processors import History, apply_all, as_tensors

EOS = torch.tensor([5, 9])
VOCABULARY = 40
PADDED = torch.tensor([0, 3])
PROCESSORS: list[LogitsProcessor] = [
    hf.TemperatureLogitsWarper(0.7),
    hf.TopKLogitsWarper(5),
    hf.TopPLogitsWarper(0.8),
    hf.MinPLogitsWarper(0.1),
    hf.TypicalLogitsWarper(0.6),
    hf.EpsilonLogitsWarper(0.02),
    hf.LogitNormalization(),
    hf.InfNanRemoveLogitsProcessor(),
    hf.SuppressTokensLogitsProcessor([1, 7]),
    hf.SuppressTokensAtBeginLogitsProcessor([2, 3], 7),
    hf.MinLengthLogitsProcessor(9, EOS),
    hf.MinNewTokensLengthLogitsProcessor(6, 3, EOS),
    hf.ForcedEOSTokenLogitsProcessor(9, EOS),
    hf.RepetitionPenaltyLogitsProcessor(1.7),
    hf.RepetitionPenaltyLogitsProcessor(0.5, prompt_ignore_length=4),
    hf.NoBadWordsLogitsProcessor([[4], [11, 12], [8, 2, 6]], EOS),
    hf.SequenceBiasLogitsProcessor([[[4], 2.0], [[1, 2, 3], -3.0], [[1, 2, 6], 4.0]]),
]
if "Tensor" in str(inspect.signature(hf.RepetitionPenaltyLogitsProcessor).parameters["prompt_ignore_length"]):
    # transformers 5.17 takes one length for all rows only.
    PROCESSORS.append(hf.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=PADDED))


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda each: type(each).__name__)
def test_a_processor_gives_the_scores_of_its_class(processor: LogitsProcessor) -> None:
    numbers = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=numbers)
    ids[0, 5:8] = torch.tensor([11, 1, 2])
    ids[1, 4:9] = torch.tensor([11, 8, 2, 1, 2])
    found = as_tensors([processor], batch=2)
    (made,) = found
    assert not hasattr(made, "code"), made
    for count in (1, 6, 7, 8, 9, 12):
        scores = torch.randn(2, VOCABULARY, generator=numbers) * 3
        scores[0, 3], scores[1, 30] = float("inf"), -float("inf")
        if isinstance(processor, hf.LogitNormalization | hf.TypicalLogitsWarper | hf.TopPLogitsWarper):
            scores[0, 3] = 1.0
        room = torch.full((2, 20), 39)
        room[:, :count] = ids[:, :count]
        history = History(room, torch.tensor(count))
        got = apply_all([made], scores.clone(), history, list(made.numbers))
        want = processor(ids[:, :count], scores.clone())
        assert torch.equal(torch.nan_to_num(got, nan=77.0), torch.nan_to_num(want, nan=77.0)), count


def _scores(kind: str, batch: int, vocabulary: int, numbers: torch.Generator) -> torch.Tensor:
    scores = torch.randn(batch, vocabulary, generator=numbers) * 3
    if kind == "rounded":
        return scores.bfloat16().float()
    if kind == "many equal":
        return (scores / 2).round()
    if kind == "few":
        scores[torch.rand(batch, vocabulary, generator=numbers) < 0.8] = float("-inf")
        scores[:, 0] = 1.0
    return scores


@pytest.mark.parametrize("kind", ["all different", "rounded", "many equal", "few"])
@pytest.mark.parametrize("k", [1, 5, 50, 300])
def test_top_k_and_top_p_are_one_processor(kind: str, k: int) -> None:
    """As many are kept of every score; of equal ones the last, where transformers' sort leaves it open."""
    numbers = torch.Generator().manual_seed(k)
    for vocabulary, p, least in itertools.product((7, 64, 1000), (0.0, 0.3, 0.9, 0.999, 1.0), (1, 3)):
        pair = [hf.TopKLogitsWarper(k, min_tokens_to_keep=least), hf.TopPLogitsWarper(p, min_tokens_to_keep=least)]
        found = as_tensors(pair, batch=2)
        (made,) = found
        assert made.name == "TopKTopP"
        for batch in (1, 3):
            scores = _scores(kind, batch, vocabulary, numbers)
            got = apply_all([made], scores, History(torch.zeros(batch, 1), torch.tensor(1)), [])
            want = pair[1](None, pair[0](None, scores))
            assert torch.equal(got.sort().values, want.sort().values), (vocabulary, p, least, batch)
            chosen = got > float("-inf")
            assert torch.equal(got[chosen], scores[chosen])
            # From the smallest score to the largest, of equal ones from the first to the last: a tail stays.
            in_order = chosen.gather(1, scores.sort(stable=True).indices)
            assert torch.equal(in_order, in_order.sort().values), (vocabulary, p, least, batch)


def test_top_p_alone_or_elsewhere_is_transformers_own() -> None:
    processors = [hf.TopPLogitsWarper(0.9), hf.TopKLogitsWarper(5), hf.MinPLogitsWarper(0.1), hf.TopPLogitsWarper(0.5)]
    names = [each.name for each in as_tensors(processors, batch=1)]  # type: ignore[union-attr]
    assert names == [type(each).__name__ for each in processors]
    filled = [hf.TopKLogitsWarper(5, filter_value=-9.0), hf.TopPLogitsWarper(0.9, filter_value=-9.0)]
    assert [each.name for each in as_tensors(filled, batch=1)] == [type(each).__name__ for each in filled]  # type: ignore[union-attr]


SETTINGS = [
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 12, "eos_token_id": [5, 6, 7], "pad_token_id": 0},
    {"bad_words_ids": [[17], [20, 21]], "suppress_tokens": [3, 4], "begin_suppress_tokens": [8]},
    {"forced_eos_token_id": 5, "remove_invalid_values": True, "renormalize_logits": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: "-".join(each))
def test_whole_calls_with_processors(llama: PreTrainedModel, settings: dict[str, object]) -> None:
    inputs = ragged()
    assert_same(ours(llama, inputs, **settings), theirs(llama, inputs, **settings))
    assert steps_of(llama) == (1, 1)


def test_numbers_of_a_call_are_not_those_of_the_one_before(llama: PreTrainedModel) -> None:
    """Lengths of prompts and minimum lengths differ, the step is the same."""
    for length, least in ((20, 4), (25, 9), (18, 2)):
        inputs = ragged(2, length)
        settings = {"min_new_tokens": least, "eos_token_id": list(range(3, 90)), "pad_token_id": 0}
        settings |= {"repetition_penalty": 1.2}
        assert_same(ours(llama, inputs, **settings), theirs(llama, inputs, **settings))
    assert steps_of(llama) == (1, 3)


def test_processors_compile(llama: PreTrainedModel) -> None:
    """Into one graph; sampling makes no difference to what the processors give."""
    settings = {
        "repetition_penalty": 1.2, "bad_words_ids": [[17], [20, 21]], "min_new_tokens": 3, "eos_token_id": [5],
        "pad_token_id": 0, "suppress_tokens": [4], "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9,
        "temperature": 0.8, "do_sample": True,
    }  # fmt: skip
    inputs = ragged()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(3)
    found = ours(llama, inputs, "aot_eager", **settings)
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.manual_seed(3)
    assert_same(found, theirs(llama, inputs, **settings))
