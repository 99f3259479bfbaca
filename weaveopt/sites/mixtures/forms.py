"""Experts as transformers computes them, read into one record.

grouped      ids, order = sort(experts.view(-1)); rows = x[order // k]; offsets = cumsum(histc(ids, 0, E - 1))
             y = grouped_mm(act(grouped_mm(rows, gate_up^T, offsets) + bias[ids]), down^T, offsets) + bias[ids]
             y = (y * weights.view(-1)[order][:, None])[inverse(order)].view(T, k, H).sum(1)
batched      y = bmm(down[experts], act(bmm(gate_up[experts], x.repeat(k)))); y = (y * weights).view(T, k, H).sum(1)

Both start from the GEMM of the down projection and read on in both directions. Choices of another rank's experts have
an id that no expert of this rank has: the grouped form masks their rows, the batched form their weights.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from weaveopt.graph.pattern import ADD, CAST, MUL, SHAPE_ONLY, Mismatch, describe, is_call, tensor_of
from weaveopt.graph.values import argument, shape_of
from weaveopt.records.candidate import Rejection
from weaveopt.sites.mixtures.activation import GATHER, Activation, Between, activation_of, between

aten = torch.ops.aten

BMM = frozenset({aten.bmm.default})
_WHERE = frozenset({aten.where.self})
_VIEWS = SHAPE_ONLY | {aten.clone.default}
_TRANSPOSE = frozenset({aten.permute.default, aten.transpose.int, aten.mT.default})
_SUM = frozenset({aten.sum.dim_IntList})
_CLAMPS = frozenset({aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default})
_GETITEM = frozenset({operator.getitem})


def is_grouped(node: fx.Node) -> bool:
    """Whether a node is a GEMM grouped by expert: torch's, or transformers' loop for what torch's does not take."""
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name in ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


@dataclass(frozen=True)
class Linear:
    """The weights of one projection of all experts."""

    weight: fx.Node
    """[experts, out, in], or [experts, in, out] where it is `transposed`."""
    transposed: bool
    bias: fx.Node | None = None
    """[experts, out]"""


@dataclass(frozen=True)
class Experts:
    """The experts of one mixture in a graph, by role."""

    form: str
    """`grouped_mm` or `batched_mm`, as transformers calls them."""
    x: fx.Node
    """[tokens, hidden]"""
    experts: fx.Node
    """The experts that each token chose, tokens * choices of them."""
    weights: fx.Node
    """What each choice counts, as many."""
    num_choices: int
    up: Linear
    down: Linear
    activation: Activation
    has_foreign: bool
    """Whether choices of experts that this rank does not have are masked."""
    output: fx.Node
    """[tokens, hidden]"""
    nodes: frozenset[fx.Node]
    """Everything from the operands above to `output`, with it; some of it may serve others too."""


class _Unknown(Exception):
    """Where a form ends that is not known."""

    def __init__(self, node: object, expected: str) -> None:
        name = node.name if isinstance(node, fx.Node) else repr(node)
        self.mismatch = Mismatch(name, expected, describe(node))


@dataclass
class _Reading:
    """What was read so far."""

    passed: set[fx.Node] = field(default_factory=set)
    masks: list[fx.Node] = field(default_factory=list)

    def through(self, node: object, targets: frozenset[object]) -> fx.Node:
        """The first node, going back, that is none of `targets`."""
        while isinstance(node, fx.Node) and is_call(node, targets):
            self.passed.add(node)
            node = node.args[0]
        return _node(node, "a tensor")

    def take(self, node: object, targets: frozenset[object], expected: str) -> fx.Node:
        """`node`, which has to be one of `targets`."""
        if not isinstance(node, fx.Node) or not is_call(node, targets):
            raise _Unknown(node, expected)
        self.passed.add(node)
        return node


def _node(node: object, expected: str) -> fx.Node:
    if not isinstance(node, fx.Node):
        raise _Unknown(node, expected)
    return node


