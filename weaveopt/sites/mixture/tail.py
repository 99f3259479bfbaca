"""Shared readers of grouped and batched experts: the activation, biases, and the nodes after the second GEMM."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from weaveopt.graph.pattern import ADD, CAST, MUL, SHAPE_ONLY, is_call, tensor_of
from weaveopt.graph.values import argument, shape_of
from weaveopt.ops.experts.activation import Activation
from weaveopt.records.candidate import Rejection
from weaveopt.sites.mixture.activation import GATHER, Between, activation_of, between
from weaveopt.sites.mixture.experts import Experts, Linear
from weaveopt.sites.mixture.reading import (
    SUM,
    TRANSPOSE,
    VIEWS,
    WHERE,
    Reading,
    Refused,
    Unknown,
    index_of,
    is_one_a_row,
    node_of,
    read_by_others,
    take_mask,
    unclamped,
    value_of,
)

aten = torch.ops.aten


def activation_between(first: fx.Node, last: fx.Node, reading: Reading) -> tuple[Between, Activation]:
    inside = between(first, last)
    if isinstance(inside, Rejection):
        raise Refused(inside)
    activation = activation_of(inside)
    if isinstance(activation, Rejection):
        raise Refused(activation)
    reading.passed.update(inside.nodes)
    return inside, activation


def check_masked(inside: Between, num_masks: int, down: Linear, reading: Reading) -> None:
    """Adds the masks between the GEMMs to those that were read, of which `num_masks` are in front of the first one.

    Masked choices have to add nothing: if no mask follows the second GEMM, it adds no bias to rows of zeros.
    """
    if inside.masks and len(reading.masks) == num_masks and down.bias is not None:
        raise Unknown(down.bias, "a mask of other ranks' experts after the bias")
    reading.masks.extend(inside.masks)


def with_bias(linear: Linear, biases: tuple[fx.Node, ...], ids: fx.Node, reading: Reading) -> Linear:
    """The biases that were gathered with the same ids, clamped where some are remote."""
    if not biases:
        return linear
    gathered = reading.take(biases[0], GATHER, "a bias of each row's expert")
    bias = node_of(gathered.args[0], "a bias of each expert")
    value = tensor_of(bias)
    num_experts = value_of(linear.weight).shape[0]
    of_row = unclamped(index_of(gathered), num_experts, reading)
    if len(biases) > 1 or of_row is not ids or value is None or value.ndim != 2:
        raise Unknown(gathered, "one bias of each row's expert")
    return Linear(linear.weight, linear.transposed, bias)


@dataclass(frozen=True)
class Tail:
    """Nodes after the second GEMM, by role."""

    biases: tuple[fx.Node, ...]
    weights: fx.Node
    """One for each row, in the order of the rows."""
    output: fx.Node


def tail_of(second: fx.Node, order: fx.Node | None, reading: Reading) -> Tail:
    """Bias, mask, weights, the order of the tokens (where rows have another), and the sum over the choices."""
    biases: list[fx.Node] = []
    weights: fx.Node | None = None
    node, is_summed = second, False
    while not is_summed:
        reader = _only_reader(node, reading)
        reading.passed.add(reader)
        if is_call(reader, SHAPE_ONLY):
            pass
        elif is_call(reader, ADD) and weights is None and not reader.kwargs:
            biases.append(_other(reader, node))
        elif is_call(reader, WHERE) and reader.args[2] is node:
            take_mask(reader, reading, of_rows=True)
        elif is_call(reader, MUL) and weights is None:
            factors = _other(reader, node)
            if not is_one_a_row(shape_of(value_of(factors)), shape_of(value_of(node))):
                raise Unknown(factors, "a weight for each row")
            weights = reading.through(factors, SHAPE_ONLY)
        elif is_call(reader, GATHER) and order is not None and reader.args[0] is node:
            _inverse(index_of(reader), order, reading)
            order = None
        elif is_call(reader, SUM) and list(reader.args[1]) == [1] and len(shape_of(value_of(node))) == 3:  # type: ignore[arg-type]
            is_summed = not _keeps_dim(reader)
            if not is_summed:
                raise Unknown(reader, "the sum over the choices")
        else:
            raise Unknown(reader, "a bias, a mask, the weights, or the sum over the choices")
        node = reader
    if weights is None or order is not None:
        raise Unknown(node, "weights before the sum over the choices")
    rounded = next(iter(node.users), None)
    if len(node.users) == 1 and rounded is not None and is_call(rounded, CAST):
        reading.passed.add(rounded)
        node = rounded
    return Tail(tuple(biases), weights, node)


def _only_reader(node: fx.Node, reading: Reading) -> fx.Node:
    readers = [user for user in node.users if user not in reading.passed]
    if len(readers) != 1:
        raise Unknown(node, "one reader") if not readers else Refused(read_by_others(node, readers))
    return readers[0]


def _keeps_dim(total: fx.Node) -> bool:
    return bool(argument(total, "keepdim"))


def _other(node: fx.Node, one: fx.Node) -> fx.Node:
    a, b = node.args[:2]
    return node_of(b if a is one else a, "a tensor")


def _inverse(index: object, order: fx.Node, reading: Reading) -> None:
    """`empty.index_put([order], arange)`: where each choice went."""
    put = reading.take(index, frozenset({aten.index_put.default}), "the inverse of the order")
    places, values = put.args[1:3]
    values = reading.through(values, SHAPE_ONLY)
    numbers = reading.take(values, frozenset({torch.ops.prims.iota.default, aten.arange.default}), "arange")
    if is_call(numbers, frozenset({torch.ops.prims.iota.default})) and (
        argument(numbers, "start") != 0 or argument(numbers, "step") != 1
    ):
        raise Unknown(numbers, "arange from 0 on")
    if not isinstance(places, list | tuple) or list(places) != [order]:
        raise Unknown(put, "the inverse of the order")
    start = put.args[0]
    if isinstance(start, fx.Node) and start.op == "call_function":
        reading.passed.add(start)


_SHARED = VIEWS | TRANSPOSE | {aten.full.default, aten.scalar_tensor.default, torch.ops.prims.iota.default}
"""Layout operators and constants, which may have other users too."""


def owning(experts: Experts, reading: Reading) -> Experts:
    """`experts` with the nodes that were passed; refused where others read what one of them computes."""
    operands = {experts.x, experts.experts, experts.weights, experts.up.weight, experts.down.weight}
    nodes = frozenset(reading.passed) - operands
    leaving = [node for node in nodes if node is not experts.output and any(user not in nodes for user in node.users)]
    computed = [node for node in leaving if not is_call(node, _SHARED)]
    if computed:
        raise Refused(read_by_others(computed[0], [user for user in computed[0].users if user not in nodes]))
    return replace(experts, nodes=nodes, has_remote_experts=bool(reading.masks))
