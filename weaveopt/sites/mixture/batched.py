"""transformers' `batched_mm`: weights gathered for every choice, one GEMM of a single row for each."""

from __future__ import annotations

import torch
import torch.fx as fx

from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.scalars import symbols_of
from weaveopt.graph.values import shape_of
from weaveopt.sites.mixture.activation import GATHER
from weaveopt.sites.mixture.experts import Experts, Linear
from weaveopt.sites.mixture.reading import (
    TRANSPOSE,
    VIEWS,
    Reading,
    Unknown,
    check_remote_experts,
    cut_as_it_is,
    flat_of,
    index_of,
    node_of,
    swaps_last,
    unclamped,
    unmasked,
    value_of,
)
from weaveopt.sites.mixture.tail import activation_between, check_masked, owning, tail_of, with_bias

aten = torch.ops.aten


def batched_experts(first: fx.Node, second: fx.Node) -> Experts:
    reading = Reading({first, second})
    up, index, rows = _gathered(first, reading)
    down, other_index, down_rows = _gathered(second, reading)
    num_experts = value_of(up.weight).shape[0]
    ids, other_ids = (unclamped(each, num_experts, reading) for each in (index, other_index))
    if ids is not other_ids:
        raise Unknown(other_ids, "the experts of the first GEMM")
    x, num_choices = _repeated(rows, reading)
    inside, activation = activation_between(first, down_rows, reading)
    up = with_bias(up, inside.biases, ids, reading)
    tail = tail_of(second, None, reading)
    down = with_bias(down, tail.biases, ids, reading)
    weights = unmasked(tail.weights, reading, of_rows=False)
    check_masked(inside, 0, down, reading)
    if not reading.masks and index is other_index:
        # transformers before 5.23 cuts ids and masks nothing: what is cut is an expert like any other.
        ids = cut_as_it_is(index, reading)
    check_remote_experts(ids, up.weight, reading)
    found = Experts(
        form="batched_mm",
        x=x,
        experts=flat_of(ids, reading),
        weights=flat_of(weights, reading),
        num_choices=num_choices,
        up=up,
        down=down,
        activation=activation,
        output=tail.output,
        numbers=symbols_of(inside.numbers),
    )
    return owning(found, reading)


def _gathered(product: fx.Node, reading: Reading) -> tuple[Linear, fx.Node, fx.Node]:
    """`bmm(weight[ids], rows[:, :, None])` or `bmm(rows[:, None], weight[ids])` -> weights, their index, rows."""
    a, b = (node_of(each, "an operand of the batched GEMM") for each in product.args[:2])
    weights_first = _is_gathered(a)
    operand, rows = (a, b) if weights_first else (b, a)
    swapped = is_call(operand, TRANSPOSE) and swaps_last(operand)
    if swapped:
        reading.passed.add(operand)
        operand = node_of(operand.args[0], "weights")
    gathered = reading.take(operand, GATHER, "weights of each row's expert")
    index = node_of(index_of(gathered), "the expert of each row")
    transposed = not weights_first
    linear = Linear(node_of(gathered.args[0], "weights"), transposed=transposed != swapped)
    return linear, index, rows


def _is_gathered(node: fx.Node) -> bool:
    if is_call(node, TRANSPOSE):
        node = node_of(node.args[0], "weights")
    value = tensor_of(node)
    return is_call(node, GATHER) and value is not None and value.ndim == 3


def _repeated(rows: fx.Node, reading: Reading) -> tuple[fx.Node, int]:
    """`x[:, None].expand(-1, k, -1)` as rows -> x, k."""
    node, choices = rows, 1
    while is_call(node, VIEWS | {aten.expand.default}):
        before = node_of(node.args[0], "tokens")
        if is_call(node, frozenset({aten.expand.default})):
            wide, narrow = shape_of(value_of(node)), shape_of(value_of(before))
            if len(wide) != 3 or narrow[1] != 1 or wide[0] != narrow[0] or wide[2] != narrow[2]:
                raise Unknown(node, "each token once for each of its choices")
            choices = wide[1]
        reading.passed.add(node)
        node = before
        if choices > 1 and value_of(node).ndim == 2:
            break
        if choices == 1 and value_of(node).ndim == 2 and not is_call(node, VIEWS | {aten.expand.default}):
            break
    return node, choices
