"""transformers' `grouped_mm`: choices sorted by expert, and GEMMs over the rows of each."""

from __future__ import annotations

import torch
import torch.fx as fx

from weaveopt.graph.pattern import CAST, is_call
from weaveopt.graph.scalars import symbols_of
from weaveopt.graph.values import argument
from weaveopt.sites.mixture.activation import GATHER
from weaveopt.sites.mixture.experts import Experts, Linear
from weaveopt.sites.mixture.reading import (
    GETITEM,
    TRANSPOSE,
    Reading,
    Unknown,
    check_remote_experts,
    flat_of,
    index_of,
    node_of,
    swaps_last,
    unmasked,
)
from weaveopt.sites.mixture.tail import activation_between, check_masked, owning, tail_of, with_bias

aten = torch.ops.aten


def is_grouped(node: fx.Node) -> bool:
    """True for a GEMM grouped by expert: torch's, or transformers' loop for what torch's does not support."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name in ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


def grouped_experts(first: fx.Node, second: fx.Node) -> Experts:
    reading = Reading({first, second})
    rows, weight, offsets = (node_of(each, "an operand of the grouped GEMM") for each in _operands(first))
    down_rows, down_weight, _ = (node_of(each, "an operand of the grouped GEMM") for each in _operands(second))
    up, down = (_linear(each, reading) for each in (weight, down_weight))
    ids, order = _sorted(offsets, reading)
    x, num_choices = _tokens(unmasked(rows, reading, of_rows=True), order, reading)
    num_masks = len(reading.masks)
    inside, activation = activation_between(first, down_rows, reading)
    up = with_bias(up, inside.biases, ids, reading)
    tail = tail_of(second, order, reading)
    down = with_bias(down, tail.biases, ids, reading)
    weights = _picked(tail.weights, order, reading)
    chosen = node_of(order.args[0], "a sort").args[0]
    check_masked(inside, num_masks, down, reading)
    check_remote_experts(ids, up.weight, reading)
    found = Experts(
        form="grouped_mm",
        x=x,
        experts=flat_of(chosen, reading),
        weights=weights,
        num_choices=num_choices,
        up=up,
        down=down,
        activation=activation,
        output=tail.output,
        numbers=symbols_of(inside.numbers),
    )
    return owning(found, reading)


def _operands(node: fx.Node) -> tuple[object, object, object]:
    """Rows, weights and ends of the groups, as both operators call them."""
    names = ("self", "mat2", "offs") if "aten" in str(node.target) else ("input", "weight", "offs")
    return tuple(argument(node, name) for name in names)  # type: ignore[return-value]


def _sorted(offsets: fx.Node, reading: Reading) -> tuple[fx.Node, fx.Node]:
    """`cumsum(histc(ids, E, 0, E - 1), 0)` -> the sorted ids and the order of them."""
    total = reading.take(offsets, frozenset({aten.cumsum.default}), "cumsum of the rows of each expert")
    counts = reading.through(total.args[0], CAST)
    reading.take(counts, frozenset({aten.histc.default}), "histc of the sorted experts")
    bins, least, most = (*counts.args[1:4], 100, 0, 0)[:3]
    if least != 0 or not isinstance(bins, int) or most != bins - 1:
        raise Unknown(counts, "a bin for each expert")
    ids = reading.through(counts.args[0], CAST)
    reading.take(ids, GETITEM, "the values of a sort")
    sort = reading.take(ids.args[0], frozenset({aten.sort.default, aten.sort.stable}), "a sort of the choices")
    order = next((user for user in sort.users if is_call(user, GETITEM) and user.args[1] == 1), None)
    if ids.args[1] != 0 or order is None or argument(sort, "descending"):
        raise Unknown(sort, "an ascending sort, its values and its order")
    reading.passed.add(order)
    return ids, order


def _tokens(rows: fx.Node, order: fx.Node, reading: Reading) -> tuple[fx.Node, int]:
    """`x[order // k]` -> x, k."""
    gathered = reading.take(rows, GATHER, "the tokens' rows in the order of the experts")
    index = index_of(gathered)
    if index is order:
        return node_of(gathered.args[0], "tokens"), 1
    divided = reading.take(index, frozenset({aten.div.Tensor_mode, aten.floor_divide.default}), "order // choices")
    if divided.args[0] is not order or not isinstance(divided.args[1], int):
        raise Unknown(divided, "order // choices")
    return node_of(gathered.args[0], "tokens"), divided.args[1]


def _picked(weights: fx.Node, order: fx.Node, reading: Reading) -> fx.Node:
    """`weights.view(-1)[order]` -> weights."""
    gathered = reading.take(weights, GATHER, "the weights in the order of the experts")
    if index_of(gathered) is not order:
        raise Unknown(gathered, "the weights in the order of the experts")
    return flat_of(gathered.args[0], reading)


def _linear(weight: fx.Node, reading: Reading) -> Linear:
    """[experts, in, out] as the GEMM takes it: a transposed view of [experts, out, in], or as it is."""
    if is_call(weight, TRANSPOSE) and swaps_last(weight):
        reading.passed.add(weight)
        return Linear(node_of(weight.args[0], "weights"), transposed=False)
    return Linear(weight, transposed=True)
