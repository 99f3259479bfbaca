"""Operations that Inductor leaves to library kernels, and how each is priced: GEMMs, attention, collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
import torch.fx as fx

from weaveopt import cost_model
from weaveopt.cost_model import Attention, Gemm, Machine
from weaveopt.cost_model.exchange import (
    ShardedMixture,
    experts_us,
    library_exchange_us,
    library_kernels_us,
    of_last_rank,
    waiting_us,
)
from weaveopt.cost_model.prefetch import pulled_us
from weaveopt.fabrics.topology import Topology
from weaveopt.graph.exchange import Exchange, exchange_of, sharded_of
from weaveopt.graph.facts import group_of
from weaveopt.graph.values import (
    argument,
    bytes_of,
    dtype_name,
    has_rows,
    hint,
    num_elements,
    shape_of,
    tensor_argument,
    tensor_inputs,
    tensors_of,
)

GEMM = "gemm"
ATTENTION = "attention"
COLLECTIVE = "collective"
MEMORY = "memory"

_GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm"})
_LINEARS = frozenset({"linear", "_mkl_linear", "mkldnn_linear", "_linear_pointwise"})
_ORDERING = frozenset(
    {
        "sort", "topk", "cumsum", "cumprod", "logcumsumexp", "histc", "bincount", "nonzero", "unique2", "_unique2",
        "kthvalue", "median", "mode", "multinomial", "convolution", "scatter_reduce", "segment_reduce",
    }
)  # fmt: skip
BACKWARD_FACTOR = 2.5
"""Ratio of attention's backward to forward pass: five GEMMs instead of two."""


@cache
def name_of(target: object) -> tuple[str, str]:
    """(namespace, name without overload) of an operator; empty words for a Python function."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return namespace, name
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "higher_order", target.name()
    return "", ""


@cache
def kind_of(target: object) -> str | None:
    """The kind of library kernel that an operator runs as; None for what Inductor makes loops of."""
    namespace, name = name_of(target)
    if namespace == "_c10d_functional":
        return COLLECTIVE
    if name.startswith("_scaled_dot_product_") or name in ("flex_attention", "flex_attention_backward"):
        return ATTENTION
    if name in _GEMMS or name in _LINEARS:
        return GEMM
    if name in _ORDERING or namespace not in ("aten", "prims"):
        return MEMORY
    return None


class Call(Protocol):
    """A library kernel's call: its computation, and how to price it."""

    @property
    def name(self) -> str: ...

    def us(self, machine: Machine, ratio: float) -> float:
        """Microseconds with `ratio` times the tokens; CPU ranks have a core each but for collectives."""
        ...


@dataclass(frozen=True)
class GemmCall:
    """`batch` GEMMs of `[m, k] @ [k, n]`; or one grouped by rows among `groups` experts."""

    gemm: Gemm
    dtype: str
    batch: int = 1
    groups: int = 0
    grows: bool = False
    """True if `m` grows with the token count."""
    name: str = GEMM

    def us(self, machine: Machine, ratio: float) -> float:
        gemm = replace(self.gemm, m=max(round(self.gemm.m * ratio), 1)) if self.grows else self.gemm
        if self.groups:
            return cost_model.grouped_gemm_us(machine, self.groups, gemm, self.dtype)
        return cost_model.batched_gemm_us(machine, self.batch, gemm, self.dtype)


@dataclass(frozen=True)
class AttentionCall:
    """Attention, forward or backward."""

    attention: Attention
    factor: float = 1.0
    name: str = ATTENTION

    def us(self, machine: Machine, ratio: float) -> float:
        return self.factor * cost_model.attention_us(machine, self.at(ratio))

    def at(self, ratio: float) -> Attention:
        """Scale the attention to `ratio` times the tokens: longer sequences in prefill, more of them in decode."""
        now = self.attention
        if ratio == 1.0:
            return now
        if now.q_len == 1:
            return replace(now, batch=max(round(now.batch * ratio), 1))
        q_len = max(round(now.q_len * ratio), 1)
        return replace(now, q_len=q_len, kv_len=max(now.kv_len + q_len - now.q_len, 1))


