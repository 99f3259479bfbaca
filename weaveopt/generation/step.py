"""One decode step as functions of tensors: what the model runs, and how a token is chosen."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache

from weaveopt.generation.masks import MaskForm, masks
from weaveopt.generation.nucleus import in_parts
from weaveopt.generation.processors import History, TensorProcessor, apply_all
from weaveopt.integrations.transformers.cache_argument import cache_argument

_CACHE = cache_argument()
"""Read here, as Dynamo would trace the look-up inside of a step."""


@dataclass
class Buffers:
    """Tensors that a step reads and writes, on the model's device. A captured step refers to them by address."""

    ids: Tensor
    """`[batch, 1]` int64: the tokens that the next step feeds to the model."""
    positions: Tensor
    """`[batch, 1]` int64: their position ids."""
    length: Tensor
    """Scalar int64: positions in the cache."""
    padding: Tensor
    """`[batch, slots]` bool: false where a position is padding."""
    history: Tensor
    """`[batch, slots + 1]` int64: all tokens, the prompt's first."""
    count: Tensor
    """Scalar int64: tokens in `history`."""
    unfinished: Tensor
    """`[batch]` bool."""
    step_output: Tensor
    """`[batch + 1]` int64: the newest tokens, and whether any sequence is unfinished. Copied to the host."""

    @staticmethod
    def make(batch: int, slots: int, device: torch.device) -> Buffers:
        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        flags = torch.ones(batch, slots, dtype=torch.bool, device=device)
        return Buffers(
            whole(batch, 1), whole(batch, 1), whole(), flags, whole(batch, slots + 1), whole(), flags[:, 0].clone(),
            whole(batch + 1),
        )  # fmt: skip


@dataclass
class ChoosingForm:
    """How a token is chosen. Steps of one form are the same functions; `numbers` differ from call to call."""

    sampled: bool
    processors: tuple[TensorProcessor, ...]
    eos: tuple[int, ...]
    pad: int
    keeps_scores: bool
    keeps_logits: bool

    @property
    def key(self) -> Hashable:
        processors = tuple((each.name, each.form) for each in self.processors)
        return self.sampled, processors, self.eos, self.pad, self.keeps_scores, self.keeps_logits

    @property
    def text(self) -> str:
        names = [each.name.removesuffix("LogitsWarper").removesuffix("LogitsProcessor") for each in self.processors]
        return ", ".join(["sampled" if self.sampled else "greedy", *names])


@dataclass
class Kept:
    """Tensors that token selection reads and writes besides `Buffers`."""

    noise: Tensor
    """`[batch, vocabulary]` float32, exponential with rate 1; empty for greedy steps."""
    scores: Tensor
    logits: Tensor
    """`[batch, vocabulary]` float32 of the newest token; empty if not requested."""
    numbers: list[Tensor] = field(default_factory=list)

    @staticmethod
    def make(form: ChoosingForm, logits: Tensor) -> Kept:
        def room(wanted: bool) -> Tensor:
            return torch.empty_like(logits) if wanted else logits.new_empty(0)

        # Copies: a request may have been read under inference mode, and later calls write to these.
        numbers = [number.to(logits.device, copy=True) for each in form.processors for number in each.numbers]
        return Kept(room(form.sampled), room(form.keeps_scores), room(form.keeps_logits), numbers)


def run_model(
    model: PreTrainedModel, cache: StaticCache, form: MaskForm, buffers: Buffers, with_positions: bool
) -> Tensor:
    """`model(ids).logits[:, -1].float()` over the cache: `[batch, vocabulary]`; the position moves on by one."""
    arguments = {_CACHE: cache} | ({"position_ids": buffers.positions} if with_positions else {})
    outputs = model.forward(
        input_ids=buffers.ids,
        attention_mask=masks(form, cache.layers, buffers.length, buffers.padding),
        use_cache=True,
        return_dict=True,
        **arguments,
    )
    buffers.length.add_(1)
    buffers.positions.add_(1)
    logits: Tensor = outputs.logits
    return logits[:, -1].float()


def argmax(scores: Tensor) -> Tensor:
    """`scores.argmax(dim=-1)` of `[batch, vocabulary]`, the first of equal ones too, by parts of the vocabulary: of a
    whole row Inductor makes one program, which one SM runs."""
    parts = in_parts(scores)
    part = parts.amax(dim=-1).argmax(dim=-1, keepdim=True)
    return (part * parts.shape[-1] + parts.argmax(dim=-1).gather(1, part)).squeeze(1)


def chooser(form: ChoosingForm) -> Callable[[Tensor, Buffers, Kept], None]:
    """Build the function that selects the next token from `logits` `[batch, vocabulary]` float32 and stores it in the
    buffers:

        scores = processors(history, logits)
        tokens = argmax(softmax(scores) / noise) if sampled else argmax(scores)
        tokens = where(unfinished, tokens, pad)

    The quotient's largest element is a sample of the softmax, the one that `torch.multinomial` draws.
    """
    processors, eos, pad = form.processors, form.eos, form.pad

    def choose(logits: Tensor, buffers: Buffers, kept: Kept) -> None:
        scores = apply_all(processors, logits, History(buffers.history, buffers.count), kept.numbers)
        if form.keeps_logits:
            kept.logits.copy_(logits)
        if form.keeps_scores:
            kept.scores.copy_(scores)
        if form.sampled:
            tokens = argmax(torch.softmax(scores, dim=-1) / kept.noise)
        else:
            tokens = argmax(scores)
        if eos:
            tokens = torch.where(buffers.unfinished, tokens, pad)
            ended = tokens == eos[0]
            for token in eos[1:]:
                ended = ended | (tokens == token)
            buffers.unfinished.logical_and_(~ended)
        buffers.history.index_copy_(1, buffers.count[None], tokens[:, None])
        buffers.count.add_(1)
        buffers.ids.copy_(tokens[:, None])
        buffers.step_output.copy_(torch.cat([tokens, buffers.unfinished.any()[None].to(torch.int64)]))

    return choose
