"""Logits processors as functions of tensors with fixed shapes.

transformers' own object runs inside the step if it reads nothing but the scores. If it reads the tokens, or their
number, it expects a tensor that grows; ours reads the padded history and a count on the device, and gives the same
scores. Values that change from call to call (a prompt's length) are stored in tensors, so that calls share one step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessor

from weaveopt.generation import nucleus
from weaveopt.records.candidate import Rejection

Processor: TypeAlias = hf.TopPLogitsWarper | hf.TypicalLogitsWarper

_CLASSES: dict[str, type[Processor]] = {each.__name__: each for each in (hf.TopPLogitsWarper, hf.TypicalLogitsWarper)}


@dataclass(frozen=True)
class History:
    """The tokens so far: `ids` `[batch, room]` int64, of which the first `count` (a scalar on the device) are there."""

    ids: Tensor
    count: Tensor


Apply = Callable[[Tensor, History, tuple[Tensor, ...]], Tensor]
"""Function of scores `[batch, vocabulary]` float32, the history, and the processor's numbers; returns scores."""


@dataclass(frozen=True)
class TensorProcessor:
    """A logits processor that can be captured."""

    name: str
    form: tuple[Hashable, ...]
    """Processors of one name and form are the same function of scores, history and numbers."""
    apply: Apply
    numbers: tuple[Tensor, ...] = ()
    """Values that differ between calls; the same shapes and dtypes for every processor of this form."""


def as_tensors(
    processors: Sequence[LogitsProcessor], batch: int
) -> tuple[TensorProcessor, ...] | tuple[Rejection, ...]:
    """Every processor as a function of tensors, or a rejection for each that is none."""
    found: list[TensorProcessor] = []
    rejected: list[Rejection] = []
    for at, processor in enumerate(processors):
        make = _MAKERS.get(type(processor))
        # Compared by exact type, as with makers: a user's own class was rejected and is none of `found`.
        joined = _top_k_and_top_p(processors[at - 1], processor) if found and make else None
        if joined is not None and found[-1].name == hf.TopKLogitsWarper.__name__:
            found[-1] = joined
            continue
        made = make(processor, batch) if make else None
        if made is None:
            name = type(processor).__name__
            message = f"logits processor {name} is not a function of tensors that weaveopt knows"
            rejected.append(Rejection("logits_processor", message, (("processor", name),)))
        else:
            found.append(made)
    return tuple(rejected) or tuple(found)


def apply_all(processors: Sequence[TensorProcessor], scores: Tensor, history: History, numbers: list[Tensor]) -> Tensor:
    """Apply all processors in order; `numbers` holds those of the first, then those of the second, and so on."""
    taken = 0
    for processor in processors:
        mine = tuple(numbers[taken : taken + len(processor.numbers)])
        taken += len(mine)
        scores = processor.apply(scores, history, mine)
    return scores


def _of_scores(*settings: str) -> Callable[[LogitsProcessor, int], TensorProcessor]:
    """transformers' own object, which ignores the tokens; `settings` are the attributes that it reads."""

    def make(processor: LogitsProcessor, _: int) -> TensorProcessor:
        form = tuple(_hashable(getattr(processor, name)) for name in settings)
        return TensorProcessor(
            type(processor).__name__, form, lambda scores, history, _: processor(history.ids, scores)
        )

    return make


def _by_sum(threshold: str) -> Callable[[Processor, int], TensorProcessor]:
    """transformers' own object within one operator; `threshold` is the attribute that it compares sums with."""

    def make(processor: Processor, _: int) -> TensorProcessor:
        name = type(processor).__name__
        limit, fill = float(getattr(processor, threshold)), float(processor.filter_value)
        least = int(processor.min_tokens_to_keep)

        def apply(scores: Tensor, history: History, _: tuple[Tensor, ...]) -> Tensor:
            kept: Tensor = torch.ops.weave.keep_by_sum.default(scores, name, limit, fill, least)
            return kept

        return TensorProcessor(name, (limit, fill, least), apply)

    return make


