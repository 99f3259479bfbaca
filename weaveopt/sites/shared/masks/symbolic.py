"""Masks whose sizes differ from call to call, proven for all of them at once, or not at all.

Positions are affine in their indices, `base + step · index`, with symbolic bases; comparing two of them bounds the
distance `j - i` of a key from its query, and bounds are intersected. Torch's ranges of the symbols decide if a bound
holds for every size that the graph is compiled for, which adds no guard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from weaveopt.graph.pattern import Argument, is_call, tensor_of
from weaveopt.sites.shared.masks.classes import Mask, MaskKind
from weaveopt.sites.shared.masks.intervals import AND, COMPARE, MIRRORED, SAME

aten = torch.ops.aten
prims = torch.ops.prims

Size = int | torch.SymInt


@dataclass(frozen=True)
class _Affine:
    """An integer tensor: `base + Σ steps[d] · index[d]`, one step for each dimension."""

    base: Size
    steps: tuple[Size, ...]

    def of_rank(self, rank: int) -> _Affine:
        return _Affine(self.base, (0,) * (rank - len(self.steps)) + self.steps)

    @property
    def is_constant(self) -> bool:
        return all(_equal(step, 0) for step in self.steps)


@dataclass(frozen=True)
class _Band:
    """Key `j` is admitted for query `i` where each `low <= j - i` and each `j - i <= high`."""

    lows: tuple[Size, ...] = ()
    highs: tuple[Size, ...] = ()


def prove_for_all_sizes(node: fx.Node, is_inverted: bool, num_queries: Size, num_keys: Size) -> Mask | None:
    """Prove the class of a boolean mask that depends on sizes only, for every value that they may have.

    Only causal masks and windows at a fixed distance, and masks that admit everything; None for all others.
    """
    band = None if is_inverted else _band(node, num_queries)
    if band is None:
        return None
    # Over the whole mask, j - i is least at (last query, first key) and greatest at (first query, last key).
    lows = _strictest([low for low in band.lows if not _known(low <= 1 - num_queries)], is_low=True)
    highs = _strictest([high for high in band.highs if not _known(high >= num_keys - 1)], is_low=False)
    if lows is None or highs is None:
        return None
    if not highs:
        return None if lows else Mask(MaskKind.NONE)
    offset = _number(highs[0])
    window = _number(highs[0] - lows[0] + 1) if lows else 0
    if offset is None or window is None or window < 0 or (lows and window == 0):
        return None
    return Mask(MaskKind.WINDOW if lows else MaskKind.CAUSAL, offset, window=window)


def _known(condition: bool | torch.SymBool) -> bool:
    return bool(statically_known_true(condition))


def _equal(a: Size, b: Size) -> bool:
    return _known(a == b)


def _number(size: Size) -> int | None:
    if isinstance(size, int):
        return size
    expression = size.node.shape_env.simplify(size.node.expr) if size.node.shape_env else size.node.expr
    return int(expression) if expression.is_Integer else None


def _strictest(bounds: list[Size], *, is_low: bool) -> list[Size] | None:
    """The one bound that implies the others; empty for none, None where it is not known which."""
    for bound in bounds:
        if all(_known(bound >= other) if is_low else _known(bound <= other) for other in bounds):
            return [bound]
    return None if bounds else []


def _band(argument: Argument, num_queries: Size) -> _Band | None:
    if not isinstance(argument, fx.Node):
        return None
    node = argument
    if node.target in COMPARE:
        return _compared(node, num_queries)
    if is_call(node, AND):
        parts = [_band(part, num_queries) for part in node.args[:2]]
        if parts[0] is None or parts[1] is None:
            return None
        return _Band(parts[0].lows + parts[1].lows, parts[0].highs + parts[1].highs)
    if is_call(node, SAME | {aten.expand.default}):
        return _band(node.args[0], num_queries)
    if node.target is aten.full.default and node.args[1] is True:
        return _Band()
    return None


def _compared(node: fx.Node, num_queries: Size) -> _Band | None:
    value = tensor_of(node)
    a, b = (_affine(argument) for argument in node.args[:2])
    if value is None or a is None or b is None:
        return None
    rank = max(value.ndim, 2)
    a, b = a.of_rank(rank), b.of_rank(rank)
    name = COMPARE[node.target]
    # a <op> b is `distance <op> bound`, of the distance that the steps make: that of a key from its query, or none.
    bound = b.base - a.base
    steps = [left - right for left, right in zip(a.steps, b.steps, strict=True)]
    if not all(_equal(step, 0) for step in steps[:-2]):
        return None
    by_query, by_key = steps[-2:]
    if _equal(by_query, 0) and _equal(by_key, 0):
        holds = {
            "eq": lambda: bound == 0,
            "ne": lambda: bound != 0,
            "lt": lambda: bound > 0,
            "le": lambda: bound >= 0,
            "gt": lambda: bound < 0,
            "ge": lambda: bound <= 0,
        }
        return _Band() if _known(holds[name]()) else None
    if _equal(by_key, -1):
        by_query, by_key, bound, name = -by_query, 1, -bound, MIRRORED[name]
    if not _equal(by_key, 1) or not (_equal(by_query, -1) or _equal(num_queries, 1)):
        return None
    bands = {
        "lt": _Band(highs=(bound - 1,)),
        "le": _Band(highs=(bound,)),
        "gt": _Band(lows=(bound + 1,)),
        "ge": _Band(lows=(bound,)),
    }
    return bands.get(name)


def _size(argument: Argument) -> Size | None:
    """A size as a number or a symbol: FX keeps symbols as nodes."""
    if isinstance(argument, fx.Node):
        argument = argument.meta.get("val")
    return argument if isinstance(argument, int | torch.SymInt) and not isinstance(argument, bool) else None


def _affine(argument: Argument) -> _Affine | None:
    number = _size(argument)
    if number is not None:
        return _Affine(number, ())
    value = tensor_of(argument) if isinstance(argument, fx.Node) else None
    if not isinstance(argument, fx.Node) or value is None or value.dtype is not torch.int64:
        return None
    rule = _RULES.get(argument.target)
    found = None if rule is None else rule(argument, value.ndim)
    if found is None:
        return None
    alone = [isinstance(size, int) and size == 1 for size in value.shape]  # broadcast: the same number everywhere
    return _Affine(found.base, tuple(0 if one else step for one, step in zip(alone, found.steps, strict=True)))


def _iota(node: fx.Node, rank: int) -> _Affine | None:
    start, step = _size(node.kwargs["start"]), _size(node.kwargs["step"])
    return None if start is None or step is None else _Affine(start, (step,))


def _full(node: fx.Node, rank: int) -> _Affine | None:
    fill = _size(node.args[1])
    return None if fill is None else _Affine(fill, (0,) * rank)


def _sum(node: fx.Node, rank: int) -> _Affine | None:
    a, b = (_affine(argument) for argument in node.args[:2])
    if a is None or b is None or node.kwargs:
        return None
    sign = -1 if node.target is aten.sub.Tensor else 1
    a, b = a.of_rank(rank), b.of_rank(rank)
    return _Affine(a.base + sign * b.base, tuple(x + sign * y for x, y in zip(a.steps, b.steps, strict=True)))


def _unsqueeze(node: fx.Node, rank: int) -> _Affine | None:
    inner, dim = _affine(node.args[0]), _size(node.args[1])
    if inner is None or not isinstance(dim, int):
        return None
    dim %= rank
    return _Affine(inner.base, (*inner.steps[:dim], 0, *inner.steps[dim:]))


def _view(node: fx.Node, rank: int) -> _Affine | None:
    """Follow a view that only adds or removes dimensions of size 1."""
    inner = _affine(node.args[0])
    source, value = tensor_of(node.args[0]), tensor_of(node)  # type: ignore[arg-type]
    if inner is None or source is None or value is None:
        return None
    before, after = ([str(size) for size in tensor.shape] for tensor in (source, value))  # comparing them adds guards
    if [size for size in before if size != "1"] != [size for size in after if size != "1"]:
        return None
    kept = iter([step for size, step in zip(before, inner.steps, strict=True) if size != "1"])
    return _Affine(inner.base, tuple(0 if size == "1" else next(kept) for size in after))


def _expand(node: fx.Node, rank: int) -> _Affine | None:
    inner = _affine(node.args[0])
    return None if inner is None else inner.of_rank(rank)


def _slice(node: fx.Node, rank: int) -> _Affine | None:
    """Follow a slice that starts at a constant index and ends within the dimension."""
    inner = _affine(node.args[0])
    dim, first = (_size(argument) for argument in (*node.args[1:3], *(0, 0)[len(node.args) - 1 :]))
    if inner is None or not isinstance(dim, int) or not isinstance(first, int) or first < 0 or len(node.args) > 4:
        return None
    dim %= rank
    return _Affine(inner.base + first * inner.steps[dim], inner.steps)


def _cat(node: fx.Node, rank: int) -> _Affine | None:
    """One element before the others that is one step less than the first of them: `diff` asks for such a one."""
    parts, dim = node.args[0], _size(node.args[1]) if len(node.args) > 1 else 0
    if not isinstance(parts, list | tuple) or len(parts) != 2 or not isinstance(dim, int):
        return None
    before, after = (_affine(part) for part in parts)
    size = tensor_of(parts[0]) if isinstance(parts[0], fx.Node) else None
    dim %= rank
    if before is None or after is None or size is None or not _equal(size.shape[dim], 1):
        return None
    same = all(_equal(x, y) for at, (x, y) in enumerate(zip(before.steps, after.steps, strict=True)) if at != dim)
    return _Affine(before.base, after.steps) if same and _equal(before.base + after.steps[dim], after.base) else None


def _cumsum(node: fx.Node, rank: int) -> _Affine | None:
    """Follow a cumulative sum of a comparison that holds nowhere: 0 everywhere."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target not in COMPARE or COMPARE[source.target] not in ("ne", "eq"):
        return None
    a, b = (_affine(argument) for argument in source.args[:2])
    if a is None or b is None or not a.is_constant or not b.is_constant:
        return None
    fails = a.base != b.base if COMPARE[source.target] == "eq" else a.base == b.base
    return _Affine(0, (0,) * rank) if _known(fails) else None


def _index(node: fx.Node, rank: int) -> _Affine | None:
    """Follow indexing at affine positions that do not count from the end."""
    source, places = _affine(node.args[0]), node.args[1]
    if source is None or not isinstance(places, list | tuple) or len(places) != len(source.steps):
        return None
    found = _Affine(source.base, (0,) * rank)
    for step, place in zip(source.steps, places, strict=True):
        if _equal(step, 0) and place is not None:
            continue
        at = _affine(place)
        if at is None or not all(_known(part >= 0) for part in (at.base, *at.steps)):
            return None
        at = at.of_rank(rank)
        steps = tuple(own + step * other for own, other in zip(found.steps, at.steps, strict=True))
        found = _Affine(found.base + step * at.base, steps)
    return found


_RULES: dict[object, Callable[[fx.Node, int], _Affine | None]] = {
    prims.iota.default: _iota,
    aten.full.default: _full,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.cumsum.default: _cumsum,
    aten.index.Tensor: _index,
}
