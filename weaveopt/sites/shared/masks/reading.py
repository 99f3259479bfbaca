"""Reader of the mask of an attention call: each node of a graph is read once, however many layers use it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.utils._python_dispatch import _disable_current_modes

from weaveopt.graph.pattern import describe, tensor_of
from weaveopt.records.candidate import Rejection
from weaveopt.sites.shared.masks.bias import BooleanForm, boolean_form
from weaveopt.sites.shared.masks.classes import Mask, MaskKind, classify
from weaveopt.sites.shared.masks.evaluate import SHAPES_ONLY, Unreadable, Values, known_constant
from weaveopt.sites.shared.masks.intervals import find_intervals
from weaveopt.sites.shared.masks.symbolic import prove_for_all_sizes

Size = int | torch.SymInt
MAX_ELEMENTS = 1 << 30
"""Masks above this that have to be evaluated element by element are not: it would take seconds of every compile."""


@dataclass(frozen=True)
class MaskReading:
    """Compile-time facts of one mask. `reason` says why `mask` is None if it is."""

    mask: Mask | None
    """The class that the mask was proven equal to, for every sequence, head, query and key."""
    admitted: fx.Node | None = None
    """The boolean under a bias (`is_inverted`: its negation), of a shape that broadcasts to the mask's: what can be
    read when the graph runs. None where there is no mask, and where a bias is not made from a boolean."""
    is_inverted: bool = False
    fill: float | None = None
    """Bias on the scores of keys that are not admitted; None if the mask itself is boolean."""
    inputs: tuple[fx.Node, ...] = ()
    """Inputs of the graph on whose values the mask depends."""
    reason: Rejection | None = None

    @property
    def hangs_on_lengths_only(self) -> bool:
        """True if all inputs that the mask depends on are single integers, such as the filled length of a static
        cache."""
        values = [tensor_of(node) for node in self.inputs]
        integers = [value is not None and value.numel() == 1 and not value.is_floating_point() for value in values]
        return bool(integers) and all(integers)


Decided = tuple[Mask | None, Rejection | None, tuple[fx.Node, ...]]
"""Class, reason, and the inputs that a boolean depends on."""


class MaskCache:
    """Cache of the masks read in one graph. Layers share their masks, or the booleans from which each builds its mask.

    Keys hold sizes as text: symbolic ones have no hash.
    """

    def __init__(self) -> None:
        self.readings: dict[tuple[fx.Node | None, bool, str, str], MaskReading] = {}
        self.decided: dict[tuple[fx.Node, bool, str, str], Decided] = {}


def read_mask(
    node: fx.Node | None, is_causal: bool, num_queries: Size, num_keys: Size, cache: MaskCache | None = None
) -> MaskReading:
    """Read what `scaled_dot_product_attention(..., attn_mask=node, is_causal=is_causal)` admits.

    `node`: bool, or a number that is added to the scores, broadcastable to `[batch, heads, num_queries, num_keys]`.
    `is_causal` without a mask aligns at the upper left, as torch does. Nothing in the graph is changed.
    """
    cache = cache if cache is not None else MaskCache()
    key = (node, is_causal, str(num_queries), str(num_keys))
    if key not in cache.readings:
        cache.readings[key] = _read(node, is_causal, num_queries, num_keys, cache)
    return cache.readings[key]


def _read(node: fx.Node | None, is_causal: bool, num_queries: Size, num_keys: Size, cache: MaskCache) -> MaskReading:
    if node is None:
        return _without_mask(is_causal, num_queries, num_keys)
    if is_causal:
        message = "the call has a mask and is_causal, which torch does not define together"
        return MaskReading(None, reason=Rejection("mask_beside_is_causal", message, (("node", node.name),)))
    form = boolean_form(node)
    if isinstance(form, Rejection):
        return MaskReading(None, inputs=hangs_on(node)[0], reason=form)
    key = (form.node, form.is_inverted, str(num_queries), str(num_keys))
    if key not in cache.decided:
        cache.decided[key] = _decide(form, num_queries, num_keys)
    mask, reason, inputs = cache.decided[key]
    return MaskReading(mask, form.node, form.is_inverted, form.fill, inputs, reason)


def _decide(form: BooleanForm, num_queries: Size, num_keys: Size) -> Decided:
    inputs, symbols = hangs_on(form.node)
    value = tensor_of(form.node)
    if value is None or value.dtype is not torch.bool:
        reason = Rejection("mask_unknown", "the condition of the mask is not boolean", (("node", form.node.name),))
        return None, reason, inputs
    if inputs:
        names = ", ".join(placeholder.name for placeholder in inputs)
        return (
            None,
            Rejection("depends_on_input", "the mask hangs on inputs of the graph", (("inputs", names),)),
            inputs,
        )
    if not symbols and isinstance(num_queries, int) and isinstance(num_keys, int):
        with _disable_current_modes(), torch.no_grad():  # whoever compiles has fake tensors switched on
            proven = _prove(form.node, form.is_inverted, num_queries, num_keys)
        return (None, proven, ()) if isinstance(proven, Rejection) else (proven, None, ())
    mask = prove_for_all_sizes(form.node, form.is_inverted, num_queries, num_keys)
    if mask is not None:
        return mask, None, ()
    sizes = ", ".join(symbols) or f"{num_queries} × {num_keys}"
    return (
        None,
        Rejection("symbolic_sizes", "the mask has sizes that differ from call to call", (("sizes", sizes),)),
        (),
    )


def _without_mask(is_causal: bool, num_queries: Size, num_keys: Size) -> MaskReading:
    if not is_causal:
        return MaskReading(Mask(MaskKind.NONE))
    mask = Mask(MaskKind.CAUSAL)
    if not isinstance(num_queries, int) or not isinstance(num_keys, int):
        return MaskReading(mask)
    with _disable_current_modes(), torch.no_grad():
        first, end = mask.bounds(num_queries, num_keys)
        known = classify(first, end, num_queries, num_keys)
    return MaskReading(known) if isinstance(known, Mask) else MaskReading(None, reason=known)


def _prove(node: fx.Node, is_inverted: bool, num_queries: int, num_keys: int) -> Mask | Rejection:
    value = tensor_of(node)
    assert value is not None, f"{node.name} makes no tensor"
    shape = tuple(value.shape)
    wanted = (num_queries, num_keys)[2 - min(len(shape), 2) :]
    if 0 in (*shape, num_queries, num_keys) or any(
        size not in (1, want) for size, want in zip(shape[-2:], wanted, strict=True)
    ):
        text = " × ".join(map(str, shape))
        message = "the mask does not have a bit for each query and key"
        return Rejection(
            "mask_of_other_shape", message, (("shape", text), ("queries", num_queries), ("keys", num_keys))
        )
    try:
        found = find_intervals(node, is_inverted, Values(), MAX_ELEMENTS)
    except Unreadable as unreadable:
        values = (("node", unreadable.node.name), ("op", describe(unreadable.node)), ("elements", math.prod(shape)))
        return Rejection("mask_not_evaluated", "a part of the mask is not evaluated when the graph is compiled", values)
    if found is None:
        message = "some query sees keys that are not one contiguous range"
        return Rejection("keys_not_contiguous", message, (("node", node.name),))
    found = found.over(num_keys)
    lead = (*torch.broadcast_shapes(found.first.shape[:-1]), num_queries)
    return classify(found.first.expand(lead), found.end.expand(lead), num_queries, num_keys)


def hangs_on(node: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[str, ...]]:
    """Return the graph inputs on whose values `node` depends, in graph order, and the symbolic sizes; not inputs of
    which only the shape matters. A constant without a known value counts as an input."""
    seen, pending = {node}, [node]
    inputs: list[fx.Node] = []
    symbols: set[str] = set()
    while pending:
        current = pending.pop()
        value = current.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            symbols.add(str(value))
            continue
        if isinstance(value, torch.Tensor):
            symbols.update(str(size) for size in value.shape if not isinstance(size, int))
        if current.op == "placeholder" or (current.op == "get_attr" and known_constant(current) is None):
            inputs.append(current)
            continue
        if current.target in SHAPES_ONLY:
            continue
        fresh = [source for source in current.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    order = {each: at for at, each in enumerate(node.graph.nodes)} if len(inputs) > 1 else {}
    return tuple(sorted(inputs, key=lambda each: order.get(each, 0))), tuple(sorted(symbols))
