"""Sizes of the fake tensors that nodes carry, as numbers (symbolic sizes by their hints), and arguments by name."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.fx as fx

from weaveopt.records.site import DTYPE_BYTES

Layout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(offset, sizes, strides) of a view, dimensions of one element left out: equal where the same elements are read."""


def hint(size: int | torch.SymInt) -> int:
    """A size as a number, without a guard on it."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def shape_of(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(hint(size) for size in value.shape)


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The fake tensors that a node makes: one, several, or none."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(each for each in value if isinstance(each, torch.Tensor))
    return ()


def num_elements(value: torch.Tensor) -> int:
    return math.prod(shape_of(value))


def bytes_of(value: torch.Tensor) -> int:
    """Bytes of all elements, each of an expanded one counted."""
    return num_elements(value) * value.dtype.itemsize


def has_rows(value: torch.Tensor, tokens: int) -> bool:
    """True if a value's rows scale with the tokens: `tokens` rows, or a multiple, as for several heads or choices."""
    if tokens < 1 or value.ndim < 2:
        return False
    rows = math.prod(shape_of(value)[:-1])
    return rows > 0 and rows % tokens == 0


def layout_of(value: torch.Tensor) -> Layout:
    kept = [(size, hint(step)) for size, step in zip(shape_of(value), value.stride(), strict=True) if size != 1]
    return hint(value.storage_offset()), tuple(size for size, _ in kept), tuple(step for _, step in kept)


def touched_bytes(value: torch.Tensor, layout: Layout) -> int:
    """Bytes of the distinct elements that a view reads: a dimension expanded by stride 0 counts once."""
    return math.prod(size for size, step in zip(*layout[1:], strict=True) if step != 0) * value.dtype.itemsize


def dtype_name(value: torch.Tensor) -> str:
    """The cost model's word for a dtype, else for one of the same size."""
    name = str(value.dtype).removeprefix("torch.")
    if name in DTYPE_BYTES:
        return name
    return next((known for known, size in DTYPE_BYTES.items() if size == value.dtype.itemsize), "float32")


def argument(node: fx.Node, name: str) -> object:
    """The argument of an operator's call that its schema calls `name`; None where it has none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    for index, each in enumerate(node.target._schema.arguments):
        if each.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, each.default_value)
    return None


def tensor_argument(node: fx.Node, name: str) -> torch.Tensor | None:
    found = argument(node, name)
    value = found.meta.get("val") if isinstance(found, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def tensor_inputs(node: fx.Node) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """The nodes that a node reads a tensor of, each once."""
    for each in node.all_input_nodes:
        value = each.meta.get("val")
        if isinstance(value, torch.Tensor):
            yield each, value