def _top_k_and_top_p(before: LogitsProcessor, processor: LogitsProcessor) -> TensorProcessor | None:
    """Apply both at once, if the second directly follows the first and removed tokens may not be chosen."""
    if not isinstance(before, hf.TopKLogitsWarper) or not isinstance(processor, hf.TopPLogitsWarper):
        return None
    if not before.filter_value == processor.filter_value == float("-inf"):
        return None
    k, p, least = int(before.top_k), float(processor.top_p), int(processor.min_tokens_to_keep)

    def apply(scores: Tensor, history: History, _: tuple[Tensor, ...]) -> Tensor:
        return torch.where(nucleus.kept(scores, k, p, least), scores, float("-inf"))

    return TensorProcessor("TopKTopP", (k, p, least), apply)


def _hashable(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.flatten().tolist())
    assert isinstance(value, Hashable), value
    return value


def _forbid_below(name: str, eos: Tensor, least: int) -> TensorProcessor:
    """`where(count < least, where(is_eos, -inf, scores), scores)`: minimum lengths."""
    ids = eos.flatten()

    def apply(scores: Tensor, history: History, numbers: tuple[Tensor, ...]) -> Tensor:
        forbidden = _listed(ids, scores) & (history.count < numbers[0])
        return torch.where(forbidden, float("-inf"), scores)

    return TensorProcessor(name, _hashable_ids(ids), apply, (_number(least),))


def _min_length(processor: hf.MinLengthLogitsProcessor, _: int) -> TensorProcessor:
    return _forbid_below("MinLength", processor.eos_token_id, processor.min_length)


def _min_new_tokens(processor: hf.MinNewTokensLengthLogitsProcessor, _: int) -> TensorProcessor:
    least = processor.prompt_length_to_skip + processor.min_new_tokens
    return _forbid_below("MinNewTokens", processor.eos_token_id, least)


def _suppress_at_begin(processor: hf.SuppressTokensAtBeginLogitsProcessor, _: int) -> TensorProcessor:
    ids = processor.begin_suppress_tokens.flatten()

    def apply(scores: Tensor, history: History, numbers: tuple[Tensor, ...]) -> Tensor:
        forbidden = _listed(ids, scores) & (history.count == numbers[0])
        return torch.where(forbidden, float("-inf"), scores)

    return TensorProcessor("SuppressTokensAtBegin", _hashable_ids(ids), apply, (_number(processor.begin_index),))


def _forced_eos(processor: hf.ForcedEOSTokenLogitsProcessor, _: int) -> TensorProcessor:
    ids = processor.eos_token_id.flatten()

    def apply(scores: Tensor, history: History, numbers: tuple[Tensor, ...]) -> Tensor:
        forced = torch.where(_listed(ids, scores), 0.0, float("-inf")).expand_as(scores)
        return torch.where(history.count == numbers[0], forced, scores)

    return TensorProcessor("ForcedEOSToken", _hashable_ids(ids), apply, (_number(processor.max_length - 1),))


def _repetition(processor: hf.RepetitionPenaltyLogitsProcessor, batch: int) -> TensorProcessor:
    penalty = float(processor.penalty)
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, Tensor):
        ignored = torch.full((batch,), int(ignored or 0))

    def apply(scores: Tensor, history: History, numbers: tuple[Tensor, ...]) -> Tensor:
        vocabulary = scores.shape[-1]
        places = torch.arange(history.ids.shape[1], device=scores.device)
        there = (places >= numbers[0][:, None]) & (places < history.count)
        # One extra column after the vocabulary collects padding, and ids that the head cannot make.
        ids = torch.where(there, history.ids, vocabulary).clamp(max=vocabulary)
        seen = torch.zeros(scores.shape[0], vocabulary + 1, dtype=torch.bool, device=scores.device)
        seen = seen.scatter(1, ids, True)[:, :vocabulary]
        return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    return TensorProcessor("RepetitionPenalty", (penalty,), apply, (ignored.to(torch.int64),))


