"""The activation between the two GEMMs of an expert, recognized by what it computes.

Torch versions decompose activations differently. So the nodes between the GEMMs are run on numbers, in fp64 and without
their casts, and compared with the supported activations; alpha and limit are numbers of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.utils._python_dispatch import _disable_current_modes

from weaveopt.graph.pattern import CAST, CLAMP, MUL, is_call, is_rounding, tensor_of
from weaveopt.graph.scalars import number_of, symbol_of
from weaveopt.graph.values import shape_of
from weaveopt.ops.experts.activation import Activation, computing
from weaveopt.records.candidate import Rejection
from weaveopt.sites.mixture.reading import is_one_a_row

aten = torch.ops.aten
Tensor = torch.Tensor

GATHER = frozenset({aten.index.Tensor, aten.index_select.default})
_FULL = frozenset({aten.full.default, aten.scalar_tensor.default, aten.full_like.default})
_CLAMPS = CLAMP | {aten.minimum.default}


@dataclass(frozen=True)
class Between:
    """The nodes between the GEMMs of the experts."""

    first: fx.Node
    """The GEMM before them."""
    last: fx.Node
    """Operand of the second GEMM, [rows, width] when dimensions of size 1 are ignored."""
    nodes: frozenset[fx.Node]
    """Nodes between the GEMMs, without the GEMMs and without nodes that others share."""
    biases: tuple[fx.Node, ...]
    """Rows that were gathered by expert, and are added."""
    masks: tuple[fx.Node, ...]
    """Booleans that rows are masked with."""
    numbers: tuple[fx.Node, ...] = ()
    """Floats of the program that come as tensors."""


def between(first: fx.Node, last: fx.Node) -> Between | Rejection:
    """Collect the nodes between a GEMM and the operand `last` of the next one; rejects any other tensor operand."""
    nodes: set[fx.Node] = set()
    biases: list[fx.Node] = []
    masks: list[fx.Node] = []
    numbers: list[fx.Node] = []
    pending = [last]
    while pending:
        node = pending.pop()
        if node is first or node in nodes or node in biases or node in masks or node in numbers:
            continue
        value = tensor_of(node)
        if symbol_of(node) is not None:
            numbers.append(node)
        elif value is not None and value.dtype is torch.bool:
            masks.append(node)
        elif is_call(node, GATHER):
            biases.append(node)
        elif node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload | type(operator.getitem)):
            return Rejection("activation_not_known", "a tensor comes in between the GEMMs", (("node", node.name),))
        elif is_call(node, CAST) and not is_rounding(node):
            return Rejection(
                "activation_not_known", "a cast changes values by more than rounding", (("node", node.name),)
            )
        else:
            nodes.add(node)
            pending.extend(node.all_input_nodes)
    for mask in masks:
        for user in nodes & mask.users.keys():
            value, masked = tensor_of(mask), tensor_of(user)
            if value is None or masked is None or not is_one_a_row(shape_of(value), shape_of(masked)):
                return Rejection("activation_not_known", "a mask is not one for each row", (("node", mask.name),))
    return Between(first, last, frozenset(nodes), tuple(biases), tuple(masks), tuple(numbers))


def activation_of(found: Between) -> Activation | Rejection:
    """The activation that these nodes compute; layers of one kind are run once."""
    key = _signature(found)
    if key not in _known:
        if len(_known) > _KEPT:
            _known.clear()
        _known[key] = _recognized(found)
    return _known[key]


_known: dict[tuple[object, ...], Activation | Rejection] = {}
_KEPT = 64


def _signature(found: Between) -> tuple[object, ...]:
    """The nodes without their names: equal where they compute the same."""
    order = sorted(found.nodes)
    names: dict[fx.Node, str] = {found.first: "first", **{node: f"n{index}" for index, node in enumerate(order)}}
    names.update(dict.fromkeys(found.biases, "bias"))
    names.update(dict.fromkeys(found.masks, "mask"))
    names.update((node, str(number_of(node))) for node in found.numbers)
    first, last = tensor_of(found.first), tensor_of(found.last)
    sizes = [None if value is None else shape_of(value)[1:] for value in (first, last)]
    lines = [(str(node.target), str(fx.map_arg((node.args, node.kwargs), names.__getitem__))) for node in order]
    return (*map(str, sizes), names[found.last], *lines)


def _recognized(found: Between) -> Activation | Rejection:
    first, last = tensor_of(found.first), tensor_of(found.last)
    assert first is not None and last is not None, f"{found.first.name} or {found.last.name} makes no tensor"
    wide, narrow = (max(shape_of(value)[1:], default=0) for value in (first, last))
    unknown = Rejection("activation_not_known", "no activation that the kernels support", (("ops", _ops(found)),))
    if wide not in (narrow, 2 * narrow):
        return unknown
    inner = shape_of(first)[1:]
    with _disable_current_modes(), torch.device("cpu"):  # graphs are captured with tensors that hold no numbers
        try:
            if not _adds_biases(found, wide, inner) or not _masks_rows(found, wide, inner):
                return unknown
            return (
                computing(
                    lambda z: _run(found, z.view(len(z), *inner)).reshape(len(z), -1),
                    wide,
                    gated=wide == 2 * narrow,
                    limits=_numbers_of(found, _CLAMPS),
                    alphas=_numbers_of(found, MUL),
                )
                or unknown
            )
        except Exception:  # whatever it is, it is no activation
            return unknown


def _numbers_of(found: Between, targets: frozenset[object]) -> set[float]:
    return {abs(number) for node in found.nodes if is_call(node, targets) for number in _numbers(node)}


def _numbers(node: fx.Node) -> list[float]:
    return [number for number in map(number_of, node.args) if number is not None]


def _ops(found: Between) -> str:
    return ", ".join(sorted({str(node.target).removeprefix("aten.") for node in found.nodes}))


def _adds_biases(found: Between, wide: int, inner: Sequence[int]) -> bool:
    """True if biases are added, each once, to the first GEMM's rows before anything else is done to them."""
    if not found.biases:
        return True
    bias = torch.linspace(-0.5, 0.7, wide, dtype=torch.float64)[None]
    rows = torch.linspace(-2.0, 2.0, 3 * wide, dtype=torch.float64).view(3, wide)
    added = _run(found, (rows + bias * len(found.biases)).view(3, *inner))
    return torch.allclose(_run(found, rows.view(3, *inner), bias), added)


