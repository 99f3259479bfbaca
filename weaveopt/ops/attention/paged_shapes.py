"""Operands of attention over a paged cache: rows that are written and read by index, and the checks of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weaveopt.errors import WeaveError

Tensor = torch.Tensor


@dataclass(frozen=True)
class PagedRows:
    """Rows of one layer's keys and values in a paged cache, and the new ones; shapes as in `ops.attention.paged`."""

    cache: Tensor
    keys: Tensor
    values: Tensor
    read_index: Tensor
    write_index: Tensor
    first_key: int
    first_value: int
    sentinel: int

    @property
    def reads_first(self) -> bool:
        """True if new rows may take the place of rows that this call reads."""
        return self.sentinel >= 0

    @property
    def num_keys(self) -> int:
        """Entries of the packed keys: those that are read, or the new ones where nothing is."""
        return self.read_index.shape[0] or self.keys.shape[0]

    def stored(self) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, [rows, Hkv, D] each; row i of both is what index i means."""
        row = self.keys.shape[1:]
        memory = self.cache.view(self.keys.dtype).view(-1)
        rows = memory[: memory.shape[0] // row.numel() * row.numel()].view(-1, *row)
        return rows[self.first_key :], rows[self.first_value :]

    def write(self) -> None:
        """Stores the new rows."""
        for kept, new in zip(self.stored(), (self.keys, self.values), strict=True):
            kept.index_copy_(0, self.write_index, new)


def read_rows(rows: PagedRows, read_index: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all entries of `read_index`; those that are the sentinel are the new rows, in order."""
    found = [kept.index_select(0, read_index) for kept in rows.stored()]
    if rows.reads_first:
        is_new = (read_index == rows.sentinel)[:, None, None]
        for each, new in zip(found, (rows.keys, rows.values), strict=True):
            each.masked_scatter_(is_new, new)
    read_keys, read_values = found
    return read_keys, read_values


@dataclass(frozen=True)
class PagedOperands:
    """The tensors and sizes of one call of `weave::paged_attention`."""

    query: Tensor
    rows: PagedRows
    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    sinks: Tensor | None
    max_keys: int
    window: int

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.query.shape[1] // self.rows.keys.shape[1]

    @property
    def num_requests(self) -> int:
        """Requests that there is room for; those without queries are no work."""
        return self.cu_seq_lens_q.shape[0] - 1


def checked_paged(operands: PagedOperands) -> None:
    """Raises `WeaveError` where operands contradict one another."""
    query, rows = operands.query, operands.rows
    cache, keys, values = rows.cache, rows.keys, rows.values
    shapes = (
        f"query {list(query.shape)}, keys {list(keys.shape)}, values {list(values.shape)}, cache {list(cache.shape)}"
    )
    belong = query.dim() == 4 and keys.dim() == 3 and keys.shape == values.shape
    if belong:
        heads, queries, size = query.shape[1:]
        key_heads = keys.shape[1]
        belong = query.shape[0] == 1 and keys.shape == (queries, key_heads, size) and heads % max(key_heads, 1) == 0
        in_bytes = cache.dim() == 1 and cache.dtype is torch.uint8
        belong = belong and (in_bytes or cache.shape[1:] == (2, key_heads, size)) and key_heads > 0
    if not belong:
        raise WeaveError(
            f"paged_attention: {shapes} do not belong together: [1, H, S, D], [S, Hkv, D] twice and "
            "[tokens, 2, Hkv, D] or bytes with H % Hkv == 0 do"
        )
    if not query.dtype == keys.dtype == values.dtype or cache.dtype not in (query.dtype, torch.uint8):
        dtypes = ", ".join(str(each.dtype) for each in (query, cache, keys, values))
        raise WeaveError(f"paged_attention: query, cache, keys and values are of one dtype, found {dtypes}")
    lengths = (operands.cu_seq_lens_q, operands.cu_seq_lens_k)
    if any(each.dtype is not torch.int32 or each.dim() != 1 for each in lengths) or (
        lengths[0].shape != lengths[1].shape or lengths[0].shape[0] < 1
    ):
        found = " and ".join(f"{each.dtype} {list(each.shape)}" for each in lengths)
        raise WeaveError(f"paged_attention: cu_seq_lens_q and cu_seq_lens_k are int32 [requests + 1], found {found}")
    if operands.sinks is not None and operands.sinks.shape != (query.shape[1],):
        raise WeaveError(
            f"paged_attention: sinks are {list(operands.sinks.shape)}, not one for each of {query.shape[1]} heads"
        )
    if operands.window < 0:
        raise WeaveError(f"paged_attention: a window is a number of keys or 0 for none, found {operands.window}")
