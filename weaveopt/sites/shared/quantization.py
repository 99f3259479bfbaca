"""Matcher of the e4m3 quantization of a norm's rows, as models with FP8 linears write it before their GEMMs.

    scale = amax(abs(rows), -1, keepdim=True) / 448        # per token; static: one value that the model stores
    clamp(rows / scale, -448, 448).to(float8_e4m3fn)

in any of the orders that frameworks write it: through fp32 or not, divided by the scale or multiplied with its inverse,
least value of amax or of the scale, over views. What nodes hold is followed as a value (`factor * amax ** power`), so
steps are not enumerated. Every linear may have its own copy of the steps.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
import torch.fx as fx

from weaveopt.graph.pattern import CAST, CLAMP, MUL, SHAPE_ONLY, Argument, aten, describe, is_call, prims, tensor_of
from weaveopt.graph.scalars import number_of
from weaveopt.graph.splice import call_after, last_of
from weaveopt.records.candidate import Rejection
from weaveopt.records.norm import Quant

LARGEST = 448.0
"""Largest finite e4m3 value."""
KERNEL_LEAST_AMAX = 1e-12
"""The op's lower bound of a row's largest value."""
LEAST_AMAX = 1e-4
"""Largest lower bound of amax that a model may use: rows of a norm are smaller only if they are zeros."""
PER_ROW_SCALE = 1.0 / LARGEST

_CLAMP_MAX = frozenset({aten.clamp_max.default, aten.clamp_max.Tensor})
_DIV = frozenset({aten.div.Tensor, aten.div.Scalar})
_RECIPROCAL = frozenset({aten.reciprocal.default})
_SAME_ELEMENTS = frozenset({aten.clone.default, aten.alias.default, aten.detach.default})
_VIEW = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_MAXIMUM = frozenset({aten.amax.default, aten.max.dim})
_ELEMENTWISE = CLAMP | _DIV | CAST | MUL | SHAPE_ONLY | {aten.minimum.default, aten.maximum.default}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _ValueKind(Enum):
    ROWS = auto()
    MAGNITUDE = auto()
    """Absolute values of the rows."""
    MAXIMUM_AND_INDEX = auto()
    ROW_VALUE = auto()
    """One value a row: `factor * max(amax, least) ** power`."""
    SCALED = auto()
    """Rows over a scale, not yet or half clamped."""
    E4M3 = auto()


@dataclass(frozen=True)
class _Held:
    """Contents of a node as a function of the rows."""

    kind: _ValueKind
    path: tuple[fx.Node, ...] = ()
    """Views since the norm's output, and the reduction to one value a row: with them a result gets the node's shape."""
    factor: float = 1.0
    power: int = 1
    least: float = 0.0
    static: fx.Node | None = None
    """The stored scale that rows were divided by, or its inverse, where it is not one a row."""
    inverted: bool = False
    above: bool = False
    """Clamped to -448 from below."""
    below: bool = False
    numbers: tuple[Argument, ...] = ()
    """Bounds and divisors that were taken as numbers."""

    @property
    def is_row_scale(self) -> bool:
        is_scale = self.kind is _ValueKind.ROW_VALUE and self.power == 1
        return is_scale and math.isclose(self.factor, PER_ROW_SCALE, rel_tol=1e-6)


@dataclass(frozen=True)
class Place:
    """A node that one of the op's results stands for, and how the result gets its shape."""

    node: fx.Node
    path: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Quantized:
    """A quantization whose steps read the norm's rows, and that nothing else does."""

    quant: Quant
    static: fx.Node | None
    """`static`: the scale, or its inverse: one value, stored by the model."""
    inverted: bool
    rows: tuple[Place, ...]
    """The quantized rows, where they are read."""
    scales: tuple[Place, ...]
    """`per_token`: the rows' scales, where they are read."""
    nodes: frozenset[fx.Node]
    """Steps of the quantization; only `rows` and `scales` have other consumers."""
    least: float
    """Lower bound of a row's largest magnitude; 0 if there is none."""
    narrow: bool
    """True if a step is rounded to 16 bits."""
    numbers: tuple[Argument, ...]
    """Arguments of the steps that were taken as numbers: floats of the program may be among them."""

    @property
    def text(self) -> str:
        return " -> e4m3 per token" if self.quant is Quant.PER_TOKEN else " -> e4m3 static"

    @property
    def rounding(self) -> tuple[str, ...]:
        """Describe how the op rounds differently from the model, a line for each difference."""
        lines = [
            "normalized rows are rounded to the activations' dtype, then multiplied in fp32 with the inverse scale"
        ]
        if self.quant is Quant.PER_TOKEN and self.least != KERNEL_LEAST_AMAX:
            bound = f"{self.least:g}" if self.least else "not bounded"
            lines.append(f"the largest value of a row, {bound} from below, is bounded by {KERNEL_LEAST_AMAX:g}")
        if self.narrow:
            lines.append("scale and quotient of the quantization are not rounded to 16 bits")
        return tuple(lines)


