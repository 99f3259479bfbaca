"""Operations that Inductor leaves to a library's kernel, and what each takes: products, attention, collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
import torch.fx as fx

from weaveopt import cost_model
from weaveopt.cost_model import Attention, Machine
from weaveopt.fabrics.topology import Topology
from weaveopt.graph.facts import group_of
from weaveopt.inductor.values import (
    argument,
    bytes_of,
    dtype_name,
    hint,
    num_elements,
    shape_of,
    tensor_argument,
    tensor_inputs,
    tensors_of,
)
from weaveopt.records.site import Product

PRODUCT = "product"
ATTENTION = "attention"
COLLECTIVE = "collective"
MEMORY = "memory"

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm"})
_LINEARS = frozenset({"linear", "_mkl_linear", "mkldnn_linear", "_linear_pointwise"})
_ORDERING = frozenset(
    {
        "sort", "topk", "cumsum", "cumprod", "logcumsumexp", "histc", "bincount", "nonzero", "unique2", "_unique2",
        "kthvalue", "median", "mode", "multinomial", "convolution", "scatter_reduce", "segment_reduce",
    }
)  # fmt: skip
BACKWARD_FACTOR = 2.5
"""Attention's backward pass makes five products where the forward pass makes two."""


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
    if name in _PRODUCTS or name in _LINEARS:
        return PRODUCT
    if name in _ORDERING or namespace not in ("aten", "prims"):
        return MEMORY
    return None


def call_us(node: fx.Node, machine: Machine, topologies: Mapping[str, Topology]) -> float:
    """Microseconds of a node whose `kind_of` is not None, without the crowding of processors but for collectives."""
    kind = kind_of(node.target)
    if kind == COLLECTIVE:
        return _collective_us(node, machine, topologies)
    if kind == PRODUCT:
        return _product_us(node, machine)
    if kind == ATTENTION and (attention := attention_of(node)) is not None:
        factor = BACKWARD_FACTOR if "backward" in name_of(node.target)[1] else 1.0
        return factor * cost_model.attention_us(machine, attention)
    return cost_model.memory_us(machine, _traffic(node))


def _traffic(node: fx.Node) -> int:
    read = sum(bytes_of(value) for _, value in tensor_inputs(node))
    return read + sum(bytes_of(value) for value in tensors_of(node))


def _product_us(node: fx.Node, machine: Machine) -> float:
    a, b, out = _operand(node, "a"), _operand(node, "b"), tensors_of(node)
    if a is None or b is None or not out:
        return cost_model.memory_us(machine, _traffic(node))
    name, dtype = name_of(node.target)[1], dtype_name(a)
    k, n = shape_of(a)[-1], shape_of(out[0])[-1]
    rows = num_elements(a) // max(k, 1)
    if "grouped" in name:
        return cost_model.grouped_product_us(machine, shape_of(b)[0] if b.ndim == 3 else 1, Product(rows, k, n), dtype)
    batch = shape_of(a)[0] if name in ("bmm", "baddbmm") else 1
    return cost_model.batched_product_us(machine, batch, Product(rows // max(batch, 1), k, n), dtype)


def _operand(node: fx.Node, which: str) -> torch.Tensor | None:
    """The left or right operand, as the many schemas of products call it."""
    for name in ("mat1", "batch1", "mat_a", "input", "self") if which == "a" else ("mat2", "batch2", "mat_b", "weight"):
        value = tensor_argument(node, name)
        if value is not None and value.ndim >= 2:
            return value
    return None


def attention_of(node: fx.Node) -> Attention | None:
    """What one attention node computes; None where its operands are not `[batch, heads, length, head_dim]`.

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
        head_dim=(head_dim + value_dim) // 2,
        dtype=dtype_name(values[0]),  # type: ignore[arg-type]
        causal=causal,
        mask_bytes=0 if mask is None else _stored_bytes(mask),
    )


def _stored_bytes(value: torch.Tensor) -> int:
    sizes = [size for size, step in zip(shape_of(value), value.stride(), strict=True) if hint(step) != 0]
    return math.prod(sizes) * value.dtype.itemsize


def _collective_us(node: fx.Node, machine: Machine, topologies: Mapping[str, Topology]) -> float:
    """The library's, by the larger side of the call."""
    name, known = name_of(node.target)[1], topologies.get(group_of(node))
    if name == "wait_tensor" or known is None:
        return 0.0
    moved = sum(bytes_of(value) for value in tensors_of(node))
    if name.startswith("reduce_scatter"):
        moved = sum(bytes_of(value) for _, value in tensor_inputs(node))
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    kind = next((kind for kind in kinds if name.startswith(kind)), "all_gather")
    return cost_model.collective_us(machine, kind, moved, known.world, known.num_hosts)
