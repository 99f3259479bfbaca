"""A small pattern language over FX graphs that keeps the reason of a failed match.

A pattern is a value with `match(node, bindings)`, which returns bindings (name -> node or number) or a
`Mismatch` that says where it failed, what was expected there and what was found. Scalars are captured,
never enumerated: one pattern matches every eps. Only structure is matched; module names play no part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.fx as fx

aten = torch.ops.aten
prims = torch.ops.prims

Bound = fx.Node | float | int
Bindings = Mapping[str, Bound]
Argument = object
"""Any argument that FX allows: a node, a number, a list, a dtype, None, ..."""

CAST = frozenset({prims.convert_element_type.default, aten._to_copy.default})
ADD = frozenset({aten.add.Tensor, aten.add.Scalar})
MUL = frozenset({aten.mul.Tensor, aten.mul.Scalar})
CLAMP = frozenset(
    {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp_min.Tensor, aten.clamp_max.Tensor}
)
"""Torch 2.15 passes a bound that is a float of the program as a tensor, earlier releases compile for its value."""
SHAPE_ONLY = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.alias.default,
        aten.detach.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)
"""Ops that keep every element and the order of them."""


@dataclass(frozen=True)
class Mismatch:
    """Why a pattern does not match: at which node, what it wanted, what is there."""

    node: str
    expected: str
    found: str
    depth: int = 0

    def __str__(self) -> str:
        return f"at {self.node}: expected {self.expected}, found {self.found}"


class Pattern(Protocol):
    def match(self, node: Argument, bindings: Bindings, depth: int = 0) -> Bindings | Mismatch: ...


def describe(value: Argument) -> str:
    """A node or scalar in a few words for a reason."""
    if isinstance(value, fx.Node):
        return target_name(value) if value.op == "call_function" else f"{value.op} {value.name}"
    return repr(value)


def target_name(node: fx.Node) -> str:
    """The name of what a node calls or holds, alike in every process: texts of Python's functions hold an address."""
    target = node.target
    if isinstance(target, str | torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(target)
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def _name(value: Argument) -> str:
    return value.name if isinstance(value, fx.Node) else repr(value)


@dataclass(frozen=True)
class Any:
    """Any node, bound to `name`; where the name is bound already, the same node again."""

    name: str

    def match(self, node: Argument, bindings: Bindings, depth: int = 0) -> Bindings | Mismatch:
        if not isinstance(node, fx.Node):
            return Mismatch(_name(node), f"a tensor ({self.name})", describe(node), depth)
        bound = bindings.get(self.name)
        if bound is None:
            return {**bindings, self.name: node}
        if bound is node:
            return bindings
        return Mismatch(node.name, f"{self.name} = {describe(bound)} again", describe(node), depth)


@dataclass(frozen=True)
class Number:
    """Any Python number, bound to `name`."""

    name: str

    def match(self, node: Argument, bindings: Bindings, depth: int = 0) -> Bindings | Mismatch:
        if isinstance(node, bool) or not isinstance(node, int | float):
            return Mismatch(_name(node), f"a number ({self.name})", describe(node), depth)
        return {**bindings, self.name: node}


@dataclass(frozen=True)
class Scalar:
    """Any Python number, or a tensor without dimensions, bound to `name`."""

    name: str

    def match(self, node: Argument, bindings: Bindings, depth: int = 0) -> Bindings | Mismatch:
        if not isinstance(node, fx.Node):
            return Number(self.name).match(node, bindings, depth)
        value = tensor_of(node)
        if value is None or value.ndim != 0:
            return Mismatch(node.name, f"a scalar ({self.name})", describe(node), depth)
        return {**bindings, self.name: node}


@dataclass(frozen=True)
class Equal:
    """An argument equal to `value` (a number, a bool)."""

    value: Argument

    def match(self, node: Argument, bindings: Bindings, depth: int = 0) -> Bindings | Mismatch:
        return bindings if node == self.value else Mismatch(_name(node), repr(self.value), describe(node), depth)


@dataclass(frozen=True)
class OneDim:
    """A list of one dimension, bound to `name`; that it is the last one is for the caller to check with the shape.

    Where the name is bound already, the same dimension again.
    """

    name: str = "dim"

    def match(self, node: Argument, bindings: Bindings, depth: int = 0) -> Bindings | Mismatch:
        dims = list(node) if isinstance(node, list | tuple) else [node]
        if len(dims) != 1 or not isinstance(dims[0], int):
            return Mismatch(_name(node), "one dimension", describe(node), depth)
        bound = bindings.get(self.name, dims[0])
        if bound != dims[0]:
            return Mismatch(_name(node), f"dimension {bound} again", describe(node), depth)
        return {**bindings, self.name: dims[0]}


@dataclass(frozen=True)
class Op:
    """A call of one of `targets` whose leading positional arguments match `arguments`."""

    targets: frozenset[object]
    arguments: tuple[Pattern, ...]
    commutes: bool = False
    """Try the first two arguments in both orders."""
    name: str = ""
    """Bind the node itself, if given."""

    def match(self, node: Argument, bindings: Bindings, depth: int = 0) -> Bindings | Mismatch:
        if not isinstance(node, fx.Node) or node.target not in self.targets:
            wanted = " or ".join(sorted(str(target) for target in self.targets))
            return Mismatch(_name(node), wanted, describe(node), depth)
        if "alpha" in node.kwargs:  # a sum that takes its second operand several times
            return Mismatch(node.name, "no factor", f"alpha {node.kwargs['alpha']}", depth)
        if len(node.args) < len(self.arguments):
            return Mismatch(node.name, f"{len(self.arguments)} arguments", f"{len(node.args)}", depth)
        orders = [tuple(node.args)]
        if self.commutes:
            orders.append((node.args[1], node.args[0], *node.args[2:]))
        deepest: Mismatch | None = None
        for arguments in orders:
            result = self._match_arguments(arguments, bindings, depth + 1)
            if not isinstance(result, Mismatch):
                return {**result, self.name: node} if self.name else result
            if deepest is None or result.depth > deepest.depth:
                deepest = result
        assert deepest is not None
        return deepest

    def _match_arguments(self, arguments: tuple[Argument, ...], bindings: Bindings, depth: int) -> Bindings | Mismatch:
        for pattern, argument in zip(self.arguments, arguments, strict=False):
            result = pattern.match(argument, bindings, depth)
            if isinstance(result, Mismatch):
                return result
            bindings = result
        return bindings


@dataclass(frozen=True)
class OneOf:
    """The first alternative that matches; the deepest reason if none does."""

    alternatives: tuple[Pattern, ...]

    def match(self, node: Argument, bindings: Bindings, depth: int = 0) -> Bindings | Mismatch:
        deepest: Mismatch | None = None
        for alternative in self.alternatives:
            result = alternative.match(node, bindings, depth)
            if not isinstance(result, Mismatch):
                return result
            if deepest is None or result.depth > deepest.depth:
                deepest = result
        assert deepest is not None
        return deepest


@dataclass(frozen=True)
class Where:
    """`pattern`, and then a condition on what it bound; `expected` says the condition in words."""

    pattern: Pattern
    condition: Callable[[Bindings], bool]
    expected: str

    def match(self, node: Argument, bindings: Bindings, depth: int = 0) -> Bindings | Mismatch:
        result = self.pattern.match(node, bindings, depth)
        if isinstance(result, Mismatch) or self.condition(result):
            return result
        return Mismatch(_name(node), self.expected, describe(node), depth + 1)


def call(target: object, *arguments: Pattern) -> Op:
    return Op(frozenset({target}), arguments)


def add(a: Pattern, b: Pattern) -> Op:
    return Op(ADD, (a, b), commutes=True)


def mul(a: Pattern, b: Pattern) -> Op:
    return Op(MUL, (a, b), commutes=True)


def item(source: Pattern, index: int) -> Op:
    """`source[index]` of an op with several results."""
    return Op(frozenset({operator.getitem}), (source, Equal(index)))


def is_call(node: Argument, targets: frozenset[object]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def skip_shapes(node: fx.Node) -> fx.Node:
    """The node whose elements `node` holds, under views."""
    while is_call(node, SHAPE_ONLY) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


_ROUNDING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def is_rounding(node: Argument) -> bool:
    """True for a cast that changes values by rounding at most. Casts to integers, booleans and 8-bit floats do not."""
    source = node.args[0] if isinstance(node, fx.Node) and is_call(node, CAST) else None
    values = [tensor_of(each) for each in (node, source) if isinstance(each, fx.Node)]
    return len(values) == 2 and all(value is not None and value.dtype in _ROUNDING for value in values)


def skip_casts(node: fx.Node) -> fx.Node:
    """The node of as many dimensions whose values `node` holds up to rounding, under views and dtype casts."""
    value = tensor_of(node)
    found, under = node, node
    while (is_call(under, SHAPE_ONLY) or is_rounding(under)) and isinstance(under.args[0], fx.Node):
        under = under.args[0]
        below = tensor_of(under)
        if value is not None and below is not None and below.ndim == value.ndim:
            found = under
    return found


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """Return the fake tensor with a node's shape and dtype, if it makes one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
