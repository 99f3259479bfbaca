"""Classes of attention masks, and which of them a mask is: decided on the first and last key that each query sees.

Every class admits one contiguous range of keys for each query, so two vectors of `num_queries` numbers say all that
the mask of `num_queries × num_keys` bits says, and comparing them with a class's is an exact proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from weaveopt.records.candidate import Rejection


class MaskKind(StrEnum):
    NONE = "none"
    """Every query sees every key: no mask at all, or one that admits everything."""
    FULL = "full"
    """Every query sees the same leading keys, fewer than there are."""
    CAUSAL = "causal"
    WINDOW = "window"
    CHUNKED = "chunked"


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees, the same for every sequence and head. Key `j` is admitted for query `i` where

        (j < num_filled)
        & (j <= i + offset)                    # causal, window, chunked
        & (j > i + offset - window)            # window
        & (j // chunk == (i + offset) // chunk)  # chunked

    `offset` is the position of the first query among the keys: 0 aligns at the upper left, `num_keys - num_queries`
    at the lower right. `num_filled` is one past the last key that any query sees where that is less than all keys, as
    in a static cache that is longer than what it holds; else None. A field that a kind does not use is 0. Of several
    kinds that fit, the first of `MaskKind` is taken.
    """

    kind: MaskKind
    offset: int = 0
    window: int = 0
    chunk: int = 0
    num_filled: int | None = None

    def filled(self, num_keys: int) -> int:
        """Number of leading keys that any query may see."""
        return num_keys if self.num_filled is None else self.num_filled

    def bounds(self, num_queries: int, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(first, end)`, int64 `[num_queries]` each: query `i` sees keys `first[i] <= j < end[i]`; both 0 for none."""
        first = torch.zeros(num_queries, dtype=torch.int64)
        end = torch.full((num_queries,), self.filled(num_keys), dtype=torch.int64)
        if self.kind in (MaskKind.CAUSAL, MaskKind.WINDOW, MaskKind.CHUNKED):
            position = torch.arange(num_queries) + self.offset
            end = (position + 1).clamp(max=self.filled(num_keys))
            if self.kind is MaskKind.WINDOW:
                first = (position - self.window + 1).clamp(min=0)
            elif self.kind is MaskKind.CHUNKED:
                first = (position // self.chunk * self.chunk).clamp(min=0)
        return without_empty(first, end)

    def admitted(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """The mask itself, bool `[num_queries, num_keys]`: for tests and references, never for a kernel."""
        first, end = self.bounds(num_queries, num_keys)
        keys = torch.arange(num_keys)
        return (keys >= first[:, None]) & (keys < end[:, None])

    def every_query_sees(self, num_queries: int, num_keys: int) -> bool:
        """True if every query sees at least one key; kernels disagree about the result for a query without keys."""
        first, end = self.bounds(num_queries, num_keys)
        return bool((end > first).all())

    def __str__(self) -> str:
        facts = {"offset": self.offset, "window": self.window, "chunk": self.chunk, "filled": self.num_filled or 0}
        return " ".join((self.kind.value, *(f"{name}={value}" for name, value in facts.items() if value)))


def without_empty(first: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same ranges, with 0 and 0 wherever a range is empty."""
    some = end > first
    return torch.where(some, first, 0), torch.where(some, end, 0)


def classify(first: torch.Tensor, end: torch.Tensor, num_queries: int, num_keys: int) -> Mask | Rejection:
    """The class of the mask in which query `i` sees keys `first[..., i] <= j < end[..., i]`, or why it has none.

    `first`, `end`: int64 `[..., num_queries]` over any sequences and heads, 0 and 0 where nothing is admitted.
    """
    first, end = first.reshape(-1, num_queries), end.reshape(-1, num_queries)
    differs = ((first != first[:1]) | (end != end[:1])).any(dim=0)
    if bool(differs.any()):
        query = int(differs.nonzero()[0])
        message = "sequences or heads have masks that differ from one another"
        return Rejection("mask_varies", message, (("query", query),))
    first, end = first[0], end[0]
    if not bool(end.any()):
        return Rejection("mask_empty", "the mask admits no key for any query", (("queries", num_queries),))
    for mask in _hypotheses(first, end, num_keys):
        expected_first, expected_end = mask.bounds(num_queries, num_keys)
        if torch.equal(first, expected_first) and torch.equal(end, expected_end):
            return mask
    message = "each query sees one range of keys, in no known class: neither causal, nor a window, nor chunked"
    middle = num_queries // 2
    values = (("query", middle), ("first_key", int(first[middle])), ("end_key", int(end[middle])))
    return Rejection("mask_in_no_class", message, values)


def _hypotheses(first: torch.Tensor, end: torch.Tensor, num_keys: int) -> list[Mask]:
    """Guess candidate masks from a few queries; the caller compares each of them in full."""
    last = int(end.max())
    num_filled = last if last < num_keys else None
    some = end > 0
    # A query whose range ends before the filled keys do shows the offset; where none does, the smallest that fits.
    shows = some & (end < last)
    query = int((shows if bool(shows.any()) else some).nonzero()[0])
    offset = int(end[query]) - 1 - query
    found = [
        Mask(MaskKind.NONE if num_filled is None else MaskKind.FULL, num_filled=num_filled),
        Mask(MaskKind.CAUSAL, offset, num_filled=num_filled),
    ]
    late = (first > 0).nonzero()
    after = int(some.nonzero()[-1]) + 1
    if late.numel():
        query = int(late[0])
        window = query + offset + 1 - int(first[query])
        starts = first[some].unique().tolist()
        # Chunks start at multiples of their length: neighbours differ by it, and a single one may be its own length.
        chunk = starts[1] - starts[0] if len(starts) > 1 else starts[0]
    elif after < len(end):  # queries that are past the filled keys by a window, or in the chunk after them
        window, chunk = after + offset + 1 - last, after + offset
    else:
        window, chunk = 0, 0
    if window > 0:
        found.append(Mask(MaskKind.WINDOW, offset, window=window, num_filled=num_filled))
    if chunk > 0:
        found.append(Mask(MaskKind.CHUNKED, offset, chunk=chunk, num_filled=num_filled))
    return found