def find_quantized(output: fx.Node) -> Quantized | Rejection | None:
    """How the rows of `output` are quantized, why the op cannot do it, or None where nothing quantizes them."""
    held = _without_derived(_follow(output))
    others = _other_readers(held)
    rows = {node for node, value in held.items() if value.kind is _ValueKind.E4M3}
    if not rows and not any(_leads_to_fp8(reader) for _, reader in others):
        return None
    if others:
        # The step that is not known, rather than what follows from it.
        node, reader = min(others, key=lambda pair: held[pair[0]].kind is _ValueKind.ROWS)
        message = "not only a quantization that the kernels do reads the rows"
        return Rejection("read_by_others", message, (("node", node.name), ("read_by", describe(reader))))
    scales = {(held[node].static, held[node].inverted) for node in rows}
    if len(scales) > 1:
        return Rejection("scales_differ", "the rows are quantized by several scales", (("num_scales", len(scales)),))
    least = max(value.least for value in held.values())
    if least > LEAST_AMAX:
        message = "the largest value of a row is kept from below by more than the kernels support"
        return Rejection("scale_bound", message, (("least", least), ("largest_allowed", LEAST_AMAX)))
    ((static, inverted),) = scales
    return Quantized(
        quant=Quant.PER_TOKEN if static is None else Quant.STATIC,
        static=static,
        inverted=inverted,
        rows=_read(held, rows),
        scales=_read(held, {node for node, value in held.items() if value.is_row_scale}),
        nodes=frozenset(held) - {output},
        least=least,
        narrow=any(_is_narrow(node, value) for node, value in held.items()),
        numbers=tuple(number for value in held.values() for number in value.numbers),
    )


def _follow(output: fx.Node) -> dict[fx.Node, _Held]:
    """Follow the quantization's steps from `output`: the contents of every node that they compute."""
    held = {output: _Held(_ValueKind.ROWS)}
    value = tensor_of(output)
    if value is None or value.ndim < 2:
        return held
    pending = [output]
    while pending:
        # A quotient is looked at again when its second operand is known.
        for user in heapq.heappop(pending).users:
            step = None if user in held else _step(user, held, value.shape[-1])
            if step is not None:
                held[user] = step
                heapq.heappush(pending, user)
    return held


def _without_derived(held: dict[fx.Node, _Held]) -> dict[fx.Node, _Held]:
    """`held` without what is made of the scales and read by others: the graph goes on computing that from them."""
    kept = dict(held)
    for node in sorted(held, reverse=True):
        if _is_made_of_scales(node, held) and any(user not in kept for user in node.users):
            del kept[node]
    return kept


def _is_made_of_scales(node: fx.Node, held: Mapping[fx.Node, _Held]) -> bool:
    """True if `node` holds a value for each row that is computed from the row's scale, but is not that scale."""
    if held[node].is_row_scale:
        return False
    source = node.args[0] if node.args else None
    while isinstance(source, fx.Node) and source in held and held[source].kind is _ValueKind.ROW_VALUE:
        if held[source].is_row_scale:
            return held[node].kind is _ValueKind.ROW_VALUE
        source = source.args[0]
    return False