def _bias(processor: hf.SequenceBiasLogitsProcessor, _: int) -> TensorProcessor:
    """`scores + bias`, where a sequence's bias is its last token's if the tokens before it are those that came last."""
    biases = {tuple(map(int, sequence)): float(bias) for sequence, bias in processor.sequence_bias.items()}
    of_length: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for sequence, bias in biases.items():
        of_length.setdefault(len(sequence) - 1, []).append((sequence, bias))

    def apply(scores: Tensor, history: History, _: tuple[Tensor, ...]) -> Tensor:
        added = torch.zeros_like(scores)
        device = scores.device
        for before, sequences in sorted(of_length.items()):
            last = torch.tensor([sequence[-1] for sequence, _ in sequences], device=device)
            amounts = torch.tensor([bias for _, bias in sequences], device=device)
            if before == 0:
                added = added.index_add(1, last, amounts.expand(scores.shape[0], -1))
                continue
            wanted = torch.tensor([sequence[:-1] for sequence, _ in sequences], device=device)
            places = history.count - before + torch.arange(before, device=device)
            found = history.ids[:, places.clamp(min=0)]
            matches = (found[:, None, :] == wanted).all(dim=-1) & (history.count >= before)
            added = added.index_add(1, last, torch.where(matches, amounts, 0.0))
        return scores + added

    return TensorProcessor("SequenceBias", tuple(sorted(biases.items())), apply)


def _listed(ids: Tensor, scores: Tensor) -> Tensor:
    vocabulary = torch.arange(scores.shape[-1], device=scores.device)
    return (vocabulary[:, None] == ids.to(scores.device)).any(dim=1)


def _number(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


def _hashable_ids(ids: Tensor) -> tuple[Hashable, ...]:
    return tuple(int(each) for each in ids.tolist())


_MAKERS: dict[type[LogitsProcessor], Callable[..., TensorProcessor]] = {
    hf.TemperatureLogitsWarper: _of_scores("temperature"),
    hf.TopKLogitsWarper: _of_scores("top_k", "filter_value", "min_tokens_to_keep"),
    hf.TopPLogitsWarper: _by_sum("top_p"),
    hf.MinPLogitsWarper: _of_scores("min_p", "filter_value", "min_tokens_to_keep"),
    hf.TypicalLogitsWarper: _by_sum("mass"),
    hf.EpsilonLogitsWarper: _of_scores("epsilon", "filter_value", "min_tokens_to_keep"),
    hf.LogitNormalization: _of_scores(),
    hf.InfNanRemoveLogitsProcessor: _of_scores(),
    hf.SuppressTokensLogitsProcessor: _of_scores("suppress_tokens"),
    hf.MinLengthLogitsProcessor: _min_length,
    hf.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    hf.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
    hf.ForcedEOSTokenLogitsProcessor: _forced_eos,
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
    hf.SequenceBiasLogitsProcessor: _bias,
    hf.NoBadWordsLogitsProcessor: _bias,
}
"""Makers by exact type: a user's subclass may do anything."""


_library = torch.library.Library("weave", "FRAGMENT")
_library.define(
    "keep_by_sum(Tensor scores, str processor, float threshold, float filter_value, int min_tokens_to_keep) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def keep_by_sum(
    scores: Tensor, processor: str, threshold: float, filter_value: float, min_tokens_to_keep: int
) -> Tensor:
    """Scores `[batch, vocabulary]` float32 -> the same, with `filter_value` where a token may not be chosen.

    `processor`: the name of transformers' class, which adds probabilities up over the vocabulary; `threshold`: its
    `top_p` or `mass`. The operator is opaque to compilers: transformers' own object runs, with torch's kernels,
    which are captured as they are. Inductor splits a cumulative sum of few rows over many blocks, and fails to
    compile that kernel if a mask reads the sum (torch 2.11, 16 rows of 128256).
    """
    made = _CLASSES[processor](threshold, filter_value=filter_value, min_tokens_to_keep=min_tokens_to_keep)
    # Neither class looks at the tokens.
    kept: Tensor = made(cast(torch.LongTensor, None), cast(torch.FloatTensor, scores))
    return kept


def _fake_keep_by_sum(
    scores: Tensor, processor: str, threshold: float, filter_value: float, min_tokens_to_keep: int
) -> Tensor:
    return torch.empty_like(scores)


_library.impl("keep_by_sum", keep_by_sum, "CUDA")
_library.impl("keep_by_sum", keep_by_sum, "CPU")
torch.library.register_fake("weave::keep_by_sum", _fake_keep_by_sum, lib=_library)