def experts_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, Experts | Rejection]]:
    """The last GEMM of every mixture in the order of the graph, and its experts or why they are not known."""
    grouped = [node for node in graph.nodes if node.op == "call_function" and is_grouped(node)]
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_grouped(node):
            first = _first(node, grouped)
            if first is None and any(_first(other, grouped) is node for other in grouped):
                continue  # the first of two
            yield node, _read(node, first)
        elif is_call(node, BMM) and _gathered_weight(node) is not None:
            first = _first(node, list(graph.find_nodes(op="call_function", target=aten.bmm.default)))
            if first is not None:
                yield node, _read(node, first)


def _gathered_weight(product: fx.Node) -> fx.Node | None:
    """The operand of a batched GEMM that is weights of experts, gathered; None where none is."""
    for operand in product.args[:2]:
        node = operand
        while isinstance(node, fx.Node) and is_call(node, _VIEWS | _TRANSPOSE):
            node = node.args[0]
        value = tensor_of(node) if isinstance(node, fx.Node) else None
        if isinstance(node, fx.Node) and is_call(node, GATHER) and value is not None and value.ndim == 3:
            return node
    return None


def _first(product: fx.Node, products: list[fx.Node]) -> fx.Node | None:
    """The nearest of `products` before the rows that `product` multiplies."""
    others = frozenset(products) - {product}
    seen: set[fx.Node] = set()
    pending = [each for each in product.args[:2] if isinstance(each, fx.Node)]
    while pending:
        node = pending.pop()
        if node in others:
            same = is_grouped(product) and argument(node, "offs") is argument(product, "offs")
            return node if same or (is_call(product, BMM) and _gathered_weight(node) is not None) else None
        if node in seen or node.op != "call_function" or is_call(node, GATHER | _SUM):
            continue
        seen.add(node)
        pending.extend(node.all_input_nodes)
    return None


def _read(second: fx.Node, first: fx.Node | None) -> Experts | Rejection:
    if first is None:
        return Rejection("form_not_known", "a grouped GEMM without a second one behind it", (("node", second.name),))
    try:
        return _grouped(first, second) if is_grouped(second) else _batched(first, second)
    except _Unknown as unknown:
        return Rejection("form_not_known", str(unknown.mismatch), (("node", unknown.mismatch.node),))
    except _Refused as refused:
        return refused.why


class _Refused(Exception):
    def __init__(self, why: Rejection) -> None:
        self.why = why


# --- grouped ----------------------------------------------------------------------------------------------------------


def _grouped(first: fx.Node, second: fx.Node) -> Experts:
    reading = _Reading({first, second})
    rows, weight, offsets = (_node(each, "an operand of the grouped GEMM") for each in _operands(first))
    down_rows, down_weight, _ = (_node(each, "an operand of the grouped GEMM") for each in _operands(second))
    up, down = (_linear(each, reading) for each in (weight, down_weight))
    ids, order = _sorted(offsets, reading)
    x, num_choices = _tokens(_unmasked(rows, reading), order, reading)
    inside, activation = _activation(first, down_rows, reading)
    up = _with_bias(up, inside.biases, ids, reading)
    tail = _tail(second, order, reading)
    down = _with_bias(down, tail.biases, ids, reading)
    weights = _picked(tail.weights, order, reading)
    chosen = _node(order.args[0], "a sort").args[0]
    reading.masks.extend(inside.masks)
    for mask in reading.masks:
        _foreign(mask, ids, reading)
    return _found("grouped_mm", x, chosen, weights, num_choices, up, down, activation, tail.output, reading)


def _operands(node: fx.Node) -> tuple[object, object, object]:
    """Rows, weights and ends of the groups, as both operators call them."""
    names = ("self", "mat2", "offs") if "aten" in str(node.target) else ("input", "weight", "offs")
    return tuple(argument(node, name) for name in names)  # type: ignore[return-value]


def _linear(weight: fx.Node, reading: _Reading) -> Linear:
    """[experts, in, out] as the GEMM takes it: a transposed view of [experts, out, in], or as it is."""
    if is_call(weight, _TRANSPOSE) and _swaps_last(weight):
        reading.passed.add(weight)
        return Linear(_node(weight.args[0], "weights"), transposed=False)
    return Linear(weight, transposed=True)