def _step(node: fx.Node, held: Mapping[fx.Node, _Held], hidden: int) -> _Held | None:
    """Return the contents of `node`, or None if it is no step of a quantization."""
    if is_call(node, MUL | _DIV):
        return _product(node, held)
    source = held.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if source is None:
        return None
    if is_call(node, _SAME_ELEMENTS):
        return source
    if is_call(node, SHAPE_ONLY):
        return _reshaped(node, source, hidden)
    if is_call(node, CAST):
        return _cast(node, source)
    if is_call(node, CLAMP):
        return _clamped(node, source)
    match source.kind:
        case _ValueKind.ROWS if is_call(node, frozenset({aten.abs.default})):
            return replace(source, kind=_ValueKind.MAGNITUDE)
        case _ValueKind.MAGNITUDE if is_call(node, _MAXIMUM) and _is_over_rows(node):
            kind = _ValueKind.MAXIMUM_AND_INDEX if node.target is aten.max.dim else _ValueKind.ROW_VALUE
            return replace(source, kind=kind, path=(*source.path, node))
        case _ValueKind.MAXIMUM_AND_INDEX if is_call(node, frozenset({operator.getitem})) and node.args[1] == 0:
            return replace(source, kind=_ValueKind.ROW_VALUE)
        case _ValueKind.ROW_VALUE if is_call(node, _RECIPROCAL):
            return _inverse(source)
    return None


def _inverse(value: _Held) -> _Held:
    return replace(value, factor=1.0 / value.factor, power=-value.power)


def _reshaped(node: fx.Node, source: _Held, hidden: int) -> _Held | None:
    """Follow a view, which may only split the tokens differently: rows stay rows."""
    shape = _shape(node)
    if source.kind is _ValueKind.ROW_VALUE or (is_call(node, _VIEW) and len(shape) > 1 and shape[-1] == hidden):
        return replace(source, path=(*source.path, node))
    return None


def _cast(node: fx.Node, source: _Held) -> _Held | None:
    value = tensor_of(node)
    if value is None or source.kind is _ValueKind.E4M3:
        return None
    if value.dtype in _FLOATS:
        return source
    saturated = source.kind is _ValueKind.SCALED and source.above and source.below
    return replace(source, kind=_ValueKind.E4M3) if saturated and value.dtype is torch.float8_e4m3fn else None


def _clamped(node: fx.Node, source: _Held) -> _Held | None:
    names = ("max",) if is_call(node, _CLAMP_MAX) else ("min", "max")
    arguments = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    bounds = {name: each for name, each in arguments.items() if each is not None}
    numbers = {name: number_of(each) for name, each in bounds.items()}
    least = numbers.get("min")
    read = replace(source, numbers=(*source.numbers, *bounds.values()))
    if source.kind is _ValueKind.ROW_VALUE and source.power == 1 and "max" not in bounds and least is not None:
        return replace(read, least=max(source.least, least / source.factor))
    within = numbers.get("min", -LARGEST) == -LARGEST and numbers.get("max", LARGEST) == LARGEST
    if source.kind is not _ValueKind.SCALED or not within:
        return None
    return replace(read, above=source.above or "min" in bounds, below=source.below or "max" in bounds)


def _is_over_rows(node: fx.Node) -> bool:
    """True if a reduction is over the last dimension only."""
    dims = node.args[1] if len(node.args) > 1 else []
    found = list(dims) if isinstance(dims, list | tuple) else [dims]
    return len(found) == 1 and found[0] in (-1, len(_shape(node.args[0])) - 1)


def _product(node: fx.Node, held: Mapping[fx.Node, _Held]) -> _Held | None:
    """Follow a multiplication or division: a row value by a number, or rows by their scale or its inverse."""
    if node.kwargs or len(node.args) != 2:
        return None
    divides = is_call(node, _DIV)
    a, b = node.args
    if not divides and isinstance(b, fx.Node) and b in held and held[b].kind is _ValueKind.ROWS:
        a, b = b, a
    left = held.get(a) if isinstance(a, fx.Node) else None
    if left is None:
        return None
    number = number_of(b)
    if left.kind is _ValueKind.ROW_VALUE and number is not None and number > 0:
        factor = left.factor / number if divides else left.factor * number
        return replace(left, factor=factor, numbers=(*left.numbers, b))
    if left.kind is not _ValueKind.ROWS or not isinstance(b, fx.Node):
        return None
    right = held.get(b)
    if right is None:
        known = is_stored_value(b) and _shape(node) == _shape(a)
        return replace(left, kind=_ValueKind.SCALED, static=b, inverted=not divides) if known else None
    scale = right if divides else _inverse(right)
    if not scale.is_row_scale or _shape(b) != (*_shape(a)[:-1], 1):
        return None
    return replace(left, kind=_ValueKind.SCALED)


