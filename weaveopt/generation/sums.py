"""`weave::keep_by_sum`: logits processors that add probabilities up over the vocabulary, as one operator.

    TopPLogitsWarper(threshold, filter_value, min_tokens_to_keep)(ids, scores)
    TypicalLogitsWarper(threshold, filter_value, min_tokens_to_keep)(ids, scores)

The operator is opaque to compilers: transformers' own object runs, with torch's kernels, which are captured as they
are. Inductor splits a cumulative sum of few rows over many blocks, and fails to compile that kernel if a mask reads the
sum (torch 2.11, 16 rows of 128256).
"""

from __future__ import annotations

from typing import TypeAlias, cast

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

Processor: TypeAlias = hf.TopPLogitsWarper | hf.TypicalLogitsWarper

_CLASSES: dict[str, type[Processor]] = {each.__name__: each for each in (hf.TopPLogitsWarper, hf.TypicalLogitsWarper)}
_library = torch.library.Library("weave", "FRAGMENT")
_library.define(
    "keep_by_sum(Tensor scores, str processor, float threshold, float filter_value, int min_tokens_to_keep) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def keep_by_sum(
    scores: Tensor, processor: str, threshold: float, filter_value: float, min_tokens_to_keep: int
) -> Tensor:
    """Scores `[batch, vocabulary]` float32 -> the same, with `filter_value` where a token may not be chosen.

    `processor`: the name of transformers' class; `threshold`: its `top_p` or `mass`.
    """
    made = _CLASSES[processor](threshold, filter_value=filter_value, min_tokens_to_keep=min_tokens_to_keep)
    # Neither class looks at the tokens.
    kept: Tensor = made(cast(torch.LongTensor, None), cast(torch.FloatTensor, scores))
    return kept


def _fake(scores: Tensor, processor: str, threshold: float, filter_value: float, min_tokens_to_keep: int) -> Tensor:
    return torch.empty_like(scores)


_library.impl("keep_by_sum", keep_by_sum, "CUDA")
_library.impl("keep_by_sum", keep_by_sum, "CPU")
torch.library.register_fake("weave::keep_by_sum", _fake, lib=_library)
