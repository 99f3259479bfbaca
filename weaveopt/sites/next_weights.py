"""The weights that linear layers read with the rows that a site hands out."""

from __future__ import annotations

import torch.fx as fx

from weaveopt.graph.pattern import SHAPE_ONLY, is_call, tensor_of
from weaveopt.sites.linear import GEMMS, gemm_at


def next_weights(rows: fx.Node) -> tuple[fx.Node, ...]:
    """Inputs of the graph [n, k], contiguous, whose transposed views the GEMMs that read `rows` take as `b`.

    In the order of these GEMMs in the graph. Weights that are computed are not there before they are read, and are
    left out; FP8 GEMMs, whose rows something quantizes first, too.
    """
    seen, pending = {rows}, [rows]
    gemms: dict[fx.Node, fx.Node] = {}
    while pending:
        node = pending.pop()
        for user in node.users:
            if is_call(user, GEMMS):
                gemm = gemm_at(user)
                weight = None if gemm is None or gemm.is_scaled or gemm.a is not node else gemm.transposed_b
                if weight is not None and _lies_in_memory(weight):
                    gemms[user] = weight
            elif is_call(user, SHAPE_ONLY) and user not in seen:
                seen.add(user)
                pending.append(user)
    return tuple(dict.fromkeys(gemms[each] for each in sorted(gemms)))


def _lies_in_memory(weight: fx.Node) -> bool:
    value = tensor_of(weight)
    if weight.op not in ("placeholder", "get_attr") or value is None or value.ndim != 2:
        return False
    n, k = value.shape
    return isinstance(n, int) and isinstance(k, int) and n > 0 and value.stride() == (k, 1)
