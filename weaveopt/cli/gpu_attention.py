"""Capture attention on a host without a GPU as the library of a GPU calls it.

torch chooses the kernel of `scaled_dot_product_attention` by the device of its operands. On a CPU it writes two GEMMs
and a softmax where the heads of values have another size than those of queries and keys (the latent attention of
DeepSeek); on a GPU one kernel takes them (cuDNN, or the memory-efficient one), and nothing writes the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey

aten = torch.ops.aten
Tensor = torch.Tensor

ALIGNMENT = 8
"""Head sizes that the kernels of GPUs take in half precision are multiples of it."""


def gpu_kernel_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention`, as one operator where only GPUs have a kernel for the head sizes.

    Shapes `[batch, heads, tokens, head size]`; a mask of booleans becomes numbers, 0 and -inf, as on a GPU.
    """
    operator = aten.scaled_dot_product_attention.default
    sizes = (query.shape[-1], value.shape[-1])
    if (
        sizes[0] == sizes[1]
        or any(size % ALIGNMENT for size in sizes)
        or not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        or query.dim() != 4
        or query.dtype not in (torch.bfloat16, torch.float16)
        or dropout_p
    ):
        result: Tensor = operator._op_dk(
            DispatchKey.CompositeImplicitAutograd, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip
        return result
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            zero, hidden = (torch.full((), number, dtype=query.dtype) for number in (0.0, float("-inf")))
            bias = torch.where(bias, zero, hidden)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    found: Tensor = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, False, 0.0, is_causal, scale=scale
    )[0]
    return found


@contextmanager
def attention_of_gpus() -> Iterator[None]:
    """Trace `scaled_dot_product_attention` by `gpu_kernel_attention` inside of this context."""
    operator, dispatched = aten.scaled_dot_product_attention.default, DispatchKey.CompositeImplicitAutograd
    before = operator.py_kernels.get(dispatched)
    operator.py_kernels[dispatched] = gpu_kernel_attention
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.pop(dispatched)
        if before is not None:
            operator.py_kernels[dispatched] = before
        operator._dispatch_cache.clear()
