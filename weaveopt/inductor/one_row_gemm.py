"""GEMMs of one row as reductions: their computed operand is stored, so that it is computed once.

Under `coordinate_descent_tuning` torch writes `x @ w` with one row as `(x[:, :, None] * w[None]).sum(1)`. Where `x` is
computed point-wise, `silu(gate) * up` say, Inductor inlines that into the reduction: every column of `w` computes all
of `x` again. Storing it costs a pass over one row.
"""

from __future__ import annotations

import torch
import torch.fx as fx
from torch._inductor import inductor_prims

from weaveopt.graph.values import tensors_of

aten = torch.ops.aten
STORE = inductor_prims.force_stride_order
"""The same values, in memory."""
CONVERT = torch.ops.prims.convert_element_type.default
VIEWS = (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.expand.default, aten.squeeze.dim)


def store_rows(graph: fx.Graph) -> int:
    """Store every computed row that a one-row GEMM reads; returns how many. The graph stays valid."""
    stored: dict[fx.Node, fx.Node] = {}
    for reduction in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        product = reduction.args[0]
        if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
            continue
        for side in product.args:
            if isinstance(side, fx.Node) and _is_row_of(side, product):
                _store(graph, side, stored)
    return len(stored)


def _is_row_of(side: fx.Node, product: fx.Node) -> bool:
    """True if `side` is broadcast along the columns: [1, K, 1] with [1, K, N]. A symbolic size does not count as 1."""
    shapes = [each.shape for node in (side, product) for each in tensors_of(node)]
    if len(shapes) != 2 or any(len(shape) != 3 for shape in shapes):
        return False
    row, whole = shapes
    return _is_one(row[0]) and _is_one(row[2]) and not _is_one(row[1]) and not _is_one(whole[2])


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def _store(graph: fx.Graph, side: fx.Node, stored: dict[fx.Node, fx.Node]) -> None:
    """Store the computed value under `side`, before its views and cast to fp32, so that it keeps the model's own
    dtype."""
    reader, value = side, side
    while value.target in VIEWS or _is_upcast(value):
        reader, value = value, value.all_input_nodes[0]
    if reader is value or not _is_computed(value):
        return
    if value not in stored:
        (fake,) = tensors_of(value)
        with graph.inserting_after(value):
            stored[value] = graph.call_function(STORE, (value, list(fake.stride())))
        stored[value].meta["val"] = fake
    reader.replace_input_with(value, stored[value])


def _is_upcast(node: fx.Node) -> bool:
    if node.target is not CONVERT:
        return False
    (before,), (after,) = tensors_of(node.all_input_nodes[0]), tensors_of(node)
    return before.dtype.itemsize < after.dtype.itemsize


def _is_computed(node: fx.Node) -> bool:
    """Point-wise, from more than constants: anything else is in memory already."""
    is_pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return is_pointwise and bool(node.all_input_nodes)
