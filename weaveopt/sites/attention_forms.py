"""The forms in which graphs hold attention, each read into one record.

library    one operator, as `scaled_dot_product_attention` was lowered for the device
written    two products with a softmax between them, as models write attention that the operator cannot express:
           soft caps `c * tanh(scores / c)`, sinks (a logit of each head beside those of the keys)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import CAST, MUL, is_call, tensor_of
from weaveopt.graph.values import argument
from weaveopt.records.candidate import Rejection

aten = torch.ops.aten

LIBRARY_CALLS = frozenset(
    {
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default})
_COPIES = frozenset({aten.clone.default})
LAYOUTS = _VIEWS | _COPIES | {aten.unsqueeze.default, aten.permute.default}
"""Operators that lay the elements of a value out anew."""


@dataclass(frozen=True)
class Form:
    """One attention of a graph, by role."""

    query: fx.Node
    """[batch, heads, queries, head_dim]"""
    key: fx.Node
    """[batch, heads or key heads, keys, head_dim]"""
    value: fx.Node
    mask: fx.Node | None
    """What is added to the scores, or booleans; [batch or 1, heads or 1, queries or 1, keys]."""
    is_causal: bool
    """Whether the operator masks by itself: query i reads keys up to i."""
    scale: float
    output: fx.Node
    """[batch, heads, queries, value_dim]"""
    nodes: frozenset[fx.Node]
    """What computes `output` from the others."""
    call: fx.Node | None = None
    """The library's operator; None for attention that is written out."""
    softcap: float = 0.0
    sinks: fx.Node | None = None
    """[heads]"""
    refused: Rejection | None = None
    """Why no rule may touch it."""


def find_forms(graph: fx.Graph) -> Iterator[Form]:
    """Every attention, in the order of the graph."""
    for node in graph.nodes:
        if is_call(node, LIBRARY_CALLS):
            form = _library_form(node)
        elif is_call(node, frozenset({aten.bmm.default})):
            form = _written_form(node)
        else:
            continue
        if form is not None:
            yield form


def _library_form(node: fx.Node) -> Form | None:
    roles = [argument(node, name) for name in ("query", "key", "value")]
    query, key, value = (each if isinstance(each, fx.Node) else None for each in roles)
    if query is None or key is None or value is None:
        return None
    results = {user.args[1]: user for user in node.users if is_call(user, frozenset({operator.getitem}))}
    output = results.get(0)
    if output is None:
        return None
    mask = argument(node, "attn_mask") or argument(node, "attn_bias")
    scale, dropout = argument(node, "scale"), argument(node, "dropout_p")
    refused = None
    others = [user for index, user in results.items() if index != 0 and user.users]
    if others or len(results) != len(node.users):
        refused = Rejection("saved_for_backward", "the backward pass reads what this operator saves")
    elif dropout:
        refused = Rejection("dropout", "attention drops some weights at random")
    elif isinstance(scale, fx.Node):
        refused = Rejection("scale_not_known", "the scale of the scores is computed in the graph")
    head_dim = tensor_of(query).shape[-1] if tensor_of(query) is not None else 1  # type: ignore[union-attr]
    return Form(
        query=query,
        key=key,
        value=value,
        mask=mask if isinstance(mask, fx.Node) else None,
        is_causal=bool(argument(node, "is_causal")),
        scale=float(scale) if isinstance(scale, int | float) else float(head_dim) ** -0.5,
        output=output,
        nodes=frozenset((node, *results.values())),
        call=node,
        refused=refused,
    )


def unrepeated(node: fx.Node, used_by: frozenset[fx.Node]) -> tuple[fx.Node, frozenset[fx.Node]]:
    """Keys or values before each head's was written `groups` times, and the nodes that did it and serve nothing else.

    `x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, heads, length, dim)`; the node itself, and no nodes,
    where it is no such repetition.
    """
    chain = [node]
    while is_call(chain[-1], _VIEWS | _COPIES):
        before = chain[-1].args[0]
        assert isinstance(before, fx.Node)
        chain.append(before)
        if is_call(before, frozenset({aten.unsqueeze.default})) or _ndim(before) == 4:
            break
    added = chain[-1]
    source = added.args[0] if is_call(added, frozenset({aten.unsqueeze.default})) else None
    wide = [each for each in chain[:-1] if _ndim(each) == 5]
    if not isinstance(source, fx.Node) or _ndim(source) != 4 or added.args[1] not in (2, -3) or not wide:
        return node, frozenset()
    if not _repeats(node, wide[0], source):
        return node, frozenset()
    own: set[fx.Node] = set()
    for each in chain:
        if any(user not in own and user not in used_by for user in each.users):
            break
        own.add(each)
    return source, frozenset(own)


