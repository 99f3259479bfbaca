"""Proof that no query of a mask sees a key beyond its own position, whatever else the mask hides.

Positions are vectors `root + offset + index`, in which `root` is one number that the graph gets as an input (the filled
length of a static cache) or nothing. A mask that is a conjunction sees at most what each of its parts sees, so one
comparison of the positions of keys with those of queries is enough: padding and packed sequences only hide more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from weaveopt.graph.arrangement import Size, size_of
from weaveopt.graph.pattern import CAST, is_call, tensor_of
from weaveopt.rewrites.token_split.values import simplified
from weaveopt.sites.shared.masks import Mask
from weaveopt.sites.shared.masks.bias import BooleanForm, boolean_form
from weaveopt.sites.shared.masks.classes import MaskKind
from weaveopt.sites.shared.masks.intervals import AND, COMPARE, MIRRORED, SAME

aten = torch.ops.aten
_WHOLE = (torch.int32, torch.int64)
"""Dtypes that hold every position: narrower ones wrap, and floats and booleans give several positions one number."""
_VIEWS = frozenset({aten.view.default, aten.unsqueeze.default, aten.expand.default}) | CAST | SAME


@dataclass(frozen=True)
class Positions:
    """`root + offset + index` along dimension `dim`, counted from the last; the same number throughout without it."""

    offset: Size
    root: fx.Node | None = None
    dim: int | None = None


@dataclass(frozen=True)
class Bound:
    """Query `i` sees keys up to `root + high + i`."""

    high: Size
    root: fx.Node | None = None


def bound_of(mask: fx.Node | None, is_causal: bool, proven: Mask | None) -> Bound | None:
    """The last key that a query may see, relative to the query; None where nothing bounds it for all sizes."""
    if proven is not None and proven.kind in (MaskKind.CAUSAL, MaskKind.WINDOW, MaskKind.CHUNKED):
        return Bound(proven.offset)
    if mask is None:
        return Bound(0) if is_causal else None
    form = boolean_form(mask)
    return _bound(form.node) if isinstance(form, BooleanForm) and not form.is_inverted else None


def _bound(node: object) -> Bound | None:
    if not isinstance(node, fx.Node):
        return None
    if is_call(node, AND):
        return _bound(node.args[0]) or _bound(node.args[1])
    if is_call(node, SAME | {aten.expand.default}):
        return _bound(node.args[0])
    if node.target not in COMPARE:
        return None
    a, b = positions(node.args[0]), positions(node.args[1])
    name = COMPARE[node.target]
    if a is None or b is None:
        return None
    if (a.dim, b.dim) == (-2, -1):
        a, b, name = b, a, MIRRORED[name]
    if (a.dim, b.dim) != (-1, -2) or name not in ("le", "lt") or a.root is not None:
        return None
    return Bound(simplified(b.offset - a.offset - (name == "lt")), b.root)


def positions(value: object) -> Positions | None:
    """Positions that an integer value holds; None where it is of another form."""
    if isinstance(value, int):
        return Positions(value)
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    if isinstance(found, torch.SymInt):
        return Positions(size_of(found))
    if not isinstance(value, fx.Node) or not isinstance(found, torch.Tensor):
        return None
    if found.dtype not in _WHOLE:
        return None
    if value.op == "placeholder":
        return Positions(0, value) if found.numel() == 1 else None
    if is_call(value, frozenset({torch.ops.prims.iota.default})):
        start, step = value.kwargs["start"], value.kwargs["step"]
        first = positions(start)
        if step != 1 or first is None or first.root is not None:
            return None
        return Positions(first.offset, None, None if str(found.shape[0]) == "1" else -1)  # one may be repeated
    if is_call(value, frozenset({aten.add.Tensor, aten.sub.Tensor})) and not value.kwargs:
        return _sum(value)
    if is_call(value, frozenset({aten.index.Tensor})):
        return _indexed(value)
    return _moved(value, found) if is_call(value, _VIEWS) else None


def _sum(node: fx.Node) -> Positions | None:
    a, b = positions(node.args[0]), positions(node.args[1])
    if a is None or b is None or (a.dim is not None and b.dim is not None):
        return None
    if node.target is aten.sub.Tensor:
        if b.root is not None or b.dim is not None:
            return None
        return replace(a, offset=simplified(a.offset - b.offset))
    if a.root is not None and b.root is not None:
        return None
    dim = a.dim if a.dim is not None else b.dim
    return Positions(simplified(a.offset + b.offset), a.root if a.root is not None else b.root, dim)


def _indexed(node: fx.Node) -> Positions | None:
    """Positions read at positions: `p[..., q]` of a vector that is the same for every sequence."""
    source, places = positions(node.args[0]), node.args[1]
    value = tensor_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if source is None or source.dim is None or value is None or not isinstance(places, list | tuple):
        return None
    if len(places) != value.ndim:
        return None
    at = positions(places[source.dim])
    if at is None or at.root is not None or not is_at_most(0, at.offset):  # places before the first count from the end
        return None
    return replace(at, offset=at.offset + source.offset, root=source.root)


def is_at_most(a: Size, b: Size) -> bool:
    """True if `a <= b` whatever the symbols are."""
    difference = simplified(b - a)
    return difference >= 0 if isinstance(difference, int) else bool(difference.is_nonnegative)


def _moved(node: fx.Node, value: torch.Tensor) -> Positions | None:
    """A view that only adds dimensions of one element, or repeats; a cast."""
    inner = positions(node.args[0])
    source = tensor_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if inner is None or inner.dim is None or source is None:
        return inner
    length = str(source.shape[inner.dim])
    ranked = [str(size) for size in value.shape]
    if is_call(node, frozenset({aten.unsqueeze.default})):
        added = int(node.args[1]) % value.ndim - value.ndim  # type: ignore[arg-type]
        return replace(inner, dim=inner.dim - (added >= inner.dim))
    if is_call(node, frozenset({aten.view.default})):
        places = [at for at, size in enumerate(ranked) if size != "1"]
        return replace(inner, dim=places[0] - value.ndim) if [ranked[at] for at in places] == [length] else None
    return inner