def _swaps_last(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        return list(node.args[1]) in ([0, 2, 1], [0, -1, -2])  # type: ignore[arg-type]
    return node.target is aten.mT.default or sorted(int(d) % 3 for d in node.args[1:3]) == [1, 2]  # type: ignore[call-overload]


def _sorted(offsets: fx.Node, reading: _Reading) -> tuple[fx.Node, fx.Node]:
    """`cumsum(histc(ids, E, 0, E - 1), 0)` -> the sorted ids and the order of them."""
    total = reading.take(offsets, frozenset({aten.cumsum.default}), "cumsum of the rows of each expert")
    counts = reading.through(total.args[0], CAST)
    reading.take(counts, frozenset({aten.histc.default}), "histc of the sorted experts")
    bins, least, most = (*counts.args[1:4], 100, 0, 0)[:3]
    if least != 0 or not isinstance(bins, int) or most != bins - 1:
        raise _Unknown(counts, "a bin for each expert")
    ids = reading.through(counts.args[0], CAST)
    reading.take(ids, _GETITEM, "the values of a sort")
    sort = reading.take(ids.args[0], frozenset({aten.sort.default, aten.sort.stable}), "a sort of the choices")
    order = next((user for user in sort.users if is_call(user, _GETITEM) and user.args[1] == 1), None)
    if ids.args[1] != 0 or order is None or argument(sort, "descending"):
        raise _Unknown(sort, "an ascending sort, its values and its order")
    reading.passed.add(order)
    return ids, order


def _unmasked(rows: fx.Node, reading: _Reading) -> fx.Node:
    """`where(mask, 0, rows)` -> rows."""
    while is_call(rows, _WHERE):
        reading.passed.add(rows)
        mask, zero, rows_below = rows.args
        _zero(zero, reading)
        reading.masks.append(_node(mask, "a mask"))
        rows = _node(rows_below, "rows")
    return rows


def _zero(node: object, reading: _Reading) -> None:
    full = reading.take(node, frozenset({aten.full.default, aten.scalar_tensor.default}), "zeros for masked rows")
    if full.args[-1] != 0:
        raise _Unknown(full, "zeros for masked rows")


def _tokens(rows: fx.Node, order: fx.Node, reading: _Reading) -> tuple[fx.Node, int]:
    """`x[order // k]` -> x, k."""
    gathered = reading.take(rows, GATHER, "the tokens' rows in the order of the experts")
    index = _index(gathered)
    if index is order:
        return _node(gathered.args[0], "tokens"), 1
    divided = reading.take(index, frozenset({aten.div.Tensor_mode, aten.floor_divide.default}), "order // choices")
    if divided.args[0] is not order or not isinstance(divided.args[1], int):
        raise _Unknown(divided, "order // choices")
    return _node(gathered.args[0], "tokens"), divided.args[1]


def _index(gathered: fx.Node) -> object:
    """What rows are taken by along the first dimension."""
    if gathered.target is aten.index_select.default:
        return gathered.args[2] if gathered.args[1] == 0 else None
    indices = gathered.args[1]
    return indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None


def _picked(weights: fx.Node, order: fx.Node, reading: _Reading) -> fx.Node:
    """`weights.view(-1)[order]` -> weights."""
    gathered = reading.take(weights, GATHER, "the weights in the order of the experts")
    if _index(gathered) is not order:
        raise _Unknown(gathered, "the weights in the order of the experts")
    return _flat(gathered.args[0], reading)


def _foreign(mask: fx.Node, ids: fx.Node, reading: _Reading) -> None:
    """`ids >= experts`, once for each row."""
    compared = reading.through(mask, SHAPE_ONLY)
    reading.take(compared, frozenset({aten.ge.Scalar}), "a mask of other ranks' experts")
    if _unclamped(compared.args[0], reading) is not ids:
        raise _Unknown(compared, "a mask of other ranks' experts")


def _unclamped(node: object, reading: _Reading) -> fx.Node:
    return reading.through(node, _CLAMPS)


# --- what both have ---------------------------------------------------------------------------------------------------


def _activation(first: fx.Node, last: fx.Node, reading: _Reading) -> tuple[Between, Activation]:
    inside = between(first, last)
    if isinstance(inside, Rejection):
        raise _Refused(inside)
    activation = activation_of(inside)
    if isinstance(activation, Rejection):
        raise _Refused(activation)
    reading.passed.update(inside.nodes)
    return inside, activation


def _with_bias(linear: Linear, biases: tuple[fx.Node, ...], ids: fx.Node, reading: _Reading) -> Linear:
    """The biases that were gathered with the same ids, clamped where some are foreign."""
    if not biases:
        return linear
    gathered = reading.take(biases[0], GATHER, "a bias of each row's expert")
    bias = _node(gathered.args[0], "a bias of each expert")
    value = tensor_of(bias)
    if len(biases) > 1 or _unclamped(_index(gathered), reading) is not ids or value is None or value.ndim != 2:
        raise _Unknown(gathered, "one bias of each row's expert")
    return Linear(linear.weight, linear.transposed, bias)


@dataclass(frozen=True)
class _Tail:
    """What follows the second GEMM."""

    biases: tuple[fx.Node, ...]
    weights: fx.Node
    """One for each row, in the order of the rows."""
    output: fx.Node


def _tail(second: fx.Node, order: fx.Node | None, reading: _Reading) -> _Tail:
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
        elif is_call(reader, _WHERE) and reader.args[2] is node:
            _zero(reader.args[1], reading)
            reading.masks.append(_node(reader.args[0], "a mask"))
        elif is_call(reader, MUL) and weights is None:
            weights = reading.through(_other(reader, node), SHAPE_ONLY)
        elif is_call(reader, GATHER) and order is not None and reader.args[0] is node:
            _inverse(_index(reader), order, reading)
            order = None
        elif is_call(reader, _SUM) and list(reader.args[1]) == [1] and len(shape_of(_value(node))) == 3:  # type: ignore[arg-type]
            is_summed = not _keeps_dim(reader)
            if not is_summed:
                raise _Unknown(reader, "the sum over the choices")
        else:
            raise _Unknown(reader, "a bias, a mask, the weights, or the sum over the choices")
        node = reader
    if weights is None or order is not None:
        raise _Unknown(node, "weights before the sum over the choices")
    rounded = next(iter(node.users), None)
    if len(node.users) == 1 and rounded is not None and is_call(rounded, CAST):
        reading.passed.add(rounded)
        node = rounded
    return _Tail(tuple(biases), weights, node)


def _only_reader(node: fx.Node, reading: _Reading) -> fx.Node:
    readers = [user for user in node.users if user not in reading.passed]
    if len(readers) != 1:
        raise _Unknown(node, "one reader") if not readers else _Refused(_read_by_others(node, readers))
    return readers[0]


def _read_by_others(node: fx.Node, readers: list[fx.Node]) -> Rejection:
    values = (("node", node.name), ("read_by", ", ".join(sorted({describe(each) for each in readers}))))
    return Rejection("read_by_others", "what the experts make is read by others too", values)


def _value(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    return value


def _keeps_dim(total: fx.Node) -> bool:
    return bool(argument(total, "keepdim"))


def _other(node: fx.Node, one: fx.Node) -> fx.Node:
    a, b = node.args[:2]
    return _node(b if a is one else a, "a tensor")


def _inverse(index: object, order: fx.Node, reading: _Reading) -> None:
    """`empty.index_put([order], arange)`: where each choice went; or the sort of the order."""
    put = reading.take(index, frozenset({aten.index_put.default}), "the inverse of the order")
    places, values = put.args[1:3]
    values = reading.through(values, SHAPE_ONLY)
    reading.take(values, frozenset({torch.ops.prims.iota.default, aten.arange.default}), "arange")
    if not isinstance(places, list | tuple) or list(places) != [order]:
        raise _Unknown(put, "the inverse of the order")
    start = put.args[0]
    if isinstance(start, fx.Node) and start.op == "call_function":
        reading.passed.add(start)


def _flat(node: object, reading: _Reading) -> fx.Node:
    """[tokens, choices] under the view that makes one dimension of it."""
    flat = _node(node, "a tensor")
    while is_call(flat, SHAPE_ONLY) and _value(flat).ndim == 1:
        reading.passed.add(flat)
        flat = _node(flat.args[0], "a tensor")
    return flat


def _found(
    form: str,
    x: fx.Node,
    chosen: object,
    weights: fx.Node,
    num_choices: int,
    up: Linear,
    down: Linear,
    activation: Activation,
    output: fx.Node,
    reading: _Reading,
) -> Experts:
    experts = _flat(chosen, reading)
    nodes = frozenset(reading.passed) - {x, experts, weights, up.weight, down.weight}
    found = Experts(form, x, experts, weights, num_choices, up, down, activation, bool(reading.masks), output, nodes)
    leaving = [node for node in nodes if node is not output and any(user not in nodes for user in node.users)]
    computed = [node for node in leaving if not is_call(node, _SHARED)]
    if computed:
        readers = [user for user in computed[0].users if user not in nodes]
        raise _Refused(_read_by_others(computed[0], readers))
    return found


_SHARED = _VIEWS | _TRANSPOSE | {aten.full.default, aten.scalar_tensor.default, torch.ops.prims.iota.default}
"""What lays memory out, and constants: they may serve others too."""


# --- batched ----------------------------------------------------------------------------------------------------------


def _batched(first: fx.Node, second: fx.Node) -> Experts:
    reading = _Reading({first, second})
    up, ids, rows = _gathered(first, reading)
    down, other_ids, down_rows = _gathered(second, reading)
    if ids is not other_ids:
        raise _Unknown(other_ids, "the experts of the first GEMM")
    x, num_choices = _repeated(rows, reading)
    inside, activation = _activation(first, down_rows, reading)
    up = _with_bias(up, inside.biases, ids, reading)
    tail = _tail(second, None, reading)
    down = _with_bias(down, tail.biases, ids, reading)
    weights = _unmasked(tail.weights, reading)
    for mask in (*inside.masks, *reading.masks):
        _foreign(mask, ids, reading)
    reading.masks.extend(inside.masks)
    return _found(
        "batched_mm", x, ids, _flat(weights, reading), num_choices, up, down, activation, tail.output, reading
    )


def _gathered(product: fx.Node, reading: _Reading) -> tuple[Linear, fx.Node, fx.Node]:
    """`bmm(weight[ids], rows[:, :, None])` or `bmm(rows[:, None], weight[ids])` -> the weights, ids, and rows."""
    a, b = (_node(each, "an operand of the batched GEMM") for each in product.args[:2])
    weights_first = _is_gathered(a)
    operand, rows = (a, b) if weights_first else (b, a)
    swapped = is_call(operand, _TRANSPOSE) and _swaps_last(operand)
    if swapped:
        reading.passed.add(operand)
        operand = _node(operand.args[0], "weights")
    gathered = reading.take(operand, GATHER, "weights of each row's expert")
    ids = _unclamped(_index(gathered), reading)
    transposed = not weights_first
    linear = Linear(_node(gathered.args[0], "weights"), transposed=transposed != swapped)
    return linear, ids, rows


def _is_gathered(node: fx.Node) -> bool:
    if is_call(node, _TRANSPOSE):
        node = _node(node.args[0], "weights")
    value = tensor_of(node)
    return is_call(node, GATHER) and value is not None and value.ndim == 3


def _repeated(rows: fx.Node, reading: _Reading) -> tuple[fx.Node, int]:
    """`x[:, None].expand(-1, k, -1)` as rows -> x, k."""
    node, choices = rows, 1
    while is_call(node, _VIEWS | {aten.expand.default}):
        before = _node(node.args[0], "tokens")
        if is_call(node, frozenset({aten.expand.default})):
            wide, narrow = shape_of(_value(node)), shape_of(_value(before))
            if len(wide) != 3 or narrow[1] != 1 or wide[0] != narrow[0] or wide[2] != narrow[2]:
                raise _Unknown(node, "each token once for each of its choices")
            choices = wide[1]
        reading.passed.add(node)
        node = before
        if choices > 1 and _value(node).ndim == 2:
            break
        if choices == 1 and _value(node).ndim == 2 and not is_call(node, _VIEWS | {aten.expand.default}):
            break
    return node, choices
