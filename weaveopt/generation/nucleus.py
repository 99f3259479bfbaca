"""Top-k followed by top-p, without a sort of the vocabulary.

    scores = TopKLogitsWarper(k)(ids, scores)
    scores = TopPLogitsWarper(p, min_tokens_to_keep=least)(ids, scores)

Top-k leaves the k largest scores and all that equal the smallest of those. So the sum of probabilities that top-p
compares with is one over k scores and a number of equal ones, and it keeps the scores above some score and as many of
those that equal it: of these the last ones, as a stable sort would leave them. (transformers' sort does not say which.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

PARTS = 64
"""Number of parts of a row of scores, each searched by one program."""
MOST_ROWS_BY_PARTS = 4
"""Maximum number of rows that are searched by parts; docs/generate.md has the times of both forms."""
MOST_BY_PARTS = 256
"""Maximum k for a search by parts; larger ones are searched in the whole row."""
BLOCK = 256
"""Scores that equal ones are numbered among at a time: a sum along a whole row would be one program's."""


def in_parts(scores: Tensor) -> Tensor:
    """`[batch, vocabulary]` -> `[batch, PARTS, size]`, filled up with -inf."""
    batch, vocabulary = scores.shape
    size = -(-vocabulary // PARTS)
    return pad(scores, (0, size * PARTS - vocabulary), value=float("-inf")).view(batch, PARTS, size)


def largest(scores: Tensor, k: int) -> Tensor:
    """`scores.topk(k).values` of `[batch, vocabulary]`; of few rows on a GPU by parts."""
    batch, vocabulary = scores.shape
    if not scores.is_cuda or batch > MOST_ROWS_BY_PARTS or k > min(MOST_BY_PARTS, vocabulary // PARTS):
        return scores.topk(k).values
    parts = in_parts(scores).flatten(0, 1).topk(k, sorted=False).values
    return parts.view(batch, PARTS * k).topk(k).values


def kept(scores: Tensor, k: int, p: float, least: int) -> Tensor:
    """Scores `[batch, vocabulary]` float32 -> bool of the same shape: the tokens that both leave.

    Sums are of exp(score - largest) in another order than transformers', and as exact.
    """
    k = min(k, scores.shape[1])
    top = largest(scores, k)
    smallest, highest = top[:, -1:], top[:, :1]
    is_above = top > smallest
    num_above = is_above.sum(dim=-1, keepdim=True)
    num_smallest = (scores == smallest).sum(dim=-1, keepdim=True)
    weights = torch.where(is_above, torch.exp(top - highest), 0.0)
    weight = torch.exp(smallest - highest)
    # From the smallest score on: all that equal it, then those above, one by one.
    from_smallest = num_smallest * weight + weights.flip(-1).cumsum(dim=-1).flip(-1)
    limit = (1 - p) * from_smallest[:, :1]
    num_kept_above = (is_above & (from_smallest > limit)).sum(dim=-1, keepdim=True)
    # Without weight all of them are within the limit.
    removed = torch.where(weight > 0, torch.floor(limit / weight), num_smallest).clamp(max=num_smallest)
    num_kept = num_kept_above + num_smallest - removed.to(torch.int64)
    num_kept = num_kept.clamp(min=least).minimum(num_above + num_smallest)
    edge = top.gather(1, num_kept.clamp(max=k) - 1)
    num_kept_equal = num_kept - (top > edge).sum(dim=-1, keepdim=True)
    is_equal = scores == edge
    return (scores > edge) | (is_equal & (_places(is_equal) >= is_equal.sum(dim=-1, keepdim=True) - num_kept_equal))


def _places(flags: Tensor) -> Tensor:
    """`[batch, n]` bool -> the number of flags that are set before each place, int32."""
    batch, n = flags.shape
    blocks = -(-n // BLOCK)
    counted = pad(flags.to(torch.int32), (0, blocks * BLOCK - n)).view(batch, blocks, BLOCK)
    within = counted.cumsum(dim=-1, dtype=torch.int32)
    sums = counted.sum(dim=-1, dtype=torch.int32)
    before = sums.cumsum(dim=-1, dtype=torch.int32) - sums
    return (before[:, :, None] + within - counted).reshape(batch, blocks * BLOCK)[:, :n]
