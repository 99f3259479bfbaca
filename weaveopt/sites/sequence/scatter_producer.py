"""Producers of a reduce-scatter's input: GEMMs, followed by views, transposes, casts, scales and sums.

    x = cat(split((a @ b).view(B, S, N), S // W, 1))                        # scatter along dim 1
    x = ((a1 @ b1).view(B, S, N) + (a2 @ b2).view(B, S, N)) / W             # several projections' gradients

The walk goes backwards while nothing outside reads what it passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Arrangement, Factor
from weaveopt.graph.moves import MOVES, OTHER_MOVES, Moves
from weaveopt.graph.pattern import ADD, MUL, describe, is_call, tensor_of
from weaveopt.graph.scalars import number_of
from weaveopt.records.candidate import Rejection
from weaveopt.sites.shared.linear import MatchedGemm, gemm_at

DIV = frozenset({torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar})


@dataclass(frozen=True)
class Partial:
    """Partial result `scale * (sum of GEMMs + biases) + addends` of one rank, and the arrangement of its elements
    [m, n]."""

    arrangement: Arrangement
    """Arrangement of the value by the dimensions m and n of the GEMMs."""
    gemms: tuple[MatchedGemm, ...]
    biases: tuple[fx.Node, ...] = ()
    """Bias vectors [n] that each rank adds before the sum."""
    addends: tuple[fx.Node, ...] = ()
    """[m, n] elements that are no GEMM's, in the order of m and n, after the scale."""
    scale: float = 1.0
    scalars: tuple[fx.Node | float | int, ...] = ()
    """Factors of `scale`: numbers, or Python floats that were lifted to tensors."""
    nodes: frozenset[fx.Node] = frozenset()
    """Every node from the GEMMs to the value."""


def partial_at(value: fx.Node) -> Partial | Rejection | None:
    """Read the GEMMs that make `value`; None if no GEMM does, a rejection if the form is not supported."""
    start = value
    while is_call(start, MOVES | OTHER_MOVES):
        before = start.args[0]
        before = before[0] if isinstance(before, list | tuple) and before else before
        if not isinstance(before, fx.Node):
            return None
        start = before
    found = _computed(start)
    if not isinstance(found, Partial):
        return found
    moves = Moves({start: found.arrangement})
    arrangement = moves.of(value)
    if isinstance(arrangement, Rejection):
        return arrangement
    assert isinstance(arrangement, Arrangement), f"{value.name} is {arrangement} of {start.name}"
    rearrangements = frozenset(node for node, known in moves.known.items() if known is not None)
    return replace(found, arrangement=arrangement, nodes=found.nodes | rearrangements)


def read_by_others(partial: Partial, reader: fx.Node) -> Rejection | None:
    """Return the reason why the GEMMs may not be removed: a consumer other than `reader` needs their results."""
    for node in sorted(partial.nodes):
        others = [user for user in node.users if user not in partial.nodes and user is not reader]
        others = [user for user in others if user.users or user.op == "output"]  # not a piece that is cut off and left
        if others:
            values = (("node", node.name), ("read_by", ", ".join(sorted({describe(each) for each in others}))))
            return Rejection("read_by_others", "the whole partial result is read in addition to its shard", values)
    return None


def _computed(node: fx.Node) -> Partial | Rejection | None:
    gemm = gemm_at(node)
    if gemm is not None:
        return _gemm(gemm)
    if is_call(node, MUL | DIV):
        return _scaled(node)
    return _sum(node) if is_call(node, ADD) else None


def _gemm(gemm: MatchedGemm) -> Partial | Rejection:
    if gemm.has_factors:
        values = (("node", gemm.node.name), ("kwargs", str(dict(gemm.node.kwargs))))
        return Rejection("form_not_known", "the GEMM scales what it adds (alpha, beta)", values)
    value = tensor_of(gemm.node)
    assert value is not None, f"{gemm.node.name} makes no tensor"
    return Partial(
        Arrangement.of(value.shape),
        (gemm,),
        biases=() if gemm.bias is None else (gemm.bias,),
        addends=() if gemm.addend is None else (gemm.addend,),
        nodes=frozenset({gemm.node}),
    )


def _scaled(node: fx.Node) -> Partial | Rejection | None:
    """`x * number` or `x / number`."""
    x, other = node.args[:2]
    if is_call(node, MUL) and not isinstance(x, fx.Node):
        x, other = other, x
    found = partial_at(x) if isinstance(x, fx.Node) else None
    if not isinstance(found, Partial):
        return found
    number = number_of(other)
    if number is None or number == 0 or found.addends or node.kwargs:
        values = (("node", node.name), ("op", describe(node)))
        return Rejection("form_not_known", "the partial result is scaled by what is no number", values)
    factor = number if is_call(node, MUL) else 1.0 / number
    scalars = (*found.scalars, other) if isinstance(other, fx.Node | int | float) else found.scalars
    return replace(found, scale=found.scale * factor, scalars=scalars, nodes=found.nodes | {node})


def _sum(node: fx.Node) -> Partial | Rejection | None:
    a, b = node.args[:2]
    one = partial_at(a) if isinstance(a, fx.Node) else None
    two = partial_at(b) if isinstance(b, fx.Node) else None
    if one is None and two is None:
        return None
    why = next((each for each in (one, two) if isinstance(each, Rejection)), None)
    if why is not None:
        return why
    if node.kwargs:
        return _refused(node, "one summand is scaled (alpha)")
    if isinstance(one, Partial) and isinstance(two, Partial):
        return _both(node, one, two)
    found, other = (one, b) if isinstance(one, Partial) else (two, a)
    assert isinstance(found, Partial)
    return _with_other(node, found, other)


def _both(node: fx.Node, one: Partial, two: Partial) -> Partial | Rejection:
    if one.arrangement != two.arrangement:
        return _refused(node, "two partial results are added whose rows are in different orders")
    if one.scale != two.scale or one.gemms[0].sizes[:2] != two.gemms[0].sizes[:2]:
        return _refused(node, "two partial results are added that have different scales or sizes")
    return Partial(
        one.arrangement,
        (*one.gemms, *two.gemms),
        (*one.biases, *two.biases),
        (*one.addends, *two.addends),
        one.scale,
        (*one.scalars, *two.scalars),
        one.nodes | two.nodes | {node},
    )


def _with_other(node: fx.Node, found: Partial, other: object) -> Partial | Rejection:
    """A bias, or rows that no GEMM makes."""
    value, total = tensor_of(other) if isinstance(other, fx.Node) else None, tensor_of(node)
    if not isinstance(other, fx.Node) or value is None or total is None or value.dtype != total.dtype:
        return _refused(node, "what is added is no tensor of the partial result's dtype")
    if value.ndim == 1 and found.arrangement.dims[-1] == _columns(found) and found.scale == 1.0:
        return replace(found, biases=(*found.biases, other), nodes=found.nodes | {node})
    if value.shape == total.shape and found.arrangement.factors == _in_order(found):
        return replace(found, addends=(*found.addends, other), nodes=found.nodes | {node})
    return _refused(node, "what is added to the partial result has another shape or order")


def _columns(found: Partial) -> tuple[Factor, ...]:
    return Arrangement.of(_shape(found)).dims[1]


def _in_order(found: Partial) -> tuple[Factor, ...]:
    return Arrangement.of(_shape(found)).factors


def _shape(found: Partial) -> torch.Size:
    value = tensor_of(found.gemms[0].node)
    assert value is not None
    return value.shape


def _refused(node: fx.Node, message: str) -> Rejection:
    return Rejection("form_not_known", message, (("node", node.name), ("op", describe(node))))