def _repeats(node: fx.Node, wide: fx.Node, source: fx.Node) -> bool:
    """`source` [b, h, l, d] over `wide` [b, h, g, l, d] to `node` [b, h * g, l, d]."""
    narrow, five, four = tensor_of(source), tensor_of(wide), tensor_of(node)
    if narrow is None or five is None or four is None or four.ndim != 4:
        return False
    b, h, length, dim = narrow.shape
    groups = five.shape[2]
    return (
        all(_same(x, y) for x, y in zip(five.shape, (b, h, groups, length, dim), strict=True))
        and isinstance(h, int)
        and isinstance(groups, int)
        and all(_same(x, y) for x, y in zip(four.shape, (b, h * groups, length, dim), strict=True))
    )


def _same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return isinstance(a, int) and isinstance(b, int) and a == b


def _ndim(node: fx.Node) -> int:
    value = tensor_of(node)
    return -1 if value is None else value.ndim


# --- attention that a model writes out --------------------------------------------------------------------------------


def _written_form(product: fx.Node) -> Form | None:
    """`bmm(softmax(...), value)`, read from its end; None where it is another product."""
    weights, value = (_unfolded(each) for each in product.args[:2])
    if weights is None or value is None:
        return None
    passed: set[fx.Node] = {product}
    softmax = _through(weights, CAST | _VIEWS | _COPIES, passed)
    kept = softmax
    has_sinks = is_call(kept, frozenset({aten.slice.Tensor}))
    if has_sinks:
        passed.add(kept)
        softmax = _through(softmax.args[0], CAST | _VIEWS | _COPIES, passed)
    logits = _softmax_of(softmax, passed)
    if logits is None:
        return None
    sinks = None
    if has_sinks:
        logits = _less_maximum(logits, passed)
        parts = logits.args[0] if is_call(logits, frozenset({aten.cat.default})) else None
        if not isinstance(parts, list | tuple) or len(parts) != 2:
            return None
        passed.add(logits)
        before, sink = parts
        sinks = _sinks_of(sink, passed)
        if sinks is None or not isinstance(before, fx.Node) or not _is_cut_to(kept, before):
            return None
        logits = before
    mask: fx.Node | None = None
    if is_call(logits, frozenset({aten.add.Tensor})):
        passed.add(logits)
        scores, mask = _scores_and_mask(logits)
        if scores is None:
            return None
    else:
        scores = logits
    softcap = 0.0
    capped = _capped(scores, passed)
    if capped is not None:
        scores, softcap = capped
    scale = 1.0
    scores = _through(scores, CAST, passed)
    if is_call(scores, MUL | {aten.div.Tensor}) and isinstance(scores.args[1], int | float):
        factor = float(scores.args[1])
        scale = 1.0 / factor if is_call(scores, frozenset({aten.div.Tensor})) else factor
        passed.add(scores)
        scores = _through(scores.args[0], CAST, passed)
    scores = _through(scores, _VIEWS, passed)
    if not is_call(scores, frozenset({aten.bmm.default})):
        return None
    passed.add(scores)
    query, transposed = (_unfolded(each) for each in scores.args[:2])
    if query is None or transposed is None or not is_call(transposed, frozenset({aten.permute.default})):
        return None
    if list(transposed.args[1]) != [0, 1, 3, 2]:  # type: ignore[arg-type]
        return None
    passed.add(transposed)
    key = transposed.args[0]
    output = next((user for user in product.users if is_call(user, _VIEWS) and _ndim(user) == 4), None)
    if output is None or not isinstance(key, fx.Node) or len(product.users) != 1:
        return None
    for start, end in ((product, value), (scores, query), (scores, transposed)):
        for each in start.args[:2]:
            while isinstance(each, fx.Node) and each is not end and is_call(each, _VIEWS | _COPIES):
                passed.add(each)
                each = each.args[0]
    passed.add(output)
    inside = frozenset(each for each in passed if each not in (query, key, value, mask, sinks))
    leaving = [each for each in inside if each is not output and any(user not in inside for user in each.users)]
    if any(_is_result(each) for each in leaving):
        refused = Rejection("weights_are_read", "the weights of the keys are read by others too")
    else:
        refused = None
    own = inside - frozenset(leaving)
    return Form(query, key, value, mask, False, scale, output, own, None, softcap, sinks, refused)


def _is_result(node: fx.Node) -> bool:
    """Whether a node computes: one that only lays memory out may serve others too."""
    return not is_call(node, LAYOUTS | {aten.full.default})


