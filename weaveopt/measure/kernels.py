"""A rank's own kernels: launches, products, kernels bound by memory, attention. No rank waits for another here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weaveopt.cost_model.batched import same_work
from weaveopt.measure.clock import Clock, Sample
from weaveopt.records.site import Product

Tensor = torch.Tensor
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Rows, columns and depths of products, at whose corners they are measured."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]

    @property
    def corners(self) -> list[tuple[int, int, int]]:
        """(m, n, k) by n, then k, then m."""
        return [(m, n, k) for n in self.n for k in self.k for m in self.m]


class Products:
    """`a[m, k] @ weight[n, k].t()`. Weights take turns in more memory than the caches hold, as a model's layers do."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, cache_bytes: int, largest: tuple[int, int, int]
    ) -> None:
        m, n, k = largest
        self._weights = torch.randn(max(2 * cache_bytes // dtype.itemsize, n * k), device=device).to(dtype) * 0.05
        self._rows = torch.randn(m * k, device=device).to(dtype) * 0.5
        self._out = torch.empty(m * n, device=device, dtype=dtype)

    def sample(self, clock: Clock, m: int, n: int, k: int, expected_us: float) -> Sample:
        a = self._rows[: m * k].view(m, k)
        out = self._out[: m * n].view(m, n)
        copies = max(1, min(64, self._weights.numel() // (n * k)))
        weights = [self._weights[i * n * k : (i + 1) * n * k].view(n, k).t() for i in range(copies)]
        return clock.alone(lambda index: torch.mm(a, weights[index % copies], out=out), expected_us)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What follows the all-reduce in most models."""
    total = x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return total, (wide * scale).to(x.dtype) * weight


def gate(x: Tensor, y: Tensor) -> Tensor:
    """The point-wise kernel of a gated MLP."""
    return F.silu(x) * y


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: its inputs of [tokens, hidden], and the passes over such memory that it makes."""

    function: Callable[..., object]
    inputs: int
    passes: int
    takes_weight: bool

    def num_bytes(self, tokens: int, hidden: int) -> int:
        return self.passes * tokens * hidden * torch.bfloat16.itemsize


NORM = Kernel(add_norm, 2, 4, True)
GATE = Kernel(gate, 2, 3, False)


def fused_kernel(
    clock: Clock, device: torch.device, kernel: Kernel, tokens: int, hidden: int, expected_us: float
) -> tuple[int, Sample]:
    """Inductor's kernel for static shapes, as (bytes read and written, time)."""
    torch._dynamo.reset()
    compiled = torch.compile(kernel.function, dynamic=False)
    inputs = [torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16) for _ in range(kernel.inputs)]
    if kernel.takes_weight:
        inputs.append(torch.randn(hidden, device=device, dtype=torch.bfloat16))
    compiled(*inputs)
    return kernel.num_bytes(tokens, hidden), clock.alone(lambda index: compiled(*inputs), expected_us)


def copy(clock: Clock, device: torch.device, num_bytes: int, expected_us: float) -> Sample:
    """A copy of memory that no cache holds: `num_bytes` read and written in all."""
    source = torch.randn(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return clock.alone(lambda index: target.copy_(source), expected_us)


def launches(clock: Clock, device: torch.device) -> tuple[float, float]:
    """Microseconds from kernel to kernel in a graph (CPU: a call of a compiled function), and of one eager call."""
    import time

    x = torch.zeros(8, device=device)
    if device.type == "cuda":
        graph_us = clock.alone(lambda index: x.add_(1), 2.0).us
    else:
        empty = torch.compile(lambda value: value + 1, dynamic=False)
        empty(x)
        graph_us = clock.alone(lambda index: empty(x), 2.0).us
    calls = 2000
    start = time.perf_counter()
    for _ in range(calls):
        x.add_(1)
    eager_us = (time.perf_counter() - start) / calls * 1e6
    if device.type == "cuda":
        torch.cuda.synchronize()
    return graph_us, eager_us


@dataclass(frozen=True)
class GroupedCase:
    """`rows` rows, spread evenly over `experts`, each `[k, n]`."""

    experts: int
    rows: int
    k: int
    n: int

    @property
    def one(self) -> Product:
        return same_work(self.experts, Product(self.rows, self.k, self.n))


def has_grouped(device: torch.device) -> bool:
    """Whether this torch has grouped products for the device: older ones have them for some GPUs only."""
    rows, weights = torch.zeros(32, 16, device=device), torch.zeros(2, 16, 16, device=device)
    ends = torch.tensor([16, 32], device=device, dtype=torch.int32)
    try:
        torch._grouped_mm(rows.bfloat16(), weights.bfloat16().transpose(1, 2), ends)
    except (AttributeError, RuntimeError):
        return False
    return True


def grouped(clock: Clock, device: torch.device, case: GroupedCase, expected_us: float) -> tuple[Sample, Sample]:
    """The grouped product, and one product of the same work on the same weights."""
    rows = torch.randn(case.rows, case.k, device=device, dtype=torch.bfloat16)
    weights = torch.randn(case.experts, case.n, case.k, device=device, dtype=torch.bfloat16) * 0.05
    step = case.rows // case.experts
    ends = torch.arange(step, case.rows + 1, step, device=device, dtype=torch.int32)
    wide = weights.view(case.experts * case.n, case.k).t()
    by_expert = clock.alone(lambda index: torch._grouped_mm(rows, weights.transpose(1, 2), ends), expected_us)
    at_once = clock.alone(lambda index: torch.mm(rows[: case.one.m], wide), expected_us)
    return by_expert, at_once


HEAD = 128


@dataclass(frozen=True)
class AttentionCase:
    """Attention of `batch` sequences: `queries` against `keys`, heads of 128."""

    batch: int
    heads: int
    queries: int
    keys: int
    causal: bool = False


def attention(clock: Clock, device: torch.device, case: AttentionCase, expected_us: float) -> Sample:
    """As compiled models call it: with a mask in memory, or causal, on keys that stand there for every head."""
    shape = (case.batch, case.heads)
    query = torch.randn(*shape, case.queries, HEAD, device=device, dtype=torch.bfloat16)
    key, value = torch.randn(2, *shape, case.keys, HEAD, device=device, dtype=torch.bfloat16).unbind()
    mask = None
    if not case.causal:
        mask = torch.zeros(case.batch, 1, case.queries, case.keys, device=device, dtype=torch.bfloat16)
        mask = mask.expand(-1, case.heads, -1, -1)

    def run(index: int) -> object:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=case.causal)

    with torch.no_grad():
        return clock.alone(run, expected_us)


def shared_out(items: Sequence[int], rank: int, world: int, copies: int) -> Iterator[int]:
    """The items of this rank: each goes to `copies` ranks, so that ranks need not all measure everything."""
    groups = max(1, world // copies)
    for index, item in enumerate(items):
        if index % groups == rank % groups:
            yield item
