"""`weave::library_attention`: attention whose mask is known, by one of the kernels that torch ships.

    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    last = arange(queries)[:, None] + keys - queries       # the last key that a query reads, where causal
    admitted = arange(keys) <= last                        # and > last - window, where window is not 0
    out = softmax(where(admitted, scores, -inf)) @ value

`query` [batch, heads, queries, head_dim], `key` [batch, kv_heads, keys, head_dim], `value` [batch, kv_heads, keys,
value_dim], of one dtype (bf16, fp16; fp32 on CPUs), with any strides; heads is a multiple of kv_heads. The result is
[batch, heads, queries, value_dim] in memory of [batch, queries, heads, value_dim], so that the projection after it
reads it as rows. `kernel` is a word of `LibraryKernel`; where the device or this build of torch does not have it,
whatever `scaled_dot_product_attention` takes computes the same. A window needs `causal`, and at most as many queries as
keys.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class LibraryKernel(StrEnum):
    FLASH = "flash"
    """FlashAttention: grouped heads, causal from the lower right, windows; equal head sizes of at most 256."""
    CUDNN = "cudnn"
    """cuDNN: grouped heads, causal where there are as many queries as keys."""
    CPU = "cpu"
    """The blocked kernel of CPUs: grouped heads, causal where there are as many queries as keys."""


_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library = torch.library.Library("weave", "FRAGMENT")
_library.define(
    "library_attention(Tensor query, Tensor key, Tensor value, float scale, bool causal, int window, str kernel) "
    "-> Tensor",
    tags=_TAGS,
)


def library_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, window: int, kernel: str
) -> Tensor:
    """See the module's docstring."""
    square = query.shape[2] == key.shape[2]
    # With one query nothing is hidden from the lower right.
    causal = causal and (query.shape[2] > 1 or window != 0)
    if kernel == LibraryKernel.FLASH and _has_flash(query, value):
        return _flash(query, key, value, scale, causal, window)
    if window == 0 and (square or not causal):
        if kernel == LibraryKernel.CUDNN and query.is_cuda and _is_recent(query.device):
            found = torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, False, 0.0, causal, False, scale=scale
            )
            return _by_rows(found[0])
        return _by_rows(
            F.scaled_dot_product_attention(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=True)
        )
    mask = admitted(query.shape[2], key.shape[2], window, query.device)
    return _by_rows(F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True))


def admitted(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: causal from the lower right, within `window` keys where that is not 0."""
    last = torch.arange(queries, device=device)[:, None] + (keys - queries)
    position = torch.arange(keys, device=device)
    seen = position <= last
    return seen & (position > last - window) if window else seen


@cache
def _is_recent(device: torch.device) -> bool:
    """True if both of torch's kernels support this GPU: compute capability 8.0 or later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _has_flash(query: Tensor, value: Tensor) -> bool:
    return (
        query.is_cuda
        and _is_recent(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.backends.cuda.is_flash_attention_available()
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, window: int) -> Tensor:
    """Its layout is [batch, length, heads, head_dim]; a window counts the keys before the query's own."""
    found = torch.ops.aten._flash_attention_forward(
        *(each.transpose(1, 2) for each in (query, key, value)),
        None, None, query.shape[2], key.shape[2], 0.0, causal and window == 0, False, scale=scale,
        window_size_left=window - 1 if window else None, window_size_right=0 if window else None,
    )  # fmt: skip
    out: Tensor = found[0].transpose(1, 2)
    return out


def _by_rows(out: Tensor) -> Tensor:
    """Memory of [batch, queries, heads, value_dim], whatever the kernel made."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _fake(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, window: int, kernel: str) -> Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)


_library.impl("library_attention", library_attention, "CUDA")
_library.impl("library_attention", library_attention, "CPU")
torch.library.register_fake("weave::library_attention", _fake, lib=_library)
