"""Recognize RMSNorm and LayerNorm in the graphs that model families really give.

Matched at the core (`x * rsqrt(mean(x^2) + eps)`, or the centered form) and extended forward over what
follows while it has one reader: the cast to the activation dtype, the weight (plain, up-cast, or `1 + w`),
the bias, the last cast. Where a family casts is kept in `NormSpec`; eps is captured, never enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import (
    ADD,
    CAST,
    MUL,
    Any,
    Bindings,
    Equal,
    Mismatch,
    OneDim,
    OneOf,
    Op,
    Scalar,
    Where,
    add,
    aten,
    call,
    is_call,
    is_rounding,
    item,
    mul,
    skip_casts,
    tensor_of,
)
from weaveopt.graph.scalars import number_of
from weaveopt.records.norm import NormKind, NormSpec

_SUB = frozenset({aten.sub.Tensor})
_DIV = frozenset({aten.div.Tensor})
_X = Any("x")
_EPS = Scalar("eps")
_SQUARE = OneOf((call(aten.pow.Tensor_Scalar, _X, Equal(2)), mul(_X, _X)))
_MEAN_SQUARE = call(aten.mean.dim, _SQUARE, OneDim(), Equal(True))
_RMS = mul(
    _X,
    OneOf(
        (
            call(aten.rsqrt.default, add(_MEAN_SQUARE, _EPS)),
            call(aten.pow.Tensor_Scalar, add(_MEAN_SQUARE, _EPS), Equal(-0.5)),
            call(aten.reciprocal.default, call(aten.sqrt.default, add(_MEAN_SQUARE, _EPS))),
        )
    ),
)
_RMS_DIVIDED = call(aten.div.Tensor, _X, call(aten.sqrt.default, add(_MEAN_SQUARE, _EPS)))


def _is_population_variance(bindings: Bindings) -> bool:
    node = bindings["statistics"]
    if not isinstance(node, fx.Node):
        return False
    return bool(node.kwargs.get("correction") == 0) and node.kwargs.get("keepdim") is True


_VAR_MEAN = Where(
    Op(frozenset({aten.var_mean.correction}), (_X, OneDim()), name="statistics"),
    _is_population_variance,
    "var_mean(correction=0, keepdim=True)",
)
_MEAN = OneOf((call(aten.mean.dim, _X, OneDim("mean_dim"), Equal(True)), item(_VAR_MEAN, 1)))
_CENTERED = call(aten.sub.Tensor, _X, _MEAN)
_CENTERED_SQUARE = OneOf((call(aten.pow.Tensor_Scalar, _CENTERED, Equal(2)), mul(_CENTERED, _CENTERED)))
_VARIANCE = OneOf((call(aten.mean.dim, _CENTERED_SQUARE, OneDim(), Equal(True)), item(_VAR_MEAN, 0)))
_LAYER = mul(_CENTERED, call(aten.rsqrt.default, add(_VARIANCE, _EPS)))

_CORES: tuple[tuple[NormKind, OneOf], ...] = (
    (NormKind.RMS, OneOf((_RMS, _RMS_DIVIDED))),
    (NormKind.LAYER, OneOf((_LAYER,))),
)


@dataclass(frozen=True)
class Norm:
    """A normalization found in a graph: `output = norm(source) * (weight + form.weight_offset) + bias`."""

    source: fx.Node
    """Operand of the normalization, before any cast."""
    form: NormSpec
    weight: fx.Node | None
    bias: fx.Node | None
    output: fx.Node
    nodes: tuple[fx.Node, ...]
    """Nodes after `source` up to and including `output`, in graph order."""
    eps: fx.Node | float | int
    """Node or number whose value is `form.eps`: a number, or a Python float that was lifted to a tensor."""

    @property
    def text(self) -> str:
        plus = f", weight + {self.form.weight_offset:g}" if self.form.weight_offset else ""
        return f"{self.form.kind.value}_norm(eps={self.form.eps:g}{plus})"


def find_norms(graph: fx.Graph) -> dict[fx.Node, list[Norm]]:
    """Find all norms over the last dimension, by their operand."""
    found: dict[fx.Node, list[Norm]] = {}
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if is_call(node, MUL | _DIV):
            norm = _norm_at(node, order)
            if norm is not None:
                found.setdefault(norm.source, []).append(norm)
    return found


def tensor_eps(source: fx.Node) -> fx.Node | None:
    """The eps of a norm over `source` where that is a tensor whose value is not known when the graph is compiled."""
    pending = [source]
    while pending:
        for user in pending.pop().users:
            if is_call(user, CAST | _SUB):
                pending.append(user)
            elif is_call(user, MUL | _DIV):
                for _, pattern in _CORES:
                    bindings = pattern.match(user, {})
                    if not isinstance(bindings, Mismatch) and source in _cast_from(bindings["x"]):
                        eps = bindings["eps"]
                        if isinstance(eps, fx.Node) and number_of(eps) is None:
                            return eps
    return None


def _cast_from(x: object) -> tuple[object, ...]:
    return (x, x.args[0]) if isinstance(x, fx.Node) and is_call(x, CAST) else (x,)


def _norm_at(core: fx.Node, order: dict[fx.Node, int]) -> Norm | None:
    for kind, pattern in _CORES:
        bindings = pattern.match(core, {})
        if not isinstance(bindings, Mismatch):
            return _extended(kind, core, bindings, order)
    return None


def _extended(kind: NormKind, core: fx.Node, bindings: Bindings, order: dict[fx.Node, int]) -> Norm | None:
    x, eps = bindings["x"], bindings["eps"]
    dims = {bindings[name] for name in ("dim", "mean_dim") if name in bindings}
    assert isinstance(x, fx.Node)
    value, eps_value = tensor_of(x), number_of(eps)
    if eps_value is None or value is None or value.ndim == 0 or not dims <= {-1, value.ndim - 1}:
        return None
    source = x.args[0] if is_call(x, CAST) else x
    assert isinstance(source, fx.Node)
    source_value = tensor_of(source)
    if source_value is None:
        return None
    output, weight, bias, offset, cast_before = core, None, None, 0.0, False
    cast_seen = False
    while len(output.users) == 1:
        user = next(iter(output.users))
        if is_call(user, CAST):
            if _dtype(user) != source_value.dtype or (cast_seen and weight is None):
                break
            cast_seen = True
            output = user
            if weight is not None:
                break
            continue
        if is_call(user, MUL) and weight is None and bias is None:
            vector = _vector_operand(user, output, source, order)
            if vector is None:
                break
            weight, offset = _without_offset(vector)
            cast_before = cast_seen and _dtype(output) != torch.float32
            output = user
            continue
        if is_call(user, ADD) and weight is not None and bias is None and not user.kwargs:
            vector = _vector_operand(user, output, source, order)
            if vector is None:
                break
            bias, output = skip_casts(vector), user
            continue
        break
    form = NormSpec(kind=kind, eps=eps_value, weight_offset=offset, cast_before_weight=cast_before)
    return Norm(source, form, weight, bias, output, _between(source, output, order), eps)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = tensor_of(node)
    return None if value is None else value.dtype


def _vector_operand(user: fx.Node, carried: fx.Node, source: fx.Node, order: dict[fx.Node, int]) -> fx.Node | None:
    """The operand of `user` that is not `carried`, if it is a vector over the last dimension of `source`, and is not
    computed from `source`: an operation that computes `source` too has no such operand yet."""
    others = [argument for argument in user.args if argument is not carried]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    value, like = tensor_of(others[0]), tensor_of(source)
    if value is None or like is None or value.ndim != 1 or value.shape[0] != like.shape[-1]:
        return None
    return None if others[0] in _between(source, others[0], order) else others[0]


def _without_offset(vector: fx.Node) -> tuple[fx.Node, float]:
    """`(w, 1.0)` of `1.0 + w.float()` (Gemma), `(w, 0.0)` of a plain or up-cast weight."""
    under_cast = vector.args[0] if is_rounding(vector) else vector
    if is_call(under_cast, ADD) and isinstance(under_cast, fx.Node) and not under_cast.kwargs:
        for weight, offset in (under_cast.args[:2], under_cast.args[1::-1]):
            if isinstance(weight, fx.Node) and isinstance(offset, int | float) and not isinstance(offset, bool):
                return skip_casts(weight), float(offset)
    return skip_casts(vector), 0.0


def _between(source: fx.Node, output: fx.Node, order: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    """Nodes on a path from `source` to `output`, without `source`."""
    before: set[fx.Node] = set()
    pending = [output]
    while pending:
        node = pending.pop()
        if node not in before and order[node] > order[source]:
            before.add(node)
            pending.extend(node.all_input_nodes)
    reached = {source}
    for node in sorted(before, key=order.__getitem__):
        if any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
    return tuple(sorted(reached - {source}, key=order.__getitem__))
