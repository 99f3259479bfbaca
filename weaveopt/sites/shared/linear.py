"""The GEMMs of linear layers, whichever operator computes them: their operands by role, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.moves import MOVES, OTHER_MOVES
from weaveopt.graph.pattern import MUL, is_call, tensor_of
from weaveopt.graph.values import argument, hint
from weaveopt.sites.shared.epilogue import WAIT

aten = torch.ops.aten
ALL_GATHER = frozenset({torch.ops._c10d_functional.all_gather_into_tensor.default})
MM, ADDMM, SCALED_MM = aten.mm.default, aten.addmm.default, aten._scaled_mm.default
GEMMS = frozenset({MM, ADDMM, SCALED_MM})
_TRANSPOSES = frozenset({aten.t.default, aten.permute.default, aten.transpose.int})


@dataclass(frozen=True)
class MatchedGemm:
    """A GEMM `a [m, k] @ b [k, n] + bias [n] + addend [m, n]`; for `_scaled_mm` a and b each have scales."""

    node: fx.Node
    a: fx.Node
    b: fx.Node
    bias: fx.Node | None = None
    addend: fx.Node | None = None
    has_factors: bool = False
    """True if alpha or beta of addmm is not 1."""

    @property
    def is_scaled(self) -> bool:
        return self.node.target is SCALED_MM

    @property
    def transposed_b(self) -> fx.Node | None:
        """The [n, k] matrix whose transposed view b is, as linear layers keep their weights; None where b is none."""
        node = self.b
        source = node.args[0] if is_call(node, _TRANSPOSES) else None
        value = tensor_of(source) if isinstance(source, fx.Node) else None
        if value is None or value.ndim != 2 or not isinstance(source, fx.Node):
            return None
        if node.target is aten.t.default:
            return source
        dims = node.args[1] if node.target is aten.permute.default else node.args[1:3]
        assert isinstance(dims, list | tuple), node.args
        swaps = [int(dim) % 2 for dim in dims]
        return source if swaps == [1, 0] or (node.target is aten.transpose.int and swaps == [0, 1]) else None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n, k; symbols by their hints."""
        a, b = tensor_of(self.a), tensor_of(self.b)
        assert a is not None and b is not None, f"{self.node.name} multiplies no tensors"
        return hint(a.shape[0]), hint(b.shape[1]), hint(a.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        value = tensor_of(self.node)
        assert value is not None, f"{self.node.name} makes no tensor"
        return value.dtype


def gemm_at(node: object) -> MatchedGemm | None:
    """The GEMM that a node is."""
    if not isinstance(node, fx.Node) or not is_call(node, GEMMS):
        return None
    if node.target is ADDMM:
        added, a, b = node.args[:3]
        value = tensor_of(added) if isinstance(added, fx.Node) else None
        assert isinstance(added, fx.Node) and isinstance(a, fx.Node) and isinstance(b, fx.Node), node.args
        made = tensor_of(node)
        if value is None or made is None or value.ndim == 0 or hint(value.shape[-1]) != hint(made.shape[-1]):
            return None  # one number, or one a row: no bias, and no rows that a fused GEMM could begin from
        has_factors = any(argument(node, name) != 1 for name in ("alpha", "beta"))
        if value.ndim == 1 or value.shape[0] == 1:
            return MatchedGemm(node, a, b, bias=added, has_factors=has_factors)
        return MatchedGemm(node, a, b, addend=added, has_factors=has_factors)
    a, b = node.args[:2]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node), node.args
    bias = argument(node, "bias") if node.target is SCALED_MM else None
    return MatchedGemm(node, a, b, bias=bias if isinstance(bias, fx.Node) else None)


def leads_to_gemm(node: fx.Node) -> bool:
    """True if a GEMM reads `node`, directly or through views, transposes, casts and copies."""
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if is_call(user, GEMMS):
                return True
            if is_call(user, MOVES | OTHER_MOVES) and user not in seen:
                seen.add(user)
                pending.append(user)
    return False


_OF_WEIGHTS = MOVES | OTHER_MOVES | MUL | ALL_GATHER | WAIT
"""Operators between a parameter and the GEMM that reads it: casts, views, its all-gather, a scale."""


def is_input(node: fx.Node, through: frozenset[object] = MOVES | OTHER_MOVES) -> bool:
    """True if `node` is a graph input after views and casts at most: a parameter, or unmodified activations."""
    seen, pending = {node}, [node]
    while pending:
        each = pending.pop()
        if each.op in ("placeholder", "get_attr"):
            continue
        if not is_call(each, through):
            return False
        pending.extend(source for source in each.all_input_nodes if source not in seen)
        seen.update(each.all_input_nodes)
    return True


def may_be_weight(node: fx.Node) -> bool:
    """True if `node` is derived from graph inputs as parameters are: by views, casts, a gather, a scale."""
    return is_input(node, _OF_WEIGHTS)
