"""Attention as graphs hold it, read into one record; here as one operator of the library.

`weaveopt.sites.attention.written` reads attention that is written out as GEMMs and a softmax.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import is_call, tensor_of
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
VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default})
COPIES = frozenset({aten.clone.default})
LAYOUTS = VIEWS | COPIES | {aten.unsqueeze.default, aten.permute.default}
"""Operators that change the layout of a value's elements."""


@dataclass(frozen=True)
class AttentionForm:
    """One attention of a graph, by role."""

    query: fx.Node
    """[batch, heads, queries, head_dim]"""
    key: fx.Node
    """[batch, heads or key heads, keys, head_dim]"""
    value: fx.Node
    mask: fx.Node | None
    """Bias that is added to the scores, or a boolean mask; [batch or 1, heads or 1, queries or 1, keys]."""
    is_causal: bool
    """True if the operator applies the causal mask itself: query i reads keys up to i."""
    scale: float
    output: fx.Node
    """[batch, heads, queries, value_dim]"""
    nodes: frozenset[fx.Node]
    """Nodes that compute `output` from the other fields."""
    call: fx.Node | None = None
    """The library's operator; None for attention that is written out."""
    softcap: float = 0.0
    sinks: fx.Node | None = None
    """[heads]"""
    refused: Rejection | None = None
    """Why no rule may touch it."""
    numbers: tuple[torch.SymFloat, ...] = ()
    """Floats of the program that scale or cap the scores, which stand here as the numbers they are in this call."""


def library_form(node: fx.Node) -> AttentionForm | None:
    """The attention that an operator of `LIBRARY_CALLS` computes; None if it is not read."""
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
    return AttentionForm(
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
    while is_call(chain[-1], VIEWS | COPIES):
        before = chain[-1].args[0]
        assert isinstance(before, fx.Node)
        chain.append(before)
        if is_call(before, frozenset({aten.unsqueeze.default})) or ndim_of(before) == 4:
            break
    added = chain[-1]
    source = added.args[0] if is_call(added, frozenset({aten.unsqueeze.default})) else None
    wide = [each for each in chain[:-1] if ndim_of(each) == 5]
    if not isinstance(source, fx.Node) or ndim_of(source) != 4 or added.args[1] not in (2, -3) or not wide:
        return node, frozenset()
    if not _repeats(node, wide[0], source) or not all(map(_keeps_places, wide)):
        return node, frozenset()
    own: set[fx.Node] = set()
    for each in chain:
        if any(user not in own and user not in used_by for user in each.users):
            break
        own.add(each)
    return source, frozenset(own)


def _keeps_places(node: fx.Node) -> bool:
    """True unless a view arranges elements in other dimensions."""
    before, after = tensor_of(node.args[0]), tensor_of(node)  # type: ignore[arg-type]
    if is_call(node, COPIES | {aten.expand.default, aten.unsqueeze.default}) or before is None or after is None:
        return True
    return before.ndim == after.ndim and all(same_size(x, y) for x, y in zip(before.shape, after.shape, strict=True))


def _repeats(node: fx.Node, wide: fx.Node, source: fx.Node) -> bool:
    """`source` [b, h, l, d] over `wide` [b, h, g, l, d] to `node` [b, h * g, l, d]."""
    narrow, five, four = tensor_of(source), tensor_of(wide), tensor_of(node)
    if narrow is None or five is None or four is None or four.ndim != 4:
        return False
    b, h, length, dim = narrow.shape
    groups = five.shape[2]
    return (
        all(same_size(x, y) for x, y in zip(five.shape, (b, h, groups, length, dim), strict=True))
        and isinstance(h, int)
        and isinstance(groups, int)
        and all(same_size(x, y) for x, y in zip(four.shape, (b, h * groups, length, dim), strict=True))
    )


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return isinstance(a, int) and isinstance(b, int) and a == b


def ndim_of(node: fx.Node) -> int:
    value = tensor_of(node)
    return -1 if value is None else value.ndim
