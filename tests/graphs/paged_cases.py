"""Packed requests over a paged cache with shuffled pages, and their attention one query at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from weaveopt.ops.attention.paged_shapes import PagedOperands, PagedRows
from weaveopt.ops.attention.shapes import Scores

PAGE = 4
SPANS = {
    "decode": ((1, 9), (1, 1), (1, 30), (1, 17)),
    "mixed": ((1, 12), (7, 7), (3, 21), (1, 5), (16, 40)),
    "prompts": ((5, 5), (1, 1), (19, 19)),
    "one": ((1, 70),),
}
"""Queries and keys of each request."""


@dataclass(frozen=True)
class PagedCase:
    spans: tuple[tuple[int, int], ...]
    heads: int = 4
    key_heads: int = 2
    size: int = 16
    window: int = 0
    reads: bool = True
    """False: nothing is read, attention takes the new rows alone."""
    sinks: bool = False
    padding: int = 3
    """Queries, keys and requests after the last."""


def make(case: PagedCase, dtype: torch.dtype, seed: int, capacity: int = 0) -> PagedOperands:
    """Operands in the layout of transformers' caches; rows that nothing may read are NaN. `capacity` is added to the
    cache's pages, so that cases of one layout share shapes."""
    numbers, choice = torch.Generator().manual_seed(seed), random.Random(seed)
    queries = sum(each for each, _ in case.spans)
    padded = queries + case.padding
    pages = sum(-(-keys // PAGE) for _, keys in case.spans) + 2 + capacity
    # A block holds keys and values of two layers, a page each; the second layer is ours.
    cache = torch.full((2 * pages * PAGE, 2, case.key_heads, case.size), torch.nan)
    trash, sentinel = 4 * PAGE * (pages - 1), 4 * PAGE * (pages - 2) + 1
    order = choice.sample(range(pages - 2), pages - 2)
    read: list[int] = []
    write: list[int] = []
    stored = cache.view(-1, case.key_heads, case.size)
    first_key, first_value = 2 * PAGE, 3 * PAGE
    for num_queries, num_keys in case.spans:
        own = [order.pop() for _ in range(-(-num_keys // PAGE))]
        rows = [own[at // PAGE] * 4 * PAGE + at % PAGE for at in range(num_keys)]
        old, new = rows[: num_keys - num_queries], rows[num_keys - num_queries :]
        for row in old:
            for first in (first_key, first_value):
                stored[first + row] = torch.randn((case.key_heads, case.size), generator=numbers)
        write += new
        read += [*old, *([sentinel] * num_queries if case.window else new)]
    for first in (first_key, first_value):
        stored[first + trash] = 0.0
    make_rows = lambda *shape: torch.randn(shape, generator=numbers).to(dtype)  # noqa: E731
    # The memory of a projection: [S, H, D] seen as [1, H, S, D].
    query = make_rows(padded, case.heads, case.size).transpose(0, 1)[None]
    keys, values = (make_rows(case.key_heads, padded, case.size).transpose(0, 1) for _ in range(2))
    bounds = [torch.tensor([0, *(span[at] for span in case.spans)]).cumsum(0) for at in (0, 1)]
    bounds = [torch.cat((each, each[-1:].expand(case.padding))).to(torch.int32) for each in bounds]
    return PagedOperands(
        query,
        PagedRows(
            cache.to(dtype), keys, values,
            torch.tensor([*read, *[trash] * case.padding] if case.reads else [], dtype=torch.int64),
            torch.tensor([*write, *[trash] * case.padding], dtype=torch.int64),
            first_key, first_value, sentinel if case.window else -1,
        ),
        bounds[0],
        bounds[1],
        torch.randn(case.heads, generator=numbers).to(dtype) if case.sinks else None,
        max(keys for _, keys in case.spans),
        case.window,
    )  # fmt: skip


def expected(case: PagedCase, operands: PagedOperands, scores: Scores) -> torch.Tensor:
    """Each query of each head by itself, in fp64; the cache is as it was before the call."""
    rows = operands.rows
    cache = rows.cache.clone()
    copy = replace(rows, cache=cache)
    stored = [each.double() for each in copy.stored()]
    if not rows.reads_first:
        copy.write()
        stored = [each.double() for each in copy.stored()]
    out = torch.zeros_like(operands.query, dtype=torch.float64)
    first_query = first_key = 0
    for num_queries, num_keys in case.spans:
        for query in range(num_queries):
            last = num_keys - num_queries + query
            begin = max(last - case.window + 1, 0) if case.window else 0
            read = []
            for at in range(begin, last + 1):
                is_new = at >= num_keys - num_queries
                new = first_query + at - (num_keys - num_queries)
                sources = [rows.keys[new], rows.values[new]] if is_new else []
                if not is_new:
                    sources = [each[rows.read_index[first_key + at]] for each in stored]
                read.append([each.double() for each in sources])
            for head in range(case.heads):
                own = head * case.key_heads // case.heads
                logits = (
                    torch.stack([key[own] for key, _ in read]) @ operands.query[0, head, first_query + query].double()
                )
                logits = logits * scores.scale
                if scores.softcap:
                    logits = scores.softcap * torch.tanh(logits / scores.softcap)
                if operands.sinks is not None:
                    logits = torch.cat((logits, operands.sinks[head].double()[None]))
                weights = torch.softmax(logits, 0)[: len(read)]
                out[0, head, first_query + query] = weights @ torch.stack([value[own] for _, value in read])
        first_query, first_key = first_query + num_queries, first_key + num_keys
    return out