def _masks_rows(found: Between, wide: int, inner: Sequence[int]) -> bool:
    """True if masked rows become zeros."""
    rows = torch.linspace(1.0, 2.0, 3 * wide, dtype=torch.float64).view(3, wide)
    return not found.masks or not _run(found, rows.view(3, *inner), is_masked=True).any()


def _run(found: Between, probe: Tensor, bias: Tensor | None = None, is_masked: bool = False) -> Tensor:
    """The nodes on `probe` in place of the first GEMM's rows: biases are 0 or `bias`, all rows or none are masked,
    nothing is rounded."""
    zero, no = torch.zeros((), dtype=torch.float64), torch.full((), is_masked)
    known: dict[fx.Node, object] = {found.first: probe}
    known.update((each, zero if bias is None else bias.expand(len(probe), -1)) for each in found.biases)
    known.update(dict.fromkeys(found.masks, no))
    known.update((node, torch.tensor(number_of(node), dtype=torch.float64)) for node in found.numbers)
    for node in sorted(found.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)  # type: ignore[arg-type]
        if is_call(node, CAST):
            known[node] = args[0]
        elif is_call(node, _FULL):
            known[node] = torch.tensor(args[-1], dtype=torch.float64)
        else:
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    result = known[found.last]
    assert isinstance(result, Tensor)
    return result
