"""One call of a local kernel at an exact shape, on random operands of its own, as the compiled graph makes it.

Weights, keys and values take turns in as much memory as drives them out of the caches, as a model's other layers do;
the rows that a GEMM multiplies were just computed, and stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from weaveopt.cost_model import Attention
from weaveopt.cost_model.attention import ATTENTION, OWN_KERNELS, attention_of
from weaveopt.cost_model.batched import BATCHED, GROUPED
from weaveopt.cost_model.gemm import GEMM
from weaveopt.cost_model.timed import KernelShape
from weaveopt.measure.clock import Launch

Tensor = torch.Tensor
SCALE = 0.1
"""Scale of the random numbers: sums of many of them stay small."""
CPU_COLD_BYTES, GPU_COLD_BYTES = 96 << 20, 160 << 20
"""Bytes of operands that take turns, so that few of them are found in the last-level cache."""
MOST_TURNS = 64
_BLOCK = 1 << 20
"""Random numbers that are drawn; larger operands repeat them, as drawing takes longer than the kernels."""


@dataclass(frozen=True)
class Operands:
    """Random operands on a device. Kernels that are timed one after the other share the memory."""

    device: torch.device
    cold_bytes: int
    """Bytes that take turns: those of the graph's own weights, where they are fewer than caches hold."""
    _memory: dict[tuple[torch.dtype, bool], Tensor] = field(default_factory=dict)

    def random(self, dtype: torch.dtype, *sizes: int, weights: bool = False) -> Tensor:
        """Random contiguous numbers; `weights` overlap with no others. torch's own generators are not touched."""
        count = math.prod(sizes)
        flat = self._memory.get((dtype, weights))
        if flat is None or flat.numel() < count:
            self._memory.pop((dtype, weights), None)
            flat = self._memory[dtype, weights] = self._drawn(dtype, count)
        return flat[:count].view(sizes)

    def _drawn(self, dtype: torch.dtype, count: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        block = torch.empty(min(count, _BLOCK), device=self.device).normal_(std=SCALE, generator=generator)
        flat = torch.empty(count, device=self.device, dtype=dtype)
        for start in range(0, count, _BLOCK):
            part = flat[start : start + _BLOCK]
            part.copy_(block[: part.numel()])
        return flat

    def turns(self, num_bytes: int) -> int:
        """Copies of operands of so many bytes."""
        return max(1, min(MOST_TURNS, math.ceil(self.cold_bytes / max(num_bytes, 1))))

    def matrices(self, dtype: torch.dtype, stored: str, *sizes: int) -> tuple[Tensor, ...]:
        """Copies of `[..., rows, columns]` that take turns, stored by rows (`r`) or columns (`c`)."""
        rows, columns = sizes[-2:] if stored == "r" else sizes[:-3:-1]
        count = self.turns(math.prod(sizes) * dtype.itemsize)
        every = self.random(dtype, count, *sizes[:-2], rows, columns, weights=True)
        return tuple(each if stored == "r" else each.transpose(-1, -2) for each in every)

    def one(self, dtype: torch.dtype, stored: str, *sizes: int) -> Tensor:
        rows, columns = sizes[-2:] if stored == "r" else sizes[:-3:-1]
        made = self.random(dtype, *sizes[:-2], rows, columns)
        return made if stored == "r" else made.transpose(-1, -2)


def is_own(shape: KernelShape) -> bool:
    """True if the kernel is this package's own, which Triton compiles at its first call."""
    words = shape.kernel.split()
    return words[0] == ATTENTION and words[1] in OWN_KERNELS


def launch_of(shape: KernelShape, operands: Operands) -> Launch | None:
    """A call of the kernel; None where this process does not know how to call it alone."""
    dtype = getattr(torch, shape.dtype, None)
    make = _MAKERS.get(shape.kernel.split()[0])
    if make is None or not isinstance(dtype, torch.dtype) or dtype.itemsize == 1:
        return None
    return make(shape, dtype, operands)


def _gemm(shape: KernelShape, dtype: torch.dtype, operands: Operands) -> Launch | None:
    stored, _, epilogue = (shape.layout or "rc").partition(" ")
    m, (k, n) = shape.size, shape.rest
    if epilogue not in ("", "addmm"):
        return None
    a, weights = operands.one(dtype, stored[0], m, k), operands.matrices(dtype, stored[1], k, n)
    out = torch.empty(m, n, device=operands.device, dtype=dtype)
    if not epilogue:
        return lambda index: torch.mm(a, weights[index % len(weights)], out=out)
    bias = operands.random(dtype, n)
    return lambda index: torch.addmm(bias, a, weights[index % len(weights)], out=out)


def _batched(shape: KernelShape, dtype: torch.dtype, operands: Operands) -> Launch | None:
    stored, _, epilogue = (shape.layout or "rr").partition(" ")
    m, (batch, k, n) = shape.size, shape.rest
    if epilogue:
        return None
    a, b = operands.one(dtype, stored[0], batch, m, k), operands.matrices(dtype, stored[1], batch, k, n)
    out = torch.empty(batch, m, n, device=operands.device, dtype=dtype)
    return lambda index: torch.bmm(a, b[index % len(b)], out=out)


def _grouped(shape: KernelShape, dtype: torch.dtype, operands: Operands) -> Launch | None:
    """Rows spread over the experts at random, as the cost model takes them to."""
    if operands.device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    stored = (shape.layout or "rc")[1]
    rows, (experts, k, n) = shape.size, shape.rest
    a, weights = operands.random(dtype, rows, k), operands.matrices(dtype, stored, experts, k, n)
    chosen = torch.randint(experts, (rows,), generator=torch.Generator().manual_seed(rows))
    ends = chosen.bincount(minlength=experts).cumsum(0).to(operands.device, torch.int32)
    return lambda index: torch._grouped_mm(a, weights[index % len(weights)], ends)


def _attention(shape: KernelShape, dtype: torch.dtype, operands: Operands) -> Launch | None:
    """Heads side by side, as projections leave them."""
    case = attention_of(shape)
    batch, queries, keys, heads, kv_heads = case.batch, case.q_len, case.kv_len, case.heads, case.kv_heads
    head_dim, value_dim = case.head_dim, case.value_dim
    if case.kernel in OWN_KERNELS:
        return _own_call(case, operands.device)
    mask_item_bytes = case.mask_bytes // (batch * queries * keys)
    if case.window or (mask_item_bytes and mask_item_bytes not in _MASKS):
        return None
    call = _library_call(case.kernel, case.causal, head_dim**-0.5, operands.device)
    if call is None:
        return None
    size = kv_heads * (head_dim + value_dim)
    copies = operands.turns(batch * keys * size * dtype.itemsize) if queries == 1 else 1
    query = operands.random(dtype, batch, queries, heads, head_dim).transpose(1, 2)
    every = operands.random(dtype, min(copies, 16), batch * keys * size, weights=True)
    pairs = [_keys_and_values(each, batch, keys, kv_heads, head_dim) for each in every]
    mask = None
    if mask_item_bytes:
        mask_dtype = _MASKS[mask_item_bytes] if mask_item_bytes != dtype.itemsize else dtype
        mask = torch.ones(batch, 1, queries, keys, device=operands.device, dtype=mask_dtype)
        mask = mask.expand(-1, heads, -1, -1)
    return lambda index: call(query, *pairs[index % len(pairs)], mask)


def _own_call(case: Attention, device: torch.device) -> Launch | None:
    """This package's kernels, which run on GPUs with Triton alone."""
    from weaveopt.measure.cases.attention.masked import masked
    from weaveopt.measure.cases.attention.paged import paged
    from weaveopt.ops.attention.gpu import has_triton

    if device.type != "cuda" or not has_triton():
        return None
    return paged(case, device) if case.kernel == "paged" else masked(case, device, reads_mask=case.mask_bytes > 0)


def _keys_and_values(memory: Tensor, batch: int, keys: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys `[batch, kv_heads, keys, head_dim]`, and values in what is left of the memory."""
    split = batch * keys * kv_heads * head_dim
    key, value = (part.view(batch, keys, kv_heads, -1).transpose(1, 2) for part in (memory[:split], memory[split:]))
    return key, value


_MASKS: Mapping[int, torch.dtype] = {1: torch.bool, 2: torch.bfloat16, 4: torch.float32}
"""Dtype of a mask by its bytes an element."""
AttentionKernelCall = Callable[[Tensor, Tensor, Tensor, Tensor | None], object]


def _library_call(kernel: str, causal: bool, scale: float, device: torch.device) -> AttentionKernelCall | None:
    """The call of a kernel that torch ships."""
    if kernel == "sdpa":
        return lambda q, k, v, mask: F.scaled_dot_product_attention(
            q, k, v, mask, 0.0, causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if kernel in ("flash", "cudnn") and device.type == "cuda":
        from weaveopt.measure.cases.attention.masked import library_call

        return lambda q, k, v, mask: library_call(q, k, v, scale, causal, kernel)
    return None


_MAKERS: Mapping[str, Callable[[KernelShape, torch.dtype, Operands], Launch | None]] = {
    GEMM: _gemm, BATCHED: _batched, GROUPED: _grouped, ATTENTION: _attention,
}  # fmt: skip
"""How kernels are called, by the first word of their name."""
