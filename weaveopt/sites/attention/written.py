"""Attention that is written out: two GEMMs with a softmax between them.

models     what the operator cannot express: soft caps `c * tanh(scores / c)`, sinks (a logit of each head added to
those
           of the keys)
torch      what it makes of `scaled_dot_product_attention` where no kernel of the library takes the operands, such as
           one key head that is broadcast to all query heads: both operands of the scores times `sqrt(scale)`, half
           precision upcast to fp32, and zeros for rows that see no key
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import CAST, MUL, Argument, is_call, is_rounding, tensor_of
from weaveopt.graph.scalars import number_of, symbols_of
from weaveopt.graph.values import argument, hint, shape_of
from weaveopt.records.candidate import Rejection
from weaveopt.sites.attention.forms import COPIES, LAYOUTS, VIEWS, AttentionForm, ndim_of, same_size

aten = torch.ops.aten


@dataclass(frozen=True)
class _Ends:
    """Operands and result of the two GEMMs, as close to the model's own values as they can be identified."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    output: fx.Node


def written_form(product: fx.Node) -> AttentionForm | None:
    """Read `bmm(softmax(...), value)` from its end; None for any other GEMM."""
    weights, value = _unfolded(product.args[0]), _unfolded(product.args[1])
    if weights is None or value is None:
        return None
    passed: set[fx.Node] = {product}
    numbers: list[Argument] = []
    weights, guarded = _unguarded(weights, passed)
    softmax = _through(weights, CAST | VIEWS | COPIES, passed)
    kept = softmax
    has_sinks = is_call(kept, frozenset({aten.slice.Tensor}))
    if has_sinks:
        passed.add(kept)
        softmax = _through(softmax.args[0], CAST | VIEWS | COPIES, passed)
    logits = _softmax_of(softmax, passed)
    if logits is None or guarded not in (None, logits):
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
        if logits.kwargs:  # alpha scales one of them
            return None
        passed.add(logits)
        scores, mask = _scores_and_mask(logits)
        if scores is None:
            return None
    else:
        scores = logits
    total = logits
    softcap = 0.0
    capped = _capped(scores, passed, numbers)
    if capped is not None:
        scores, softcap = capped
    scores, scale = _unscaled(_through(scores, CAST, passed), passed, numbers)
    scores = _through(_through(scores, CAST, passed), VIEWS, passed)
    if not is_call(scores, frozenset({aten.bmm.default})):
        return None
    passed.add(scores)
    query, transposed = _unfolded(scores.args[0]), _unfolded(scores.args[1])
    if query is None or transposed is None:
        return None
    begins = ((product, value), (scores, query), (scores, transposed))
    query, of_query = _unscaled(query, passed, numbers)
    transposed, of_key = _unscaled(transposed, passed, numbers)
    if not is_call(transposed, frozenset({aten.permute.default})) or list(transposed.args[1]) != [0, 1, 3, 2]:  # type: ignore[arg-type]
        return None
    passed.add(transposed)
    key = transposed.args[0]
    output = next((user for user in product.users if is_call(user, VIEWS) and ndim_of(user) == 4), None)
    if output is None or not isinstance(key, fx.Node) or len(product.users) != 1:
        return None
    ends = _Ends(query, key, value, output)
    if not _fit(ends, scores, total):
        return None
    for start, end in begins:
        for each in start.args[:2]:
            while isinstance(each, fx.Node) and each is not end and is_call(each, VIEWS | COPIES):
                passed.add(each)
                each = each.args[0]
    passed.add(output)
    ends = _narrow(ends, passed)
    inside = frozenset(each for each in passed if each not in (ends.query, ends.key, ends.value, mask, sinks))
    leaving = [each for each in inside if each is not ends.output and any(user not in inside for user in each.users)]
    refused = None
    if any(_is_result(each) for each in leaving):
        refused = Rejection("weights_are_read", "the weights of the keys are read by others too")
    return AttentionForm(
        query=ends.query,
        key=ends.key,
        value=ends.value,
        mask=mask,
        is_causal=False,
        scale=scale * of_query * of_key,
        output=ends.output,
        nodes=inside - frozenset(leaving),
        softcap=softcap,
        sinks=sinks,
        refused=refused,
        numbers=symbols_of(numbers),
    )


def _fit(ends: _Ends, scores: fx.Node, total: fx.Node) -> bool:
    """True if views between the GEMMs keep heads and rows in their places: they could also mix them.

    `scores` [batch * heads, queries, keys] is the first GEMM's result, `total` [batch, heads, queries, keys] the
    operand of the softmax.
    """
    query, key, value, output, product, whole = (
        () if each is None else shape_of(each)
        for each in map(tensor_of, (ends.query, ends.key, ends.value, ends.output, scores, total))
    )
    if len(query) != 4 or len(key) != 4 or len(value) != 4:
        return False
    (batch, heads, queries, dim), keys = query, key[2]
    return (
        all(each[:1] + each[2:3] == (batch, keys) and each[1] in (heads, 1) for each in (key, value))
        and key[3] == dim
        and product == (batch * heads, queries, keys)
        and whole == (batch, heads, queries, keys)
        and output == (batch, heads, queries, value[3])
    )


