"""The weights that linear layers read with the rows that a site hands out."""

from __future__ import annotations

import torch
import torch.fx as fx

from weaveopt.graph.pattern import CAST, SHAPE_ONLY, is_call, skip_casts, tensor_of
from weaveopt.sites.linear import GEMMS, gemm_at, transposed

aten = torch.ops.aten
_PRODUCT = frozenset({aten.mul.Tensor})
_SUM = frozenset({aten.sum.dim_IntList})


def next_weights(rows: fx.Node) -> tuple[fx.Node, ...]:
    """Inputs of the graph [n, k], contiguous, whose transposed views the GEMMs that read `rows` take as `b`.

    In the order of these GEMMs in the graph. A GEMM of one row may be written as a sum of products (see
    `weaveopt.inductor.one_row`). Weights that are computed are not there before they are read, and are left out; FP8
    GEMMs, whose rows something quantizes first, too.
    """
    seen, pending = {rows}, [rows]
    gemms: dict[fx.Node, fx.Node] = {}
    while pending:
        node = pending.pop()
        for user in node.users:
            weight = None
            if is_call(user, GEMMS):
                gemm = gemm_at(user)
                weight = None if gemm is None or gemm.is_scaled or gemm.a is not node else gemm.transposed_b
            elif is_call(user, _PRODUCT):
                weight = _weight_of_row(user, node)
            elif is_call(user, SHAPE_ONLY | CAST) and user not in seen:
                seen.add(user)
                pending.append(user)
            if weight is not None and _lies_in_memory(weight):
                gemms[user] = weight
    return tuple(dict.fromkeys(gemms[each] for each in sorted(gemms)))


def _weight_of_row(product: fx.Node, row: fx.Node) -> fx.Node | None:
    """Of `row[:, :, None] * weight.t()[None]`, which is summed over the second dimension: the weight [n, k]."""
    others = [each for each in product.args if each is not row]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    if not any(is_call(user, _SUM) and user.args[1] == [1] for user in product.users):
        return None
    weight, value, of_row = transposed(skip_casts(others[0])), tensor_of(product), tensor_of(row)
    known = None if weight is None else tensor_of(weight)
    if value is None or of_row is None or known is None:
        return None
    n, k = known.shape
    return weight if tuple(value.shape) == (1, k, n) and tuple(of_row.shape) == (1, k, 1) else None


def _lies_in_memory(weight: fx.Node) -> bool:
    value = tensor_of(weight)
    if weight.op not in ("placeholder", "get_attr") or value is None or value.ndim != 2:
        return False
    n, k = value.shape
    return isinstance(n, int) and isinstance(k, int) and n > 0 and value.stride() == (k, 1)
