"""Masks of packed requests and rows of their pages, as expressions of the lengths that wait for nothing and that Dynamo
traces."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def packed_mask(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, queries: int, keys: int, window: int, dtype: torch.dtype
) -> Tensor:
    """The bias [1, 1, queries, keys] of attention over packed requests: 0 where a query reads a key, else the least
    number of `dtype`.

        mask = full((queries, keys), finfo(dtype).min)
        for r in range(len(cu_seq_lens_q) - 1):
            own, read = (slice(bounds[r], bounds[r + 1]) for bounds in (cu_seq_lens_q, cu_seq_lens_k))
            last = arange(own)[:, None] + len(read) - len(own)
            mask[own, read] = where((arange(read) <= last) & (arange(read) > last - window), 0, finfo(dtype).min)

    Bounds are integers [requests + 1] on the device, from 0 on; a `window` of 0 is none. Queries and keys after the
    last request read nothing and are not read.
    """
    least = torch.finfo(dtype).min
    admitted = admits(cu_seq_lens_q, cu_seq_lens_k, queries, keys, window)
    zero = torch.zeros((), dtype=dtype, device=cu_seq_lens_q.device)
    return torch.where(admitted, zero, least)[None, None]


def admits(cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, queries: int, keys: int, window: int) -> Tensor:
    """Which key each query reads: bool [queries, keys]."""
    device, requests = cu_seq_lens_q.device, cu_seq_lens_q.shape[0] - 1
    of_query, query_ids = _request_of(cu_seq_lens_q, torch.arange(queries, device=device))
    of_key, key_ids = _request_of(cu_seq_lens_k, torch.arange(keys, device=device))
    before = (cu_seq_lens_k.diff() - cu_seq_lens_q.diff()).long()
    last = (query_ids + torch.cat((before, before.new_zeros(1)))[of_query])[:, None]
    admitted = (of_query[:, None] == of_key) & (of_query < requests)[:, None] & (key_ids <= last)
    return admitted & (key_ids > last - window) if window else admitted


def rows_of_pages(cu_seq_lens_k: Tensor, page_starts: Tensor, keys: int, page_size: int, nowhere: int) -> Tensor:
    """The row of the cache of each packed key, int64 [keys]; of keys after the last request: `nowhere`.

        pages = iter(page_starts)             # of each request those that its keys fill, one request after the other
        for length in cu_seq_lens_k.diff():
            own = islice(pages, ceil(length / page_size))
            rows += [start + at for start in own for at in range(page_size)][:length]

    `cu_seq_lens_k` is integers [requests + 1], `page_starts` integers [all pages or more], both on the device.
    """
    requests, lengths = cu_seq_lens_k.shape[0] - 1, cu_seq_lens_k.diff().long()
    of_key, key_ids = _request_of(cu_seq_lens_k, torch.arange(keys, device=cu_seq_lens_k.device))
    counts = (lengths + (page_size - 1)) // page_size
    is_read, request = of_key < requests, of_key.clamp(max=requests - 1)
    page = (counts.cumsum(0) - counts)[request] + key_ids // page_size
    rows = page_starts[torch.where(is_read, page, 0)] + key_ids % page_size
    return torch.where(is_read, rows, nowhere)


def _request_of(bounds: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Request of each packed position, and the position in it; after the last request: the number of requests."""
    found = torch.searchsorted(bounds.long(), ids, right=True) - 1
    # Requests without positions end where the next begins: the last of them is found.
    return found, ids - bounds.long()[found]