def is_stored_value(node: fx.Node) -> bool:
    """True if `node` is a single value stored before the graph runs, or computed from one such value alone."""
    value = tensor_of(node)
    if value is None or value.dtype not in _FLOATS or any(size != 1 for size in _shape(node)):
        return False
    while is_call(node, CAST | SHAPE_ONLY | MUL | _DIV | _SAME_ELEMENTS | _RECIPROCAL):
        source, *rest = node.args
        if not isinstance(source, fx.Node) or any(isinstance(argument, fx.Node) for argument in rest):
            return False
        node = source
    return node.op in ("placeholder", "get_attr")


def _shape(node: object) -> tuple[int | str, ...]:
    """Sizes that compare without guards: numbers, or symbols as text. Empty where `node` makes no tensor."""
    value = tensor_of(node) if isinstance(node, fx.Node) else None
    return () if value is None else tuple(size if isinstance(size, int) else str(size) for size in value.shape)


def _other_readers(held: Mapping[fx.Node, _Held]) -> list[tuple[fx.Node, fx.Node]]:
    """Return the nodes that a rewrite removes and their consumers outside the quantization."""
    static = any(value.static is not None for value in held.values())
    return [
        (node, user)
        for node, value in held.items()
        if value.kind is not _ValueKind.E4M3 and (static or not value.is_row_scale)
        for user in node.users
        if user not in held
    ]


def _leads_to_fp8(node: fx.Node, steps: int = 6) -> bool:
    """True if a quantization that this module does not recognize starts at `node`."""
    value = tensor_of(node)
    if value is None or not is_call(node, _ELEMENTWISE):
        return False
    if value.dtype.is_floating_point and value.dtype.itemsize == 1:
        return True
    return steps > 0 and any(_leads_to_fp8(user, steps - 1) for user in node.users)


def _read(held: Mapping[fx.Node, _Held], nodes: set[fx.Node]) -> tuple[Place, ...]:
    """Return those of `nodes` that have consumers outside the quantization, last first."""
    outer = [node for node in sorted(nodes, reverse=True) if any(user not in held for user in node.users)]
    return tuple(Place(node, held[node].path) for node in outer)


def _is_narrow(node: fx.Node, value: _Held) -> bool:
    """True if a scale or quotient is rounded to 16 bits; the largest magnitude of a row is not, as it is an element."""
    made = tensor_of(node)
    computed = value.kind is _ValueKind.SCALED or (
        value.kind is _ValueKind.ROW_VALUE and (value.factor, value.power) != (1.0, 1)
    )
    return computed and made is not None and made.dtype.itemsize == 2


def stored_scale(graph: fx.Graph, quantized: Quantized) -> fx.Node | None:
    """Return the scale that all rows are divided by, as a scalar; None if every row has a scale of its own."""
    scale = quantized.static
    if scale is None:
        return None
    if _shape(scale):
        scale = call_after(graph, last_of(graph, [scale]), aten.view.default, (scale, []), like=scale)
    if quantized.inverted:
        scale = call_after(graph, last_of(graph, [scale]), aten.reciprocal.default, (scale,), like=scale)
    return scale


def shaped_like(graph: fx.Graph, place: Place, result: fx.Node) -> fx.Node:
    """`result`, in the shape and dtype of `place.node`.

    It holds quantized rows, or a scale for each of them [..., 1]; its tokens are divided as in the norm's output.
    """
    result_value, wanted = tensor_of(result), tensor_of(place.node)
    assert result_value is not None and wanted is not None
    one_a_row = result_value.dtype is not torch.float8_e4m3fn
    reduced = False
    for step in place.path:
        target, rest = step.target, step.args[1:]
        if is_call(step, _MAXIMUM):
            reduced = True
            if _keeps_dim(step):
                continue
            target, rest = aten.squeeze.dim, (-1,)
        elif one_a_row and not reduced:
            sizes = rest[0]
            assert isinstance(sizes, list | tuple), f"{step.name} is no view"
            rest = ([*sizes[:-1], 1],)
        sources = [result, *(node for node in step.all_input_nodes if node is not step.args[0])]
        result = call_after(graph, last_of(graph, sources), target, (result, *rest), like=step)
    if wanted.dtype is not result_value.dtype:
        cast = prims.convert_element_type.default
        result = call_after(graph, last_of(graph, [result]), cast, (result, wanted.dtype), like=place.node)
    return result


def _keeps_dim(reduction: fx.Node) -> bool:
    positional = reduction.args[2:3] or (reduction.kwargs.get("keepdim", False),)
    return bool(positional[0])
