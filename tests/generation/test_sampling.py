"""Sampling: the distribution is transformers', and a seed gives the same tokens again."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tests.graphs.generating import assert_same, ours, ragged, theirs


def test_a_seed_gives_transformers_own_samples(llama: PreTrainedModel) -> None:
    """The draw is the one of `torch.multinomial`: with the same kernels the very same tokens."""
    inputs = ragged()
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 50}
    torch.manual_seed(11)
    wanted = theirs(llama, inputs, **settings)
    torch.manual_seed(11)
    first = ours(llama, inputs, **settings)
    following = ours(llama, inputs, **settings)
    assert_same(first, wanted)
    assert not torch.equal(first.sequences, following.sequences)  # type: ignore[attr-defined]
    torch.manual_seed(11)
    assert_same(ours(llama, inputs, **settings), first)


def test_several_sequences_of_a_prompt_differ(llama: PreTrainedModel) -> None:
    torch.manual_seed(0)
    inputs = {"input_ids": ragged(1)["input_ids"]}
    found = ours(llama, inputs, do_sample=True, num_return_sequences=4).sequences  # type: ignore[attr-defined]
    assert found.shape == (4, 36) and len({tuple(row.tolist()) for row in found}) == 4
