"""The boolean form of a mask that is added to the scores: `where(admitted, 0, very negative)`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.graph.pattern import CAST, Argument, describe, is_call, is_rounding, tensor_of
from weaveopt.records.candidate import Rejection

aten = torch.ops.aten

MAX_FILL = -1.0e4
"""Largest bias that stands for "never": with it a softmax in fp32 gives exactly 0 as long as an admitted score is
not thousands below. Models add -inf, the dtype's least number, -65536 or -10000."""

_SAME = frozenset({aten.clone.default, aten.alias.default, aten.detach.default, aten.expand.default})
_VIEW = frozenset({aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_WHERE = frozenset({aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar})
_MASKED_FILL = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})
_FULL = frozenset({aten.full.default})
_SCALAR = frozenset({aten.scalar_tensor.default})
_NOT = frozenset({aten.logical_not.default, aten.bitwise_not.default})


@dataclass(frozen=True)
class BooleanForm:
    """The boolean under a mask, true for admitted keys (`is_inverted`: for the others), broadcastable to the mask."""

    node: fx.Node
    is_inverted: bool
    fill: float | None
    """Bias on the scores of keys that are not admitted; None if the mask itself is boolean."""


def boolean_form(mask: fx.Node) -> BooleanForm | Rejection:
    """The boolean that a mask is made from; the mask itself where it is boolean.

    A bias is one only if it is 0 at every admitted key and the same very negative number at every other.
    """
    value = tensor_of(mask)
    if value is None:
        return Rejection("mask_unknown", "the shape and dtype of the mask are not known", (("node", mask.name),))
    inner = _peel(mask, casts=True)
    if value.dtype is torch.bool:
        return _without_not(_peel(mask, casts=False), False, None)
    if is_call(inner, _WHERE):
        admitted, yes, no = inner.args[:3]
    elif is_call(inner, _MASKED_FILL):
        no, admitted, yes = inner.args[:3]
    else:
        return _not_boolean(mask, inner)
    on, off = constant_of(yes), constant_of(no)
    if not isinstance(admitted, fx.Node) or on is None or off is None:
        return _not_boolean(mask, inner)
    fill = min(on, off)
    if max(on, off) != 0 or not fill <= MAX_FILL:
        message = "the mask adds other numbers to the scores than 0 and a very negative one"
        return Rejection("bias_not_boolean", message, (("node", mask.name), ("admitted", on), ("otherwise", off)))
    fill = float(torch.tensor(fill, dtype=torch.float64).to(value.dtype))  # through the casts that follow
    return _without_not(_peel(admitted, casts=False), on != 0, fill)


def constant_of(argument: Argument) -> float | None:
    """The one number that an argument holds throughout, under casts and expansions."""
    while isinstance(argument, fx.Node):
        if is_rounding(argument) or is_call(argument, _SAME | _VIEW | _SCALAR):
            argument = argument.args[0]
        elif is_call(argument, _FULL):
            argument = argument.args[1]
        else:
            return None
    return float(argument) if isinstance(argument, int | float) else None


def _not_boolean(mask: fx.Node, inner: fx.Node) -> Rejection:
    if inner.op == "placeholder":
        # `mask == 0` would drop whatever else a caller adds, and finding that out is a wait for the device.
        message = (
            "the mask is an input that is added to the scores: only at run time is it known whether it holds other "
            "numbers than 0 and a very negative one, which booleans cannot stand for"
        )
        return Rejection("bias_not_boolean", message, (("node", mask.name), ("input", inner.name)))
    message = "the mask is added to the scores and is no choice between 0 and a very negative number"
    return Rejection("bias_not_boolean", message, (("node", mask.name), ("made_by", describe(inner))))


def _without_not(node: fx.Node, is_inverted: bool, fill: float | None) -> BooleanForm:
    while is_call(node, _NOT) and isinstance(node.args[0], fx.Node):
        node, is_inverted = _peel(node.args[0], casts=False), not is_inverted
    return BooleanForm(node, is_inverted, fill)


def _peel(node: fx.Node, *, casts: bool) -> fx.Node:
    """Skip nodes that repeat or copy a mask: the result still broadcasts to the shape of `node`."""
    while True:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node):
            return node
        keeps = is_call(node, _SAME) or (casts and is_call(node, CAST) and _is_float(source))
        if not keeps and is_call(node, _VIEW):
            keeps = _without_leading_ones(_shape(node)) == _without_leading_ones(_shape(source))
        if not keeps and is_call(node, frozenset({aten.slice.Tensor})):
            unpadded = under_padding(node, source)
            if unpadded is None:
                return node
            source, keeps = unpadded, True
        if not keeps:
            return node
        node = source


def _is_float(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype.is_floating_point


def _shape(node: fx.Node) -> list[str]:
    """Shape as text, since comparing symbolic sizes would add guards."""
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    return [str(size) for size in value.shape]


def _without_leading_ones(shape: list[str]) -> list[str]:
    """Drop leading sizes of 1, which broadcast."""
    return shape[next((at for at, size in enumerate(shape) if size != "1"), len(shape)) :]


def under_padding(node: fx.Node, padded: fx.Node) -> fx.Node | None:
    """x of `slice(constant_pad_nd(x, [0, n]), dim, 0, size of x)`: what torch does to align the mask's rows."""
    if not is_call(padded, frozenset({aten.constant_pad_nd.default})) or not isinstance(padded.args[0], fx.Node):
        return None
    source = padded.args[0]
    padding = padded.args[1]
    assert isinstance(padding, list | tuple), padding
    if any(pad != 0 for pad in padding[0::2]) or node.kwargs or len(node.args) > 4:
        return None
    starts_at_0 = len(node.args) < 3 or node.args[2] in (0, None)
    return source if starts_at_0 and _shape(node) == _shape(source) else None
