"""`weave::paged_kv_update` and `weave::paged_attention`: packed requests whose keys are rows of a paged cache.

    def paged_kv_update(cache, keys, values, read_index, write_index, first_key, first_value, sentinel):
        rows = cache.view(keys.dtype).view(-1, *keys.shape[1:])            # [tokens * 2, heads, head size]
        own_keys, own_values = rows[first_key:], rows[first_value:]
        own_keys[write_index], own_values[write_index] = keys, values
        return own_keys[read_index], own_values[read_index]

    def paged_attention(cache, query, keys, values, ..., cu_seq_lens_q, cu_seq_lens_k, sinks, window, scale, softcap):
        keys, values = paged_kv_update(cache, keys, values, ...)
        out = zeros_like(query)
        for r in range(len(cu_seq_lens_q) - 1):
            own = slice(cu_seq_lens_q[r], cu_seq_lens_q[r + 1])
            read = slice(cu_seq_lens_k[r], cu_seq_lens_k[r + 1])
            last = arange(own)[:, None] + len(read) - len(own)      # the last key that a query reads
            mask = (arange(read) <= last) & (arange(read) > last - window)       # all before it where window is 0
            out[:, :, own] = masked_attention(query[:, :, own], keys[read], values[read], mask, sinks, scale, softcap)
        return out

With a `sentinel` of 0 or more (sliding windows, whose new rows may take the place of old ones that are read) rows are
read before they are written, and entries of `read_index` that are `sentinel` are `keys` and `values`, in order: the
last keys of each request. An empty `read_index` reads nothing: attention takes the new keys and values alone.

Shapes: `cache` [tokens, 2, Hkv, D], contiguous, or its memory as bytes [n], which several layers of other shapes may
share; both operators change it in place; `query` [1, H, S, D] with H % Hkv == 0;
`keys` and `values` [S, Hkv, D], all of one dtype; `read_index` int64 [K or 0], `write_index` int64 [S or less];
`cu_seq_lens_q` and `cu_seq_lens_k` int32 [requests + 1] on the device, from 0 on; `sinks` [H]. The result is
[1, H, S, D] in memory [1, S, H, D]. Queries after the last request are 0, and keys after it are not read. `max_keys` is
the most keys of a request, and decides only how work is divided.

Attention is one operator with the write, as the order of the two depends on the cache: the graph has one node that
changes the cache, and neither reads a row that the other has not written yet or has already replaced.

On GPUs a Triton kernel reads rows by the index for bf16 and fp16, and nothing waits for the device: a CUDA graph that
was captured serves other lengths. fp32, head sizes above 256 and GPUs without Triton get the dense expression. On CPUs
requests of about one size are one batch of torch's attention. In `paged_kv_update`, `mask`, `cu_seq_lens_q`,
`cu_seq_lens_k`, `max_keys` and `window` are not read: they say what attention downstream of it is, for the rule.

Raises `WeaveError` where shapes or dtypes contradict one another.
"""

from __future__ import annotations

import torch

from weaveopt.errors import WeaveError
from weaveopt.ops.attention import paged_gpu, paged_reference
from weaveopt.ops.attention.paged_shapes import PagedOperands, PagedRows, checked_paged, read_rows
from weaveopt.ops.attention.shapes import Scores, empty_result

Tensor = torch.Tensor


def _update(
    cache: Tensor, keys: Tensor, values: Tensor, read_index: Tensor, write_index: Tensor,
    first_key: int, first_value: int, sentinel: int, mask: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, max_keys: int = 0, window: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = PagedRows(cache, keys, values, read_index, write_index, first_key, first_value, sentinel)
    if rows.reads_first:
        found = read_rows(rows, read_index)
        rows.write()
        return found
    rows.write()
    return read_rows(rows, read_index)


def _fake_update(
    cache: Tensor, keys: Tensor, values: Tensor, read_index: Tensor, write_index: Tensor,
    first_key: int, first_value: int, sentinel: int, mask: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, max_keys: int = 0, window: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (read_index.shape[0], *keys.shape[1:])
    return keys.new_empty(shape), values.new_empty(shape)


def _attention(
    cache: Tensor, query: Tensor, keys: Tensor, values: Tensor, read_index: Tensor, write_index: Tensor,
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, sinks: Tensor | None, first_key: int, first_value: int,
    sentinel: int, max_keys: int, window: int, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    rows = PagedRows(cache, keys, values, read_index, write_index, first_key, first_value, sentinel)
    operands = PagedOperands(query, rows, cu_seq_lens_q, cu_seq_lens_k, sinks, max_keys, window)
    checked_paged(operands)
    attend = paged_gpu.attend if query.is_cuda else paged_reference.on_cpu
    if rows.reads_first:
        found = attend(operands, Scores(scale, softcap))
        rows.write()
        return found
    rows.write()
    return attend(operands, Scores(scale, softcap))


def _fake_attention(
    cache: Tensor, query: Tensor, keys: Tensor, values: Tensor, read_index: Tensor, write_index: Tensor,
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, sinks: Tensor | None, first_key: int, first_value: int,
    sentinel: int, max_keys: int, window: int, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    if query.dim() != 4:
        raise WeaveError(f"paged_attention takes a query of 4 dimensions, found {query.dim()}")
    return empty_result(query, query)


_library = torch.library.Library("weave", "FRAGMENT")
_library.define(
    "paged_kv_update(Tensor(a!) cache, Tensor keys, Tensor values, Tensor read_index, Tensor write_index, "
    "int first_key, int first_value, int sentinel, Tensor? mask=None, Tensor? cu_seq_lens_q=None, "
    "Tensor? cu_seq_lens_k=None, SymInt max_keys=0, int window=0) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "paged_attention(Tensor(a!) cache, Tensor query, Tensor keys, Tensor values, Tensor read_index, "
    "Tensor write_index, Tensor cu_seq_lens_q, Tensor cu_seq_lens_k, Tensor? sinks, int first_key, int first_value, "
    "int sentinel, SymInt max_keys, int window, float scale, float softcap) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _device in ("CPU", "CUDA"):
    _library.impl("paged_kv_update", _update, _device)
    _library.impl("paged_attention", _attention, _device)
torch.library.register_fake("weave::paged_kv_update", _fake_update, lib=_library)
torch.library.register_fake("weave::paged_attention", _fake_attention, lib=_library)