@dataclass(frozen=True)
class CollectiveCall:
    """The library's collective, by the larger side of the call."""

    name: str
    num_bytes: int
    world: int
    hosts: int
    grows: bool = False

    def us(self, machine: Machine, ratio: float) -> float:
        return cost_model.collective_us(machine, self.name, self._bytes(ratio), self.world, self.hosts)

    def algorithm(self, machine: Machine, ratio: float) -> str:
        """The library's between hosts, of which `us` is the price; empty on one host."""
        return cost_model.library_algorithm(machine, self.name, self._bytes(ratio), self.world, self.hosts)

    def _bytes(self, ratio: float) -> float:
        return self.num_bytes * ratio if self.grows else self.num_bytes


@dataclass(frozen=True)
class MemoryCall:
    """A library's kernel that is bound by memory: a sort, a histogram, a custom operator."""

    num_bytes: int
    grows: bool = False
    name: str = MEMORY

    def us(self, machine: Machine, ratio: float) -> float:
        return cost_model.memory_us(machine, self.num_bytes * ratio if self.grows else self.num_bytes)


@dataclass(frozen=True)
class ExchangeCall:
    """A mixture whose tokens travel to their experts through the library."""

    sharded: ShardedMixture
    hosts: int
    grows: bool = False
    name: str = MEMORY
    window: Window | None = None
    """Work before the call, of ranks that hold batches of their own."""

    def us(self, machine: Machine, ratio: float) -> float:
        sharded = replace(self.sharded, skew=machine.skew)
        if self.grows:
            sharded = sharded.with_tokens(max(round(sharded.of_rank.tokens * ratio), 1))
        waiting = 0.0
        if self.window is not None:
            sharded = sharded.with_tokens(machine.batch_tokens)
            waiting = waiting_us(machine, sharded.world, self.window.us(machine, machine.batch_tokens))
        last = sharded if self.window is None else of_last_rank(machine, sharded)
        computed = experts_us(machine, sharded) + library_kernels_us(machine, last) + waiting
        # Who asks multiplies by the ranks that share a core; what was measured of collectives has that in it.
        slowdown = machine.oversubscription(sharded.world, self.hosts)
        return computed + library_exchange_us(machine, last, self.hosts) / slowdown


@dataclass(frozen=True)
class PullCall:
    """A mixture whose ranks are independent: each pulls the experts that it lacks, and computes."""

    sharded: ShardedMixture
    name: str = MEMORY

    def us(self, machine: Machine, ratio: float) -> float:
        sharded = replace(self.sharded, skew=machine.skew).with_tokens(machine.batch_tokens)
        return pulled_us(machine, sharded)


def call_of(node: fx.Node, topologies: Mapping[str, Topology], tokens: int = 0) -> Call:
    """The call that a node whose `kind_of` is not None makes; what has `tokens` rows grows with the token count."""
    kind = kind_of(node.target)
    if kind == COLLECTIVE:
        return _collective(node, topologies, tokens)
    if kind == GEMM and (gemm := _gemm(node, tokens)) is not None:
        return gemm
    if kind == ATTENTION and (attention := attention_of(node)) is not None:
        return AttentionCall(attention, BACKWARD_FACTOR if "backward" in name_of(node.target)[1] else 1.0)
    if (exchange := exchange_of(node)) is not None:
        return _exchange(node, exchange, topologies, tokens)
    values = [*tensors_of(node), *(value for _, value in tensor_inputs(node))]
    return MemoryCall(sum(map(bytes_of, values)), any(has_rows(value, tokens) for value in values))