def _factor_of(node: fx.Node) -> float | None:
    """The number that a node multiplies its first operand by; None where it does another thing."""
    factor = number_of(node.args[1]) if is_call(node, MUL | {aten.div.Tensor}) else None
    if not factor or not isinstance(node.args[0], fx.Node):
        return None
    return 1.0 / factor if is_call(node, frozenset({aten.div.Tensor})) else factor


def _unscaled(node: fx.Node, passed: set[fx.Node], numbers: list[Argument]) -> tuple[fx.Node, float]:
    """`x * c` or `x / c` -> x, and what it is multiplied by."""
    factor = _factor_of(node)
    if factor is None:
        return node, 1.0
    passed.add(node)
    numbers.append(node.args[1])
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source, factor


def _unguarded(weights: fx.Node, passed: set[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    """`where(row sees no key, 0, weights)` -> weights, and the logits whose rows it asks.

    A row sees no key where `not any(logits != -inf)`. Kernels give zeros for such rows too.
    """
    if not is_call(weights, frozenset({aten.where.self})):
        return weights, None
    unread_rows, zeros, kept = weights.args
    chain: list[fx.Node] = []
    node: object = unread_rows
    for target in (aten.logical_not.default, aten.any.dim, aten.logical_not.default, aten.eq.Scalar):
        if not is_call(node, frozenset({target})):
            return weights, None
        assert isinstance(node, fx.Node)
        chain.append(node)
        node = node.args[0]
    along, compared = chain[1], chain[3]
    is_row = along.args[1] in (-1, 3) and along.args[2:3] == (True,)
    if not is_row or compared.args[1] != float("-inf") or not is_call(zeros, frozenset({aten.full.default})):
        return weights, None
    assert isinstance(zeros, fx.Node) and isinstance(kept, fx.Node) and isinstance(node, fx.Node)
    if zeros.args[1] != 0:
        return weights, None
    passed.update((weights, zeros, *chain))
    return kept, node


def _narrow(ends: _Ends, passed: set[fx.Node]) -> _Ends:
    """Skip casts: the operands before they were upcast to fp32, and the result after it was rounded back."""
    sources = [each.args[0] for each in (ends.query, ends.key, ends.value) if is_call(each, CAST)]
    rounded = next(iter(ends.output.users), None)
    if len(sources) < 3 or len(ends.output.users) != 1 or not is_call(rounded, CAST):
        return ends
    values = [tensor_of(each) for each in (*sources, rounded) if isinstance(each, fx.Node)]
    if len({None if each is None else each.dtype for each in values}) != 1 or len(values) != 4:
        return ends
    query, key, value = sources
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    assert rounded is not None
    passed.update((ends.query, ends.key, ends.value, rounded))
    return _Ends(query, key, value, rounded)


def _is_result(node: fx.Node) -> bool:
    """True if the node computes; nodes that only change the layout may have other users too."""
    return not is_call(node, LAYOUTS | {aten.full.default})


def _unfolded(node: object) -> fx.Node | None:
    """The value [batch, heads, m, n] that `bmm` takes as [batch * heads, m, n]."""
    while isinstance(node, fx.Node) and is_call(node, VIEWS | COPIES) and ndim_of(node) == 3:
        node = node.args[0]
    # The expansion that `matmul` leaves, to its own shape or of one key head to all, and a copy of what it gives.
    while isinstance(node, fx.Node) and is_call(node, COPIES | {aten.expand.default}) and _keeps_shape(node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and ndim_of(node) == 4 else None


def _keeps_shape(node: fx.Node) -> bool:
    """True if a node keeps its operand's shape, except for the number of heads if that was 1."""
    before = node.args[0]
    a, b = tensor_of(node), tensor_of(before) if isinstance(before, fx.Node) else None
    if a is None or b is None or a.ndim != b.ndim:
        return False
    sizes = zip(a.shape, b.shape, strict=True)
    return all(same_size(x, y) or (at == 1 and a.ndim == 4 and same_size(y, 1)) for at, (x, y) in enumerate(sizes))


def _through(node: object, targets: frozenset[object], passed: set[fx.Node]) -> fx.Node:
    assert isinstance(node, fx.Node)
    while (
        is_call(node, targets) and (is_rounding(node) or not is_call(node, CAST)) and isinstance(node.args[0], fx.Node)
    ):
        passed.add(node)
        node = node.args[0]
    return node


def _softmax_of(node: fx.Node, passed: set[fx.Node]) -> fx.Node | None:
    """Return the operand of a softmax along the last dimension, one operator or decomposed (`exp(x - max) / sum`)."""
    if is_call(node, frozenset({aten._softmax.default})) and node.args[1] in (-1, 3):
        passed.add(node)
        return _through(node.args[0], CAST, passed)
    if not is_call(node, frozenset({aten.div.Tensor})):
        return None
    exp, total = node.args[:2]
    if not is_call(exp, frozenset({aten.exp.default})) or not is_call(total, frozenset({aten.sum.dim_IntList})):
        return None
    assert isinstance(exp, fx.Node) and isinstance(total, fx.Node)
    if total.args[0] is not exp or not _is_of_rows(total):
        return None
    difference = exp.args[0]
    if not is_call(difference, frozenset({aten.sub.Tensor})):
        return None
    assert isinstance(difference, fx.Node)
    logits, largest = difference.args[:2]
    if not isinstance(largest, fx.Node) or not is_call(largest, frozenset({aten.amax.default})):
        return None
    if largest.args[0] is not logits or not _is_of_rows(largest):
        return None
    passed.update((node, exp, total, difference, largest))
    return _through(logits, CAST, passed)


def _is_of_rows(reduced: fx.Node) -> bool:
    """True if a reduction is over the last of four dimensions, which it keeps."""
    dims = argument(reduced, "dim")
    return (list(dims) if isinstance(dims, list | tuple) else [dims]) in ([-1], [3]) and bool(
        argument(reduced, "keepdim")
    )


def _less_maximum(node: fx.Node, passed: set[fx.Node]) -> fx.Node:
    """`x - x.max(-1)`, which changes no softmax."""
    if not is_call(node, frozenset({aten.sub.Tensor})):
        return node
    whole, largest = node.args[:2]
    reduced = largest.args[0] if is_call(largest, frozenset({operator.getitem})) else largest  # type: ignore[union-attr]
    named = frozenset({aten.max.dim, aten.amax.default})
    if not isinstance(whole, fx.Node) or not isinstance(reduced, fx.Node) or not is_call(reduced, named):
        return node
    if reduced.args[0] is whole and _is_of_rows(reduced):
        passed.update(each for each in (node, largest, reduced) if isinstance(each, fx.Node))
        return whole
    return node


def _sinks_of(node: object, passed: set[fx.Node]) -> fx.Node | None:
    """[heads] under `sinks.reshape(1, -1, 1, 1).expand(batch, -1, queries, -1)`."""
    own: list[fx.Node] = []
    by_head: tuple[int, ...] = ()
    """Shape of the first value of four dimensions."""
    while isinstance(node, fx.Node) and ndim_of(node) > 1 and (is_call(node, _SPREADS) or is_rounding(node)):
        own.append(node)
        value = tensor_of(node)
        by_head = shape_of(value) if value is not None and value.ndim == 4 and not is_call(node, _EXPAND) else by_head
        node = node.args[0]
    value = tensor_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(node, fx.Node) or value is None or value.ndim != 1 or by_head != (1, *shape_of(value), 1, 1):
        return None
    if any(_hint_size(each) != hint(value.shape[0]) for each in own if not is_call(each, _EXPAND)):
        return None  # what was repeated is arranged anew
    passed.update(own)
    return node


_EXPAND = frozenset({aten.expand.default})
_SPREADS = VIEWS | {aten.unsqueeze.default}


def _hint_size(node: fx.Node) -> int:
    value = tensor_of(node)
    return 0 if value is None else math.prod(shape_of(value))


def _is_cut_to(cut: fx.Node, before: fx.Node) -> bool:
    """True if a slice keeps the leading columns, those of `before`, and drops the columns appended after them."""
    dim, start = (*cut.args[1:3], 0, 0)[:2]
    shorter, whole = tensor_of(cut), tensor_of(before)
    if shorter is None or whole is None or shorter.ndim != 4:
        return False
    return dim in (-1, 3) and start in (0, None) and same_size(shorter.shape[-1], whole.shape[-1])


def _scores_and_mask(total: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Distinguish scores and mask in `scores + mask`: the scores are the result of a GEMM."""
    for scores, mask in (total.args[:2], total.args[1::-1]):
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node) and _is_from_gemm(scores):
            return scores, mask
    return None, None


def _is_from_gemm(node: fx.Node, most: int = 8) -> bool:
    passing = CAST | MUL | VIEWS | {aten.div.Tensor, aten.tanh.default}
    for _ in range(most):
        if is_call(node, frozenset({aten.bmm.default})):
            return True
        if not is_call(node, passing) or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return False


def _capped(scores: fx.Node, passed: set[fx.Node], numbers: list[Argument]) -> tuple[fx.Node, float] | None:
    """`tanh(x / c) * c` -> x, c."""
    node = _through(scores, CAST, set())
    cap = _factor_of(node) if is_call(node, MUL) else None
    if cap is None:
        return None
    curve = _through(node.args[0], CAST, set())
    if not is_call(curve, frozenset({aten.tanh.default})):
        return None
    divided = _through(curve.args[0], CAST, set())
    factor = _factor_of(divided)
    if factor is None or abs(factor * cap - 1.0) > 1e-6:
        return None
    numbers += (node.args[1], divided.args[1])
    _through(scores, CAST, passed)
    passed.add(node)
    _through(node.args[0], CAST, passed)
    passed.add(curve)
    _through(curve.args[0], CAST, passed)
    passed.add(divided)
    assert isinstance(divided.args[0], fx.Node)
    return divided.args[0], cap
