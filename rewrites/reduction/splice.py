"""How a fused operation takes the place of a reduction site in its graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.fx as fx
from torch.fx.node import Argument

from weaveopt.graph.facts import shape_of
from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.splice import call_after, current, last_of, replace_uses
from weaveopt.sites.reduction.matcher import Reduction
from weaveopt.sites.shared.epilogue import Reduced, product_of
from weaveopt.sites.shared.quantization import Place, Quantized, shaped_like

aten = torch.ops.aten


def operand_nodes(graph: fx.Graph, reduced: Reduced) -> tuple[fx.Node | None, ...]:
    """Operands after the reduction, in the operations' order: bias, scale, residual, parameters of both norms."""
    return (
        summed(graph, reduced.biases),
        reduced.scale_tensor,
        summed(graph, reduced.residuals),
        *((reduced.post.weight, reduced.post.bias) if reduced.post else (None, None)),
        *((reduced.norm.weight, reduced.norm.bias) if reduced.norm else (None, None)),
    )


def made_by(structure: Reduction) -> Iterator[fx.Node]:
    """The GEMM that the operation takes in, and the views of its result."""
    for partial in structure.reduced.partials:
        if product_of(partial) is structure.gemm:
            node = partial
            while node is not structure.gemm:
                yield node
                node = node.args[0]  # type: ignore[assignment]
            yield node


def splice_results(
    graph: fx.Graph, reduced: Reduced, quantized: Quantized | None, fused: fx.Node, sum_used: bool
) -> None:
    """Readers of the norm, of its quantized rows and their scales, and of the sum read the fused results."""
    position = fused
    outputs: list[tuple[fx.Node, int, tuple[Place, ...] | None]] = []
    if reduced.norm is not None:
        outputs.append((reduced.norm.output, 0, None if quantized is None else quantized.rows))
        if quantized is not None and quantized.scales:
            outputs.append((reduced.norm.output, 2, quantized.scales))
    if sum_used:
        outputs.append((reduced.total, 1, None))
    for old, index, places in outputs:
        result = position = call_after(graph, position, operator.getitem, (fused, index), like=old)
        old_value, value = tensor_of(old), tensor_of(result)
        assert old_value is not None and value is not None
        if value.ndim != old_value.ndim:
            # Where there is no residual, rows have the shape of the partial result, or of the GEMM that was taken in.
            sizes = [*_leading_sizes(graph, reduced, old_value), value.shape[-1]]
            result = call_after(graph, result, aten.view.default, (result, sizes), old)
        if places is None:
            replace_uses(graph, old, result)
        for place in places or ():
            replace_uses(graph, place.node, shaped_like(graph, place, result))


def _leading_sizes(graph: fx.Graph, reduced: Reduced, value: torch.Tensor) -> list[Argument]:
    """All but the last size of `value`; symbols are nodes of the view that makes the sum, or the partial result."""
    if all(isinstance(size, int) for size in value.shape[:-1]):
        return list(value.shape[:-1])
    total = tensor_of(reduced.total)
    is_viewed = is_call(reduced.total, frozenset({aten.view.default})) and total is not None
    source = reduced.total if is_viewed and total.ndim == value.ndim else reduced.partials[0]  # type: ignore[union-attr]
    return shape_of(graph, source)[:-1]


def summed(graph: fx.Graph, values: tuple[fx.Node, ...]) -> fx.Node | None:
    """The only one of `values`, or their sum on this rank in the shape of the first; None where there is none."""
    if not values:
        return None
    nodes = [node for node in map(current, values) if isinstance(node, fx.Node)]
    total, first = nodes[0], tensor_of(nodes[0])
    for node in nodes[1:]:
        value = tensor_of(node)
        assert first is not None and value is not None
        if value.ndim != first.ndim:
            sizes = shape_of(graph, nodes[0])  # which may become nodes after it
            position = last_of(graph, [node, nodes[0], *(size for size in sizes if isinstance(size, fx.Node))])
            node = call_after(graph, position, aten.view.default, (node, sizes), like=node)
        total = call_after(graph, last_of(graph, [total, node]), aten.add.Tensor, (total, node), like=total)
    return total


def rounding(rule: str, reduced: Reduced, quantized: Quantized | None) -> tuple[str, ...]:
    """Changes of rounding by a rewrite, a line each."""
    lines = ["partial results are summed in fp32 and rounded once, after the residual"]
    if len(reduced.collectives) > 1:
        lines.append("partial results of one sum are added before the reduction")
    if reduced.scale_tensor is not None or reduced.scale != 1.0:
        lines.append("the scaled sum is not rounded before the residual is added")
    return tuple(f"{rule}: {line}" for line in (*lines, *(quantized.rounding if quantized else ())))
