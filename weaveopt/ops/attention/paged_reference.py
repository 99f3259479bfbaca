"""Attention over a paged cache in plain torch: the dense expression of every device, and the batches of CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from weaveopt.ops.attention import reference
from weaveopt.ops.attention.packed import admits
from weaveopt.ops.attention.paged_shapes import PagedOperands, PagedRows, read_rows
from weaveopt.ops.attention.shapes import AttentionOperands, Scores, empty_result

Tensor = torch.Tensor

WASTED_SCORES = 8192
"""Scores of padding, over all heads, that take a CPU as long as one more call of torch's attention."""


def dense(operands: PagedOperands, scores: Scores) -> Tensor:
    """Every query against every key, under a mask; waits for nothing."""
    rows, queries = operands.rows, operands.query.shape[2]
    keys, values = read_rows(rows, rows.read_index) if rows.read_index.shape[0] else (rows.keys, rows.values)
    mask = admits(operands.cu_seq_lens_q, operands.cu_seq_lens_k, queries, keys.shape[0], operands.window)
    # What no query reads may be anything.
    read = mask.any(0)[:, None, None]
    keys, values = (each.masked_fill(~read, 0.0).transpose(0, 1)[None] for each in (keys, values))
    admitted = AttentionOperands(operands.query, keys, values, mask[None, None], None, operands.sinks)
    return reference.reference(admitted, scores)


@dataclass(frozen=True)
class PagedRequest:
    """Queries and keys of one request, as ranges of the packed ones."""

    first_query: int
    queries: int
    first_key: int
    keys: int


@dataclass(frozen=True)
class PagedBatch:
    """Requests that one call of torch's attention serves: padded, where they differ, with their last row."""

    requests: int
    queries: int
    keys: int
    at_queries: Tensor
    """Packed positions of the queries, int64 [requests * queries]."""
    at_keys: Tensor
    """The same of the keys, [requests * keys]."""
    new_rows: Tensor
    """Row of each key among the new ones, for those that are new."""
    mask: Tensor | None
    """bool [requests, 1, queries, keys]; None where each query reads all keys, or all before it."""
    is_causal: bool
    kept: tuple[tuple[int, int, int], ...]
    """First packed query, number of queries and row of each request, where they differ in queries."""


def on_cpu(operands: PagedOperands, scores: Scores) -> Tensor:
    """Requests of about one size as one batch each, over their own keys."""
    ends_q, ends_k = operands.cu_seq_lens_q.tolist(), operands.cu_seq_lens_k.tolist()
    out = empty_result(operands.query, operands.query)
    if ends_q[-1] < out.shape[2]:
        out[:, :, ends_q[-1] :].zero_()
    for batch in prepared(tuple(ends_q), tuple(ends_k), operands.window, operands.query.shape[1]):
        _attend(operands, scores, batch, out)
    return out


@lru_cache(maxsize=4)
def prepared(ends_q: tuple[int, ...], ends_k: tuple[int, ...], window: int, heads: int) -> tuple[PagedBatch, ...]:
    """The batches of a step; its layers share them."""
    bounds = zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
    spans = [PagedRequest(q, q_end - q, k, k_end - k) for q, q_end, k, k_end in bounds if q_end > q]
    return tuple(_batch(each, window) for each in batches(spans, heads))


def _batch(spans: Sequence[PagedRequest], window: int) -> PagedBatch:
    queries, keys = max(each.queries for each in spans), max(each.keys for each in spans)
    query_ids, key_ids = torch.arange(queries), torch.arange(keys)
    lengths = torch.tensor([(each.first_query, each.queries, each.first_key, each.keys) for each in spans])
    first_query, num_queries, first_key, num_keys = lengths.T[..., None]
    in_request = torch.minimum(key_ids, num_keys - 1)
    is_even = len({(each.queries, each.keys) for each in spans}) == 1
    is_causal = is_even and queries == keys > 1 and not window
    mask = None
    if not (is_causal or (is_even and queries == 1 and not 0 < window < keys)):
        last = (query_ids + (num_keys - num_queries))[..., None]
        mask = (key_ids <= last)[:, None]
        if window:
            mask &= (key_ids > last - window)[:, None]
    return PagedBatch(
        len(spans), queries, keys,
        (first_query + torch.minimum(query_ids, num_queries - 1)).flatten(),
        (first_key + in_request).flatten(),
        (first_query - (num_keys - num_queries) + in_request).flatten(),
        mask, is_causal,
        tuple((each.first_query, each.queries, at) for at, each in enumerate(spans))
        if len({each.queries for each in spans}) > 1 else (),
    )  # fmt: skip


def batches(spans: Sequence[PagedRequest], heads: int) -> Iterator[list[PagedRequest]]:
    """Spans that are padded to the longest of them, as long as that computes little more than they need."""
    batch: list[PagedRequest] = []
    most_queries = most_keys = needed = 0
    for span in sorted(spans, key=lambda each: (each.queries, each.keys), reverse=True):
        queries, keys = max(most_queries, span.queries), max(most_keys, span.keys)
        padded = (len(batch) + 1) * queries * keys
        now = needed + span.queries * span.keys
        if batch and (padded - now) * heads > WASTED_SCORES + now * heads // 4:
            yield batch
            batch, queries, keys, now = [], span.queries, span.keys, span.queries * span.keys
        batch.append(span)
        most_queries, most_keys, needed = queries, keys, now
    if batch:
        yield batch


def _attend(operands: PagedOperands, scores: Scores, batch: PagedBatch, out: Tensor) -> None:
    query, group, sinks = operands.query, operands.group, operands.sinks
    heads, size = query.shape[1], query.shape[3]
    own_keys, own_values = (
        each.view(batch.requests, batch.keys, *each.shape[1:]).transpose(1, 2)
        for each in _rows_at(operands.rows, batch)
    )
    own = query[0].index_select(1, batch.at_queries).view(heads, batch.requests, batch.queries, size).transpose(0, 1)
    if batch.queries == 1 and sinks is None:
        # Heads of a group are rows of one product.
        own = own.reshape(batch.requests, -1, group, size)
    if sinks is None and not scores.softcap:
        result = F.scaled_dot_product_attention(
            own, own_keys, own_values, batch.mask, is_causal=batch.is_causal, scale=scores.scale,
            enable_gqa=own.shape[1] != own_keys.shape[1],
        )  # fmt: skip
    else:
        given = AttentionOperands(own, own_keys, own_values, batch.mask, None, sinks)
        result = reference.reference(given, replace(scores, causal=batch.is_causal))
    result = result.reshape(batch.requests, heads, batch.queries, size)
    for first, count, row in batch.kept:
        out[0, :, first : first + count] = result[row, :, :count]
    if not batch.kept:
        out[0].index_copy_(1, batch.at_queries, result.transpose(0, 1).reshape(heads, -1, size))


def _rows_at(rows: PagedRows, batch: PagedBatch) -> list[Tensor]:
    """Keys and values [requests * keys, Hkv, D] of a batch."""
    if not rows.read_index.shape[0]:
        return [each.index_select(0, batch.at_keys) for each in (rows.keys, rows.values)]
    index = rows.read_index.index_select(0, batch.at_keys)
    found = [each.index_select(0, index) for each in rows.stored()]
    if rows.reads_first:
        [is_new] = (index == rows.sentinel).nonzero(as_tuple=True)
        new = batch.new_rows.index_select(0, is_new)
        for each, own in zip(found, (rows.keys, rows.values), strict=True):
            each.index_copy_(0, is_new, own.index_select(0, new))
    return found
