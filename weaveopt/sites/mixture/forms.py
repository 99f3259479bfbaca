"""Experts as transformers computes them, read into one record.

grouped      ids, order = sort(experts.view(-1)); rows = x[order // k]; offsets = cumsum(histc(ids, 0, E - 1))
             y = grouped_mm(act(grouped_mm(rows, gate_up^T, offsets) + bias[ids]), down^T, offsets) + bias[ids]
             y = (y * weights.view(-1)[order][:, None])[inverse(order)].view(T, k, H).sum(1)
batched      y = bmm(down[experts], act(bmm(gate_up[experts], x.repeat(k)))); y = (y * weights).view(T, k, H).sum(1)

Both start from the GEMM of the down projection and read on in both directions. Choices of another rank's experts have
an id that no expert of this rank has: the grouped form masks their rows, the batched form their weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx

from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.values import argument
from weaveopt.records.candidate import Rejection
from weaveopt.sites.mixture.activation import GATHER
from weaveopt.sites.mixture.batched import batched_experts
from weaveopt.sites.mixture.experts import Experts
from weaveopt.sites.mixture.grouped import grouped_experts, is_grouped
from weaveopt.sites.mixture.reading import BMM, SUM, TRANSPOSE, VIEWS, Refused, Unknown

aten = torch.ops.aten


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
        while isinstance(node, fx.Node) and is_call(node, VIEWS | TRANSPOSE):
            node = node.args[0]
        value = tensor_of(node) if isinstance(node, fx.Node) else None
        if isinstance(node, fx.Node) and is_call(node, GATHER) and value is not None and value.ndim == 3:
            return node
    return None


def _first(product: fx.Node, products: list[fx.Node]) -> fx.Node | None:
    """Find the nearest of `products`, the GEMMs, upstream of the rows that GEMM `product` multiplies."""
    others = frozenset(products) - {product}
    seen: set[fx.Node] = set()
    pending = [each for each in product.args[:2] if isinstance(each, fx.Node)]
    while pending:
        node = pending.pop()
        if node in others:
            same = is_grouped(product) and argument(node, "offs") is argument(product, "offs")
            return node if same or (is_call(product, BMM) and _gathered_weight(node) is not None) else None
        if node in seen or node.op != "call_function" or is_call(node, GATHER | SUM):
            continue
        seen.add(node)
        pending.extend(node.all_input_nodes)
    return None


def _read(second: fx.Node, first: fx.Node | None) -> Experts | Rejection:
    if first is None:
        return Rejection("form_not_known", "a grouped GEMM that no second one follows", (("node", second.name),))
    try:
        return grouped_experts(first, second) if is_grouped(second) else batched_experts(first, second)
    except Unknown as unknown:
        return Rejection("form_not_known", str(unknown.mismatch), (("node", unknown.mismatch.node),))
    except Refused as refused:
        return refused.why
