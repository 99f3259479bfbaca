"""Attention of a sequence in parts: each part's queries with the keys up to its end.

A found site is a block: its nodes are copied once for each part, whether it is one call of the library or written out
as GEMMs and a softmax. The keys are those of the part and of the parts before it where the mask is proven to hide all
later ones. Elsewhere a part waits for the keys of all others, which is right with any mask and hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx
from torch.fx.node import Argument
from torch.utils._python_dispatch import _disable_current_modes

from weaveopt.graph.pattern import is_call, tensor_of
from weaveopt.graph.values import argument
from weaveopt.rewrites.token_split.builder import Builder
from weaveopt.rewrites.token_split.cache import ROWS, Available, Caches
from weaveopt.rewrites.token_split.causality import bound_of, is_at_most
from weaveopt.rewrites.token_split.copies import AxisRange, Copied, Copier, NotCopied
from weaveopt.rewrites.token_split.slices import Slices
from weaveopt.rewrites.token_split.values import Cut, Mark, Parts, Value, sizes_of
from weaveopt.sites.attention.matcher import AttentionNodes

aten = torch.ops.aten
prims = torch.ops.prims
QUERIES, KEYS = "queries", "keys"
FLASH = frozenset({aten._scaled_dot_product_flash_attention.default})
MASK_PROVEN, MASK_NOT_PROVEN, CACHE_NOT_KNOWN = "", "mask_not_proven", "cache_form_not_known"


class AttentionParts:
    """Copies of attention sites for the parts of a sequence."""

    def __init__(
        self, builder: Builder, slices: Slices, cut: Cut, value_of: Callable[[fx.Node], Value],
        whole: Callable[[fx.Node], fx.Node],
    ) -> None:  # fmt: skip
        self._builder, self._slices, self._cut = builder, slices, cut
        self._value_of, self._whole = value_of, whole
        self.caches = Caches(builder, cut, value_of, whole)
        self._biases: dict[tuple[int, str, torch.dtype, bool], fx.Node] = {}

    def reason(self, site: AttentionNodes) -> str:
        """Code of the reason why a part needs the keys of later parts; empty where it is proven that it does not."""
        form, reading = site.form, site.reading
        bound = bound_of(form.mask, form.is_causal, reading.mask)
        # A query that sees no key takes the mean of all values if the bias is a finite number, and needs all of them.
        takes_mean = form.sinks is None and reading.fill not in (None, float("-inf"))
        if bound is None or (takes_mean and not _every_query_sees(site)):
            return MASK_NOT_PROVEN
        known = all(self.caches.is_bounded(each, bound) for each in (site.key, site.value))
        return MASK_PROVEN if known else CACHE_NOT_KNOWN

    def parts(self, site: AttentionNodes) -> Parts:
        """The output in parts. Raises `NotCopied` for a site of a form that cannot be copied."""
        if site.form.refused is not None:
            raise NotCopied(site.form.output, site.form.refused.message)
        query = self._value_of(site.form.query)
        if not isinstance(query, Parts) or query.mark != Mark(ROWS):
            raise NotCopied(site.form.query, "queries are not cut along the sequence")
        if site.form.query in (site.key, site.value):
            raise NotCopied(site.form.query, "queries are keys or values too, of which a part has other rows")
        is_bounded = self.reason(site) == MASK_PROVEN
        nodes = tuple(self._part(site, query, index, is_bounded) for index in range(self._cut.num_parts))
        return Parts(nodes, Mark(ROWS))

    def _part(self, site: AttentionNodes, query: Parts, index: int, is_bounded: bool) -> fx.Node:
        form, cut = site.form, self._cut
        length = sizes_of(site.key.meta["val"])[ROWS]
        key, value = (
            self.caches.available(each, index) if is_bounded else Available(self._whole(each), length)
            for each in (site.key, site.value)
        )
        queries = AxisRange(cut.length, *cut.bounds[index : index + 2])
        keys = AxisRange(length, 0, key.size)
        copier = Copier(self._builder, self._slices, {QUERIES: queries, KEYS: keys})
        at_keys = {KEYS: Mark(ROWS)}
        known: dict[fx.Node, Copied] = {
            form.query: Copied(query.nodes[index], {QUERIES: Mark(ROWS)}),
            site.key: Copied(key.node, at_keys),
            site.value: Copied(value.node, at_keys),
        }
        if form.mask is not None:
            known[form.mask] = self._mask(form.mask, queries, keys)

        def read(node: fx.Node) -> Copied:
            if node not in known:
                if node is form.call and form.is_causal and not (index == 0 and key.size == queries.end):
                    known[node] = self._with_bias(node, copier, read, index)
                elif node in site.interior:
                    known[node] = copier.copy(node, read)
                elif isinstance(self._value_of(node), Parts):
                    raise NotCopied(node, "an operand in parts that is neither query, key nor value")
                else:
                    known[node] = Copied(self._whole(node))
            return known[node]

        return read(form.output).node

    def _mask(self, mask: fx.Node, queries: AxisRange, keys: AxisRange) -> Copied:
        """The part's rows and columns of a mask; where the mask has one for all, that one."""
        node = self._whole(mask)
        ndim = len(sizes_of(node.meta["val"]))
        marks: dict[str, Mark] = {}
        for name, span, dim in ((QUERIES, queries, ndim - 2), (KEYS, keys, ndim - 1)):
            if dim >= 0 and sizes_of(node.meta["val"])[dim] != 1:
                node = self._slices.of(node, Mark(dim), span.begin, span.end, span.length)
                marks[name] = Mark(dim)
        return Copied(node, marks)

    def _with_bias(self, call: fx.Node, copier: Copier, read: Callable[[fx.Node], Copied], index: int) -> Copied:
        """A causal call whose first query is not the first: with a bias in place of `is_causal`, which aligns at the
        upper left."""
        names = [each.name for each in call.target._schema.arguments]  # type: ignore[union-attr]
        given = {name: argument(call, name) for name in names}
        operands = [read(given[name]).node for name in ("query", "key", "value")]  # type: ignore[arg-type]
        bias = self._bias(call, operands[0], copier.spans[QUERIES], copier.spans[KEYS], index)
        marks = {QUERIES: Mark(ROWS)}
        if call.target in FLASH:  # which takes no mask
            efficient = aten._scaled_dot_product_efficient_attention.default
            made = self._builder.call(
                efficient, (*operands, bias, False, 0.0, False), call, {"scale": self._scale(call)}
            )
            return Copied(made, marks)
        given["is_causal"] = False
        given["attn_bias" if "attn_bias" in given else "attn_mask"] = bias
        positional = [each.name for each in call.target._schema.arguments if not each.kwarg_only]  # type: ignore[union-attr]
        values = (*operands, *(given[name] for name in positional[3:]))
        named = {name: given[name] for name in names if name not in positional}
        return Copied(self._builder.call(call.target, values, call, named), marks)  # type: ignore[arg-type]

    def _scale(self, call: fx.Node) -> float | None:
        found = argument(call, "scale")
        return found if isinstance(found, float) else None

    def _bias(self, call: fx.Node, query: fx.Node, queries: AxisRange, keys: AxisRange, index: int) -> fx.Node:
        """`where(key <= query, 0, -inf)` `[1, 1, queries, keys]`, expanded over sequences, and heads on GPUs."""
        value = tensor_of(query)
        assert value is not None
        on_gpu = not is_call(call, frozenset({aten._scaled_dot_product_flash_attention_for_cpu.default}))
        key = (index, str(keys.end), value.dtype, on_gpu)
        if key in self._biases:
            return self._biases[key]
        build, size = self._builder.call, self._builder.size
        ints: dict[str, Argument] = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
        rows = build(prims.iota.default, (size(queries.size),), call, {"start": size(queries.begin), "step": 1, **ints})
        columns = build(prims.iota.default, (size(keys.size),), call, {"start": 0, "step": 1, **ints})
        row, column = (build(aten.unsqueeze.default, each, call) for each in ((rows, 1), (columns, 0)))
        admitted = build(aten.le.Tensor, (column, row), call)
        kind: dict[str, Argument] = {
            "dtype": value.dtype,
            "device": value.device,
            "layout": torch.strided,
            "pin_memory": False,
        }
        zero, never = (build(aten.full.default, ([], each), call, kind) for each in (0.0, float("-inf")))
        bias = build(aten.where.self, (admitted, zero, never), call)
        if on_gpu and isinstance(keys.size, int):
            padded = build(aten.constant_pad_nd.default, (bias, [0, -keys.size % 16], 0.0), call)
            bias = build(aten.slice.Tensor, (padded, -1, 0, keys.size), call)
        for _ in range(2):
            bias = build(aten.unsqueeze.default, (bias, 0), call)
        lead = [size(each) for each in sizes_of(value)[:2]]
        shape = [lead[0], lead[1] if on_gpu else 1, size(queries.size), size(keys.size)]
        self._biases[key] = build(aten.expand.default, (bias, shape), call)
        return self._biases[key]


def _every_query_sees(site: AttentionNodes) -> bool:
    """True if the mask is proven to admit a key for every query."""
    mask = site.reading.mask
    rows, columns = (sizes_of(each.meta["val"])[ROWS] for each in (site.form.query, site.key))
    if mask is None:
        return False
    if isinstance(rows, int) and isinstance(columns, int):
        with _disable_current_modes():  # whoever compiles has fake tensors switched on
            return mask.every_query_sees(rows, columns)
    # A query's own position is among the keys where these are as many, and admitted by every mask of that kind.
    return mask.offset == 0 and mask.num_filled is None and is_at_most(rows, columns)