def _unfolded(node: object) -> fx.Node | None:
    """The value [batch, heads, m, n] that `bmm` takes as [batch * heads, m, n]."""
    while isinstance(node, fx.Node) and is_call(node, _VIEWS | _COPIES) and _ndim(node) == 3:
        node = node.args[0]
    # The expansion to its own shape that `matmul` leaves, and a copy where that is not contiguous (one key head).
    while isinstance(node, fx.Node) and is_call(node, _COPIES | {aten.expand.default}) and _keeps_shape(node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and _ndim(node) == 4 else None


def _keeps_shape(node: fx.Node) -> bool:
    before = node.args[0]
    a, b = tensor_of(node), tensor_of(before) if isinstance(before, fx.Node) else None
    return a is not None and b is not None and a.ndim == b.ndim and all(map(_same, a.shape, b.shape))


def _through(node: object, targets: frozenset[object], passed: set[fx.Node]) -> fx.Node:
    assert isinstance(node, fx.Node)
    while is_call(node, targets) and isinstance(node.args[0], fx.Node):
        passed.add(node)
        node = node.args[0]
    return node


def _softmax_of(node: fx.Node, passed: set[fx.Node]) -> fx.Node | None:
    """What `node` is the softmax of along its last dimension, whole or taken apart (`exp(x - max) / sum`)."""
    if is_call(node, frozenset({aten._softmax.default})) and node.args[1] in (-1, 3):
        passed.add(node)
        return _through(node.args[0], CAST, passed)
    if not is_call(node, frozenset({aten.div.Tensor})):
        return None
    exp, total = node.args[:2]
    if not is_call(exp, frozenset({aten.exp.default})) or not is_call(total, frozenset({aten.sum.dim_IntList})):
        return None
    assert isinstance(exp, fx.Node) and isinstance(total, fx.Node)
    if total.args[0] is not exp or list(total.args[1]) not in ([-1], [3]):  # type: ignore[arg-type]
        return None
    difference = exp.args[0]
    if not is_call(difference, frozenset({aten.sub.Tensor})):
        return None
    assert isinstance(difference, fx.Node)
    logits, largest = difference.args[:2]
    if not is_call(largest, frozenset({aten.amax.default})) or largest.args[0] is not logits:  # type: ignore[union-attr]
        return None
    passed.update((node, exp, total, difference, largest))  # type: ignore[arg-type]
    return _through(logits, CAST, passed)


def _less_maximum(node: fx.Node, passed: set[fx.Node]) -> fx.Node:
    """`x - x.max(-1)`, which changes no softmax."""
    if not is_call(node, frozenset({aten.sub.Tensor})):
        return node
    whole, largest = node.args[:2]
    reduced = largest.args[0] if is_call(largest, frozenset({operator.getitem})) else largest  # type: ignore[union-attr]
    named = frozenset({aten.max.dim, aten.amax.default})
    if isinstance(whole, fx.Node) and is_call(reduced, named) and reduced.args[0] is whole:  # type: ignore[union-attr]
        passed.update(each for each in (node, largest, reduced) if isinstance(each, fx.Node))
        return whole
    return node


def _sinks_of(node: object, passed: set[fx.Node]) -> fx.Node | None:
    """[heads] under `sinks.reshape(1, -1, 1, 1).expand(batch, -1, queries, -1)`."""
    while isinstance(node, fx.Node) and is_call(node, _VIEWS | CAST | {aten.unsqueeze.default}) and _ndim(node) > 1:
        passed.add(node)
        node = node.args[0]
    return node if isinstance(node, fx.Node) and _ndim(node) == 1 else None


def _is_cut_to(cut: fx.Node, before: fx.Node) -> bool:
    """Whether a slice keeps the columns of `before`, the first ones, and drops what was put behind them."""
    dim, start = (*cut.args[1:3], 0, 0)[:2]
    shorter, whole = tensor_of(cut), tensor_of(before)
    if shorter is None or whole is None or shorter.ndim != 4:
        return False
    return dim in (-1, 3) and start in (0, None) and _same(shorter.shape[-1], whole.shape[-1])


def _scores_and_mask(total: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Of `scores + mask`, which is which: scores come from a product."""
    for scores, mask in (total.args[:2], total.args[1::-1]):
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node) and _comes_from_product(scores):
            return scores, mask
    return None, None


def _comes_from_product(node: fx.Node, most: int = 8) -> bool:
    passing = CAST | MUL | _VIEWS | {aten.div.Tensor, aten.tanh.default}
    for _ in range(most):
        if is_call(node, frozenset({aten.bmm.default})):
            return True
        if not is_call(node, passing) or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return False


def _capped(scores: fx.Node, passed: set[fx.Node]) -> tuple[fx.Node, float] | None:
    """`tanh(x / c) * c` -> x, c."""
    node = _through(scores, CAST, set())
    if not is_call(node, MUL) or not isinstance(node.args[1], int | float) or isinstance(node.args[0], int | float):
        return None
    cap, curve = float(node.args[1]), _through(node.args[0], CAST, set())
    if not is_call(curve, frozenset({aten.tanh.default})):
        return None
    divided = _through(curve.args[0], CAST, set())
    if not is_call(divided, MUL | {aten.div.Tensor}) or not isinstance(divided.args[1], int | float):
        return None
    factor = float(divided.args[1])
    factor = 1.0 / factor if is_call(divided, frozenset({aten.div.Tensor})) else factor
    if abs(factor * cap - 1.0) > 1e-6:
        return None
    _through(scores, CAST, passed)
    passed.add(node)
    _through(node.args[0], CAST, passed)
    passed.add(curve)
    _through(curve.args[0], CAST, passed)
    passed.add(divided)
    assert isinstance(divided.args[0], fx.Node)
    return divided.args[0], cap
