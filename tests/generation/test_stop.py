"""Ends of sequences, and the tokens that streamers get."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import weaveopt
from tests.graphs.generating import Heard, assert_same, ours, ragged, steps_of, theirs


def ends(model: PreTrainedModel, batch: int) -> list[int]:
    """For each row, the token whose first occurrence is the latest."""
    free = theirs(model, ragged(batch), max_new_tokens=16).sequences[:, 20:].tolist()  # type: ignore[attr-defined]
    return [max(row, key=row.index) for row in free]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_sequences_end_at_any_of_several_tokens(llama: PreTrainedModel, batch: int, streamed: bool) -> None:
    inputs, eos = ragged(batch), ends(llama, batch)
    heard = [Heard() if streamed and batch == 1 else None for _ in range(2)]
    arguments = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": 40}
    wanted = theirs(llama, inputs, streamer=heard[0], **arguments)
    found = ours(llama, inputs, streamer=heard[1], **arguments)
    assert 23 < wanted.sequences.shape[1] < 60, "the case ends midway"  # type: ignore[attr-defined]
    assert_same(found, wanted)
    if heard[0] and heard[1]:
        assert heard[0].ends == heard[1].ends == 1
        assert [each.tolist() for each in heard[0].tokens] == [each.tolist() for each in heard[1].tokens]


def test_a_streamer_gets_every_token_of_a_batch_in_order(llama: PreTrainedModel) -> None:
    """transformers does not pass streamers to a function in `custom_generate`; it still gets them."""
    inputs, heard = ragged(), Heard()
    found = ours(llama, inputs, streamer=heard)
    prompt, *tokens = heard.tokens
    assert torch.equal(prompt, inputs["input_ids"]) and heard.ends == 1
    assert torch.equal(torch.stack(tokens, dim=1), found.sequences[:, 20:])  # type: ignore[attr-defined]


def test_max_length_ends_all(llama: PreTrainedModel) -> None:
    inputs = ragged()
    found = ours(llama, inputs, max_new_tokens=None, max_length=27)
    assert found.sequences.shape == (3, 27)  # type: ignore[attr-defined]
    assert_same(found, theirs(llama, inputs, max_new_tokens=None, max_length=27))


def test_no_step_runs_beyond_the_stop_where_nothing_is_late(llama: PreTrainedModel) -> None:
    eos = ends(llama, 1)
    ours(llama, ragged(1), eos_token_id=eos, pad_token_id=0, max_new_tokens=40)
    (step,) = weaveopt.report(llama).generation.steps
    assert 0 < step.steps < 16 and step.beyond_stop == 0
    assert steps_of(llama) == (1, 1)