def _gemm(node: fx.Node, tokens: int) -> GemmCall | None:
    a, b, out = _operand(node, "a"), _operand(node, "b"), tensors_of(node)
    if a is None or b is None or not out:
        return None
    name, dtype = name_of(node.target)[1], dtype_name(a)
    k, n = shape_of(a)[-1], shape_of(out[0])[-1]
    rows, grows, layout = num_elements(a) // max(k, 1), has_rows(a, tokens), _layout(name, a, b)
    if "grouped" in name:
        return GemmCall(Gemm(rows, k, n, layout), dtype, groups=shape_of(b)[0] if b.ndim == 3 else 1, grows=grows)
    batch = shape_of(a)[0] if name in ("bmm", "baddbmm") else 1
    return GemmCall(Gemm(rows // max(batch, 1), k, n, layout), dtype, batch, grows=grows)


def _layout(name: str, a: torch.Tensor, b: torch.Tensor) -> str:
    """How a call stores its operands, by rows (`r`) or columns (`c`), and what it is if no plain GEMM: `rc addmm`."""
    stored = "".join("c" if hint(each.stride(-2)) == 1 and hint(each.stride(-1)) != 1 else "r" for each in (a, b))
    # These take a weight as [n, k].
    by_rows = {"r": "c", "c": "r"}
    stored = stored[0] + by_rows[stored[1]] if name in _LINEARS else stored
    return stored if name in ("mm", "bmm", "_grouped_mm", *_LINEARS) else f"{stored} {name}"


def _operand(node: fx.Node, which: str) -> torch.Tensor | None:
    """Return the left or right operand, as the many schemas of GEMMs call it."""
    for name in ("mat1", "batch1", "mat_a", "input", "self") if which == "a" else ("mat2", "batch2", "mat_b", "weight"):
        value = tensor_argument(node, name)
        if value is not None and value.ndim >= 2:
            return value
    return None


def attention_of(node: fx.Node) -> Attention | None:
    """Read the computation of an attention node; None if its operands are not `[batch, heads, length, head_dim]`.

    The blocks of a flex attention's mask are data that no graph holds: taken as causal where queries and keys are
    equally many.
    """
    flex = name_of(node.target)[1].startswith("flex_attention")
    operands = node.args[:3] if flex else [argument(node, name) for name in ("query", "key", "value")]
    values = [each.meta.get("val") for each in operands if isinstance(each, fx.Node)]
    shapes = [shape_of(value) for value in values if isinstance(value, torch.Tensor)]
    if len(shapes) != 3 or any(len(shape) != 4 for shape in shapes):
        return None
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _), (*_, value_dim) = shapes
    causal = q_len == kv_len > 1 if flex else bool(argument(node, "is_causal"))
    mask = next((v for name in ("attn_mask", "attn_bias") if (v := tensor_argument(node, name)) is not None), None)
    return Attention(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype_name(values[0]),  # type: ignore[arg-type]
        causal=causal,
        mask_bytes=0 if mask is None else _stored_bytes(mask),
    )


def _stored_bytes(value: torch.Tensor) -> int:
    sizes = [size for size, step in zip(shape_of(value), value.stride(), strict=True) if hint(step) != 0]
    return math.prod(sizes) * value.dtype.itemsize


def _collective(node: fx.Node, topologies: Mapping[str, Topology], tokens: int) -> CollectiveCall:
    name, known = name_of(node.target)[1], topologies.get(group_of(node))
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    kind = next((kind for kind in kinds if name.startswith(kind)), "all_gather")
    values = list(tensors_of(node))
    if kind == "reduce_scatter":
        values = [value for _, value in tensor_inputs(node)]
    if name == "wait_tensor" or known is None:
        return CollectiveCall(kind, 0, 1, 1)
    grows = any(has_rows(value, tokens) for value in values)
    return CollectiveCall(kind, sum(map(bytes_of, values)), known.world, known.num_hosts, grows)


def _exchange(
    node: fx.Node, call: Exchange, topologies: Mapping[str, Topology], tokens: int
) -> ExchangeCall | PullCall:
    known, [value] = topologies.get(call.group), tensors_of(node)
    sharded = sharded_of(node, call)
    if call.independent:
        return PullCall(sharded)
    grows = call.same_tokens and has_rows(value, tokens)
    window = None if call.same_tokens else window_of(node, topologies)
    return ExchangeCall(sharded, 1 if known is None else known.num_hosts, grows, window=window)


@dataclass(frozen=True)
class Window:
    """GEMMs and attention of a graph between two exchanges of experts, on this rank's own tokens."""

    calls: tuple[Call, ...]
    tokens: int
    """Tokens in the captured graph."""

    def us(self, machine: Machine, tokens: int) -> float:
        """Microseconds with so many tokens of a rank."""
        ratio = tokens / max(self.tokens, 1)
        return sum(call.us(machine, ratio) for call in self.calls)


def window_of(node: fx.Node, topologies: Mapping[str, Topology]) -> Window:
    """Work between the exchange before `node` and `node`; memory-bound kernels are left out."""
    [value] = tensors_of(node)
    calls, tokens, each = [], shape_of(value)[0], node.prev
    while each.op != "root" and exchange_of(each) is None:
        if each.op == "call_function" and kind_of(each.target) in (GEMM, ATTENTION):
            calls.append(call_of(each, topologies, tokens))
        each = each.prev
    return Window(tuple(reversed(calls)), tokens)
